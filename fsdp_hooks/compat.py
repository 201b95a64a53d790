"""Every private name of FSDP2 that this package uses, in one place.

Read in torch 2.11.0, 2.12.0, 2.13.0, 2.14.1 and 2.15.0, torch/distributed/fsdp/_fully_shard/ and torch/_tensor.py.
2.11 keeps one parameter group a state (``_fsdp_param_group``), 2.12 and later a list (``_fsdp_param_groups``).
Nothing here changes torch.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, register_fsdp_forward_method
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Placement, Shard, _StridedShard

from collective_identity.compat import torch_version

from .errors import InstallError

SUPPORTED = ((2, 11), (2, 15))

_FSDP = "torch.distributed.fsdp._fully_shard"
_STATE_ATTRIBUTES = (
    "_pre_forward_hook_handle",
    "_post_forward_hook_handle",
    "_mp_policy",
    "_modules",
    "_device",
    "_is_root",
    "_lazy_init",
)
_GROUP_ATTRIBUTES = (
    "fsdp_params",
    "mesh_info",
    "post_forward_mesh_info",
    "_use_post_forward_mesh",
    "reduce_grads",
    "all_reduce_grads",
)
_PARAM_ATTRIBUTES = ("_module_info", "fsdp_placement", "sharded_param", "_orig_size")
_DIVIDE_PARAMETERS = (
    "reduce_scatter_group",
    "all_reduce_group",
    "reduce_dtype",
    "device_type",
    "factor",
    "force_sum_reduction_for_comms",
)


def check_version() -> None:
    """Refuse a torch whose FSDP2 was never read.

    Raises:
        InstallError: the torch version is outside 2.11 to 2.15, or FSDP2's internals are not as they were read.
    """
    low, high = SUPPORTED
    if not low <= torch_version() <= high:
        raise InstallError(
            f"fsdp_hooks expects torch {low[0]}.{low[1]} to {high[0]}.{high[1]}, found torch {torch.__version__}: "
            "install a torch in that range, or a newer collective-identity"
        )
    parameters = tuple(inspect.signature(_divide_factors()).parameters)
    if parameters != _DIVIDE_PARAMETERS:
        raise InstallError(
            f"fsdp_hooks expects {_FSDP}._fsdp_collectives._get_gradient_divide_factors{_DIVIDE_PARAMETERS}, "
            f"found {parameters} in torch {torch.__version__}: install a torch release (not a nightly) in 2.11 to 2.15"
        )


def _divide_factors() -> Any:
    from torch.distributed.fsdp._fully_shard._fsdp_collectives import _get_gradient_divide_factors

    return _get_gradient_divide_factors


def _require(thing: Any, names: tuple[str, ...], where: str) -> None:
    missing = [name for name in names if not hasattr(thing, name)]
    if missing:
        raise InstallError(
            f"{where}: expected FSDP2's {type(thing).__name__} to have {', '.join(missing)} (seen in torch 2.11 to "
            f"2.15), found none in torch {torch.__version__}: use a released torch in that range"
        )


def fsdp_modules(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """``(name, module)`` of every module that ``fully_shard`` was applied to, in ``named_modules`` order."""
    for name, module in model.named_modules():
        if isinstance(module, FSDPModule):
            yield name, module


def casts_every_grouped_module() -> bool:
    """Whether the inputs and outputs of *each* module of ``fully_shard([a, b])`` are cast (torch 2.13).

    Before, the inputs of the first that runs and the outputs of the last.
    """
    from torch.distributed.fsdp._fully_shard import _fsdp_state

    return "cast_output_dtype" in inspect.signature(_fsdp_state._register_group_forward_hooks).parameters


def state_of(module: nn.Module, name: str) -> Any:
    """The ``FSDPState`` of an FSDP module."""
    state = module._get_fsdp_state()  # type: ignore[operator]
    _require(state, _STATE_ATTRIBUTES, f"module {name!r}")
    return state


def groups_of(state: Any, name: str) -> list[Any]:
    """The ``FSDPParamGroup`` objects of a state, in order; empty when all its parameters belong to children."""
    groups = getattr(state, "_fsdp_param_groups", None)
    if groups is None:
        only = getattr(state, "_fsdp_param_group", None)
        groups = [] if only is None else [only]
    for group in groups:
        _require(group, _GROUP_ATTRIBUTES, f"module {name!r}")
    return list(groups)


def finish_lazy_init(root: nn.Module, name: str) -> None:
    """Run FSDP2's own lazy initialisation: which module is the root, mixed-precision dtypes, state-dict hooks."""
    state = state_of(root, name)
    if state._is_root is None:
        state._lazy_init()


