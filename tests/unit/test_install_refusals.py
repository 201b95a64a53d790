"""FSDP2 options that capture does not honour: refused by name at install, and when they are set afterwards."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import DTensor, Replicate
from torch.utils._pytree import tree_map_only

import fsdp_hooks
from collective_identity import session
from fsdp_hooks import UnsupportedOption, compat, refusals
from fsdp_hooks.refusals import WAY_OUT
from tests.unit.sharded import Model, lazily_initialised, sharded, snapshot

pytestmark = pytest.mark.usefixtures("fake_world")


class Gathered(torch.Tensor):
    """A parameter that gathers itself, as float8 ones do."""

    @staticmethod
    def __new__(cls, data: torch.Tensor) -> Gathered:
        return torch.Tensor._make_wrapper_subclass(cls, data.shape, strides=data.stride(), dtype=data.dtype)

    def __init__(self, data: torch.Tensor) -> None:
        self.data_inside = data

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        args, kwargs = tree_map_only(Gathered, lambda x: x.data_inside, (args, kwargs or {}))
        return tree_map_only(torch.Tensor, Gathered, func(*args, **kwargs))

    def fsdp_pre_all_gather(self, mesh: Any) -> None: ...

    def fsdp_post_all_gather(self, *args: Any, **kwargs: Any) -> None: ...


def own_gather() -> Model:
    model = Model()
    linear = model.blocks[0][0]
    linear.weight = nn.Parameter(Gathered(linear.weight.detach()))
    mesh = init_device_mesh("cpu", (4,))
    fully_shard(model.blocks[0], mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def hooked() -> Model:
    model = sharded()
    model.blocks[0][0].weight.register_hook(lambda gradient: gradient * 0.5)
    return model


def spmd() -> Model:
    from torch.distributed.fsdp import DataParallelMeshDims

    model = Model()
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    for module in model.blocks[0].modules():
        for name, parameter in module.named_parameters(recurse=False):
            value = DTensor.from_local(parameter.detach(), mesh, [Replicate(), Replicate()], run_check=False)
            module.register_parameter(name, nn.Parameter(value))
    fully_shard(model.blocks[0], mesh=mesh, dp_mesh_dims=DataParallelMeshDims(shard="dp"))
    return model


def replicated() -> Model:
    from torch.distributed._composable.replicate_with_fsdp import replicate

    model = Model()
    replicate(model.blocks[0], mesh=init_device_mesh("cpu", (4,), mesh_dim_names=("replicate",)))
    return model


def call(method: str, *args: Any, **kwargs: Any) -> Callable[[], Model]:
    """A model on whose ``blocks.0`` a setter was called."""

    def build() -> Model:
        model = sharded()
        getattr(model.blocks[0], method)(*args, **kwargs)
        return model

    build.__name__ = f"{method}({', '.join(type(arg).__name__ for arg in args)})"
    return build


def waiting() -> Model:
    """What eager FSDP2 keeps after a backward without gradient sync."""
    model = sharded()
    (group,) = compat.groups_of(compat.state_of(model.blocks[0], ""), "")
    group.fsdp_params[0].unsharded_accumulated_grad = torch.ones(8, 8)
    return model


def one_group(module: nn.Module) -> tuple[Any, str]:
    (group,) = compat.groups_of(compat.state_of(module, ""), "")
    return group, ""


def in_symmetric_memory() -> Model:
    """As set_symm_mem_for_comm leaves it, which needs an allocator that only some builds of torch have."""
    model = sharded()
    group, _ = one_group(model.blocks[0])
    group._all_gather_comm = type("SymmMemAllGather", (), {})()
    return model


def tied_across_groups() -> Model:
    model = Model()
    model.blocks[1].weight = model.blocks[0][0].weight
    mesh = init_device_mesh("cpu", (4,))
    for module in (model.blocks[1], model.blocks[0], model):
        fully_shard(module, mesh=mesh)
    return model


def grouped_root() -> Model:
    """Without a root above them, FSDP2's lazy initialisation would raise its own error."""
    model = Model()
    fully_shard([model.blocks[0], model.blocks[1]], mesh=init_device_mesh("cpu", (4,)))
    return model


MATERIALISE = "materialise the model first (model.to_empty(device=...), then initialise it), then install"
WEIGHT = "(parameter 'blocks.0.0.weight')"
REFUSED: list[tuple[str, Callable[[], nn.Module], str]] = [
    ("a custom all-gather or reduce-scatter object", call("set_custom_all_gather", object()), WAY_OUT),
    ("a custom all-gather or reduce-scatter object", call("set_custom_reduce_scatter", object()), WAY_OUT),
    ("set_all_reduce_hook", call("set_all_reduce_hook", lambda output: None), WAY_OUT),
    ("set_symm_mem_for_comm", in_symmetric_memory, WAY_OUT),
    ("gradients that eager FSDP2 accumulated and did not reduce yet", waiting, WAY_OUT),
    ("replicate() (a mesh without a shard dimension)", replicated, WAY_OUT),
    (f"fsdp_pre_all_gather / fsdp_post_all_gather {WEIGHT}", own_gather, WAY_OUT),
    (
        f"a gradient hook (Tensor.register_hook), which eager FSDP2 never calls and autograd would {WEIGHT}",
        hooked,
        WAY_OUT,
    ),
    ("a parameter on the meta device ('blocks.0.0.weight')", lambda: sharded(device="meta"), MATERIALISE),
]
if hasattr(FSDPModule, "set_reduce_scatter_unused_params"):  # torch 2.13
    REFUSED.append(("set_reduce_scatter_unused_params(True)", call("set_reduce_scatter_unused_params", True), WAY_OUT))
if "dp_mesh_dims" in inspect.signature(fully_shard).parameters:  # torch 2.12
    REFUSED.append(("dp_mesh_dims (an SPMD mesh)", spmd, WAY_OUT))
if hasattr(FSDPModule, "set_keep_unsharded_storage"):  # torch 2.15
    REFUSED.append((f"keep_unsharded_storage {WEIGHT}", call("set_keep_unsharded_storage", True), WAY_OUT))


@pytest.mark.filterwarnings("ignore:Use `set_gradient_divide_factor`")
@pytest.mark.parametrize(("option", "build", "way_out"), REFUSED)
def test_an_option_is_refused_by_name_and_nothing_changes(
    option: str, build: Callable[[], nn.Module], way_out: str
) -> None:
    model = build()
    before = snapshot(model)
    with pytest.raises(UnsupportedOption) as raised:
        fsdp_hooks.install(model)
    assert str(raised.value) == f"module 'blocks.0': fsdp_hooks does not support {option}: {way_out}"
    assert snapshot(model) == before
    assert not lazily_initialised(model)
    assert session.current() is None


def test_every_refusal_of_this_torch_is_tested() -> None:
    """A row that no model above triggers needs a newer torch than this one."""
    newer = {
        "set_reduce_scatter_unused_params(True)": hasattr(FSDPModule, "set_reduce_scatter_unused_params"),
        "dp_mesh_dims (an SPMD mesh)": "dp_mesh_dims" in inspect.signature(fully_shard).parameters,
        "keep_unsharded_storage": hasattr(FSDPModule, "set_keep_unsharded_storage"),
        "a sharded gradient dtype of its own": False,
    }
    rows = {option for option, _ in (*refusals._GROUP_OPTIONS, *refusals._PARAM_OPTIONS)}
    here = {row for row in rows if newer.get(row, True)}
    tested = {option.removesuffix(f" {WEIGHT}") for option, _, _ in REFUSED}
    assert here <= tested


@pytest.mark.parametrize("option", ["keep_unsharded_storage", "a sharded gradient dtype of its own"])
def test_parameter_options_of_newer_torch(option: str) -> None:
    """The attributes that torch 2.15 has on an ``FSDPParam``, set as it sets them."""
    model = sharded()
    (group,) = compat.groups_of(compat.state_of(model.blocks[1], ""), "")
    attribute = {"keep_unsharded_storage": option}.get(option, "_has_sharded_grad_dtype_override")
    setattr(group.fsdp_params[1], attribute, True)
    with pytest.raises(UnsupportedOption) as raised:
        fsdp_hooks.install(model)
    assert str(raised.value) == (
        f"module 'blocks.1': fsdp_hooks does not support {option} (parameter 'blocks.1.bias'): {WAY_OUT}"
    )


def test_a_parameter_shared_across_groups() -> None:
    """Torch 2.11 unties it without a word, and so it stays."""
    model = tied_across_groups()
    if compat.original_number(compat.params_of(*one_group(model.blocks[1]))[0]) is None:
        assert fsdp_hooks.install(model) is model
        return
    with pytest.raises(UnsupportedOption) as raised:
        fsdp_hooks.install(model)
    assert str(raised.value) == (
        "module 'blocks.1': fsdp_hooks does not support a parameter shared across groups ('blocks.1.weight' is "
        "'blocks.0.0.weight', which another fully_shard call has): give both modules to one call, "
        "fully_shard([a, b]), or leave both to the call on the model"
    )


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_a_forward_method_registered_after_install(compiled: bool) -> None:
    model = sharded()
    block = model.blocks[1]
    block.twice = lambda x: block(block(x))
    fsdp_hooks.install(model)
    register_fsdp_forward_method(block, "twice")
    call = torch.compile(block.twice, backend="eager") if compiled else block.twice
    with pytest.raises(UnsupportedOption, match="^module 'blocks.1': .*register_fsdp_forward_method on an installed"):
        call(torch.ones(2, 8))
    fsdp_hooks.uninstall(model)
    model(torch.ones(2, 8))
    assert block.twice(torch.ones(2, 8)).shape == (2, 8)