def params_of(group: Any, name: str) -> list[Any]:
    """The ``FSDPParam`` objects of a group, in FSDP2's order."""
    params = list(group.fsdp_params)
    for param in params:
        _require(param, _PARAM_ATTRIBUTES, f"module {name!r}")
    return params


def dtypes_of(param: Any, fqn: str) -> tuple[torch.dtype | None, torch.dtype | None]:
    """``(param_dtype, reduce_dtype)`` of mixed precision, None where nothing is cast; set by lazy initialisation."""
    _require(param, ("param_dtype", "reduce_dtype"), f"parameter {fqn!r}")
    return param.param_dtype, param.reduce_dtype


def owners_of(param: Any) -> list[tuple[nn.Module, str]]:
    """Every ``(module, attribute name)`` that reads this parameter (tied parameters have several)."""
    info = param._module_info
    return [(info.module, info.param_name), *zip(info.shared_modules, info.shared_param_names, strict=True)]


def unsharded_spec(param: Any) -> Any | None:
    """The ``DTensorSpec`` of the unsharded parameter when it is tensor- or expert-parallel, else None."""
    return getattr(param, "_unsharded_dtensor_spec", None) or getattr(param, "_tp_spec", None)


def shard_group(group: Any) -> Any | None:
    """The process group of the all-gathers; None when the mesh has no shard dimension (plain replicate)."""
    return getattr(group.mesh_info, "shard_process_group", None)


def reduce_group(group: Any) -> Any:
    """The process group of the reduce-scatters."""
    return getattr(group.mesh_info, "reduce_scatter_process_group", None) or group.mesh_info.shard_process_group


def replicate_group(group: Any) -> Any | None:
    """The process group of HSDP's all-reduces, None for one-dimensional FSDP."""
    return getattr(group.mesh_info, "replicate_process_group", None)


def resharded_after_forward(group: Any) -> bool:
    """FSDP2's own decision (lazy initialisation turns it off for a root that left it to FSDP2)."""
    return group.post_forward_mesh_info is not None


def custom_divide_factor(group: Any) -> float | None:
    """What ``set_gradient_divide_factor`` set."""
    return getattr(group, "gradient_divide_factor", None)


def divide_factors(group: Any, reduce_dtype: torch.dtype, device_type: str) -> tuple[Any, Any, Any, Any]:
    """``(predivide, postdivide, reduce-scatter op, all-reduce op)`` as FSDP2 computes them for this group."""
    return _divide_factors()(  # type: ignore[no-any-return]
        reduce_group(group),
        replicate_group(group),
        reduce_dtype,
        device_type,
        custom_divide_factor(group),
        getattr(group, "force_sum_reduction_for_comms", False),
    )


def registered_methods(module: nn.Module) -> dict[str, Any]:
    """The methods that ``register_fsdp_forward_method`` made gather and reshard: name to the method underneath."""
    written_in = register_fsdp_forward_method.__code__.co_filename
    found = {}
    for name, value in vars(module).items():
        code = getattr(getattr(value, "__func__", None), "__code__", None)
        if code is not None and code.co_filename == written_in:
            found[name] = value.__wrapped__
    return found


def replace_eager_forward(module: nn.Module, instead: Callable[..., Any] | None) -> None:
    """What a method given to ``register_fsdp_forward_method`` from now on calls first; None: FSDP2's own again.

    The module's own forward does not: its hooks hold FSDP2's method since ``fully_shard``.
    """
    state = module._get_fsdp_state()  # type: ignore[operator]
    state.__dict__.pop("_pre_forward", None)
    if instead is not None:
        state.__dict__["_pre_forward"] = instead


def sync_of(group: Any) -> str:
    """How far backward takes the gradients now: ``"all"``, ``"shard"`` (no all-reduce) or ``"none"``."""
    if not group.reduce_grads:
        return "none"
    return "shard" if replicate_group(group) is not None and not group.all_reduce_grads else "all"


def gradients_wait(group: Any) -> bool:
    """True while eager FSDP2 holds gradients that it accumulated without communication."""
    return getattr(group, "_partial_reduce_output", None) is not None or any(
        param.unsharded_accumulated_grad is not None
        or getattr(getattr(param, "_unsharded_param", None), "grad", None) is not None
        for param in group.fsdp_params
    )


def uses_default_comms(group: Any) -> bool:
    """True for FSDP2's own all-gather and reduce-scatter objects, wherever they take their buffers from."""
    return all(
        type(getattr(group, name)).__name__ in known
        for name, known in (
            ("_all_gather_comm", ("DefaultAllGather", "ProcessGroupAllocAllGather")),
            ("_reduce_scatter_comm", ("DefaultReduceScatter", "ProcessGroupAllocReduceScatter")),
        )
        if hasattr(group, name)
    )


def uses_symm_mem(group: Any) -> bool:
    """True for the objects that ``set_symm_mem_for_comm`` puts there (torch 2.12 and later)."""
    names = ("_all_gather_comm", "_reduce_scatter_comm")
    return any(type(getattr(group, name, None)).__name__.startswith("SymmMem") for name in names)


def has_all_gather_extension(param: Any) -> bool:
    """True for a parameter subclass with ``fsdp_pre_all_gather`` (float8 and the like)."""
    return hasattr(param.sharded_param._local_tensor, "fsdp_pre_all_gather")


def original_number(param: Any) -> int | None:
    """The same for every ``FSDPParam`` made of one parameter; None where torch does not say (2.11)."""
    return getattr(param, "_orig_param_uid", None)


def hook_slots(state: Any, name: str) -> list[tuple[dict[int, Any], int]]:
    """Where FSDP2's own forward hooks are: the dict of each on its module, and the key in it."""
    handles = state._pre_forward_hook_handle, state._post_forward_hook_handle
    if handles[0] is handles[1]:  # fully_shard([a, b]): one handle over all
        handles = handles[0].handles
    slots = []
    for handle in handles:
        key, hooks = getattr(handle, "id", None), getattr(handle, "hooks_dict_ref", lambda: None)()
        if hooks is None or key is None or key not in hooks:
            raise InstallError(
                f"module {name!r}: expected FSDP2's forward hook to be registered, found it removed: another tool took "
                "it away (or the model was already captured); apply fully_shard and install once, in that order"
            )
        slots.append((hooks, int(key)))
    return slots


def factors_of(
    reduce: Any, replicate: Any, dtype: torch.dtype, device_type: str, factor: float | None
) -> tuple[Any, Any, Any, Any]:
    """:func:`divide_factors` for process groups of our own; with a ``factor`` the reductions are sums."""
    return _divide_factors()(reduce, replicate, dtype, device_type, factor, factor is not None)  # type: ignore[no-any-return]


def mesh_over(data: DeviceMesh, model_parallel: DeviceMesh) -> DeviceMesh:
    """The mesh of both, data parallelism first: what FSDP2 puts a tensor-parallel parameter's shards on.

    Raises:
        RuntimeError: the two overlap or are not slices of one mesh.
    """
    return DeviceMesh._concatenate([data, model_parallel])


def sharded_below(param: DTensor, dim: int) -> Placement:
    """The placement of data parallelism's shards of ``dim``, cut from what ``param``'s own mesh left of it."""
    shards = param._spec.num_shards_map[dim]
    return _StridedShard(dim, split_factor=shards) if shards > 1 else Shard(dim)


def reshard_all(model: nn.Module) -> None:
    """Have every FSDP module hold its shards alone, whatever an eager forward left gathered."""
    for _, module in fsdp_modules(model):
        module.reshard()


_WATCHES = "_fsdp_hooks_watches"


def watch_accumulation(
    leaf: torch.Tensor, check: Callable[[torch.Tensor], None]
) -> torch.utils.hooks.RemovableHandle | None:
    """Have ``check`` run after each gradient that is added to ``leaf.grad``; not one of the :func:`gradient_hooks`.

    None where it never will be: integers have no gradient.
    """
    setattr(check, _WATCHES, True)
    trained = leaf.requires_grad
    if not (trained or leaf.is_floating_point() or leaf.is_complex()):
        return None
    try:
        return leaf.requires_grad_().register_post_accumulate_grad_hook(check)  # a frozen one may be trained later
    finally:
        leaf.requires_grad_(trained)


def gradient_hook_dicts(leaf: torch.Tensor) -> tuple[Mapping[int, Any] | None, Mapping[int, Any] | None]:
    """The hooks that wait for a leaf's gradient, and for it to have been added; None: there never was one."""
    return leaf._backward_hooks, getattr(leaf, "_post_accumulate_grad_hooks", None)


def gradient_hooks(leaf: torch.Tensor) -> tuple[int, ...]:
    """Numbers of the hooks of others that wait for a leaf's gradient, or for it to have been added."""
    before, after = gradient_hook_dicts(leaf)
    others = (number for number, hook in (after or {}).items() if not hasattr(hook, _WATCHES))
    return (*(before or ()), *others)