def test_a_grouped_unit_needs_a_root() -> None:
    with pytest.raises(UnsupportedOption, match="without a root: call fully_shard on the whole model as well"):
        fsdp_hooks.install(grouped_root())


def test_an_option_of_the_root_names_the_root() -> None:
    model = sharded()
    model.set_all_reduce_hook(lambda output: None)
    with pytest.raises(UnsupportedOption, match="^the root module: .*set_all_reduce_hook"):
        fsdp_hooks.install(model)


def test_the_way_out_works() -> None:
    """Undo the option, install again."""
    model = sharded()
    model.set_all_reduce_hook(lambda output: None)
    with pytest.raises(UnsupportedOption):
        fsdp_hooks.install(model)
    model.set_all_reduce_hook(None)
    assert fsdp_hooks.install(model) is model


# ---- changes after install ----

PRESENT = {name: only for name, only in refusals.REFUSED.items() if hasattr(FSDPModule, name)}


def test_every_setter_of_fsdp2_is_followed_refused_or_a_hint() -> None:
    setters = {name for name in dir(FSDPModule) if name.startswith("set_")}
    known = {*PRESENT, *refusals.FOLLOWED, *refusals.HINTS}
    assert setters == {name for name in known if name.startswith("set_")} & {*dir(FSDPModule)}
    assert not {*refusals.FOLLOWED} & {*refusals.HINTS} and not {*PRESENT} & {*refusals.FOLLOWED, *refusals.HINTS}


@pytest.mark.parametrize(("method", "accepted"), PRESENT.items())
def test_a_change_after_install_is_refused(method: str, accepted: bool | None) -> None:
    model = fsdp_hooks.install(sharded())
    block = model.blocks[1]
    refused = [(), (None,), (object(),)] if accepted is None else [(not accepted,), (object(),), ()]
    for args in refused:
        with pytest.raises(UnsupportedOption, match=f"^module 'blocks.1': .* {method} on .*fsdp_hooks.uninstall"):
            getattr(block, method)(*args)


def test_setting_what_is_set_already_is_accepted() -> None:
    """Where FSDP2's default is the one value we honour. Torch 2.11 has no such setter."""
    model = fsdp_hooks.install(sharded())
    for method, accepted in PRESENT.items():
        if accepted is None:
            continue
        parameter = list(inspect.signature(getattr(FSDPModule, method)).parameters)[1]
        assert getattr(model, method)(accepted) is None
        assert getattr(model, method)(**{parameter: accepted}) is None
        with pytest.raises(UnsupportedOption):
            getattr(model, method)(**{parameter: not accepted})


def test_setters_work_again_after_uninstall() -> None:
    model = fsdp_hooks.uninstall(fsdp_hooks.install(sharded()))
    model.set_requires_gradient_sync(False)
    (group,) = compat.groups_of(compat.state_of(model, ""), "")
    assert group.reduce_grads is False


@pytest.mark.parametrize("kind", ["register_forward_pre_hook", "register_forward_hook"])
def test_a_hook_between_the_casts_of_mixed_precision_is_named(kind: str) -> None:
    """Eager FSDP2 casts around it, a captured module inside it: it sees other dtypes."""

    def model(policy: MixedPrecisionPolicy) -> nn.Module:
        made = Model()
        getattr(made.blocks[1], kind)(lambda *args: None)
        mesh = init_device_mesh("cpu", (4,))
        fully_shard(made.blocks[1], mesh=mesh, mp_policy=policy)
        return fully_shard(made, mesh=mesh)

    both = MixedPrecisionPolicy(param_dtype=torch.bfloat16, output_dtype=torch.float32)
    with pytest.warns(UserWarning, match="module 'blocks.1': has a forward hook that eager FSDP2 runs bet") as warned:
        fsdp_hooks.install(model(both))
    assert warned[0].filename == __file__
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        fsdp_hooks.install(model(MixedPrecisionPolicy(reduce_dtype=torch.bfloat16)))
