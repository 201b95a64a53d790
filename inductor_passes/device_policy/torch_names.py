"""Every private torch name that operator policies use, in one place; ``inductor_passes/upstream`` has the others.

Read in torch 2.11.0, 2.12.0, 2.13.0, 2.14.1 and 2.15.0. Nothing here patches torch on import.
"""

from __future__ import annotations

import inspect
import types
from collections.abc import Callable, Collection, Iterator, Mapping
from types import MappingProxyType
from typing import Any

import torch
import torch._inductor.config as inductor_config
from torch import fx
from torch._inductor.custom_graph_pass import CustomGraphPass

from ..upstream import (
    TORCHS_NAMESPACES,
    UnsupportedTorch,
    inductor_flags,
    is_lite,
    operators,
    python_above_kernels,
    reading,
)

_SLOT = "post_grad_custom_post_pass"


def check_names() -> None:
    """Refuse a torch in which a name that policies use is not as it was read.

    Raises:
        UnsupportedTorch: the message names each.
    """
    from torch._inductor import compile_fx, lowering

    places: tuple[tuple[Any, tuple[str, ...]], ...] = (
        (lowering, ("maybe_layout_constraints", "constrain_to_fx_strides", "constrain_to_fake_tensors", "validate_ir")),
        (compile_fx, ("fx_compile_mode", "fx_compile_async", "fx_compile_progressive", "get_patched_config_dict")),
        (inductor_config, (_SLOT, *PASSES_ON, "cpp_wrapper", "fx_wrapper", "freezing")),
    )
    calls = (
        (compile_fx, "compile_fx", ("inner_compile", "config_patches", "decompositions")),
        (lowering, "fallback_handler", ("add_to_fallback_set",)),
    )
    missing = [f"{module.__name__}.{name}" for module, names in places for name in names if not hasattr(module, name)]
    for module, name, wanted in calls:
        known = inspect.signature(getattr(module, name)).parameters
        missing += [f"{module.__name__}.{name}({one}=)" for one in wanted if one not in known]
    if missing:
        raise UnsupportedTorch(
            f"operator policies expect {', '.join(missing)} (seen in torch 2.11 to 2.15), not found in torch "
            f"{torch.__version__}: use a released torch in that range, or undo what replaced them"
        )


def overloads(packet: torch._ops.OpOverloadPacket) -> list[torch._ops.OpOverload]:
    """Every overload of a packet."""
    return [getattr(packet, name) for name in packet.overloads()]


def traces_python(op: Any) -> bool:
    """Whether tracing an operator, or an overload of a packet, that is not torch's runs Python code of its owner's."""
    return any(one.namespace not in TORCHS_NAMESPACES and python_above_kernels(one) for one in operators(op))


def operators_named(names: Collection[str], modules: Collection[types.ModuleType]) -> Iterator[tuple[Any, str]]:
    """Operators with Python code, not torch's, that these names of attributes reach from these modules.

    From ``torch.ops``, as ``torch.ops.acme.scale``, or from a namespace of it.
    """
    namespaces = {one.__name__.rpartition(".")[2] for one in modules if isinstance(one, torch._ops._OpNamespace)}
    wanted = namespaces.union(names if torch.ops in modules else ()) - TORCHS_NAMESPACES
    if not wanted:
        return
    found = set()
    for key in torch.library._impls:  # "namespace/name.overload/key"
        space, _, rest = key.partition("/")
        if space in wanted:
            found.add((space, rest.partition("/")[0].partition(".")[0]))
    for space in wanted.intersection(vars(torch.ops)):
        found.update((space, name) for name in getattr(getattr(torch.ops, space), "__dict__", ()))
    for space, name in sorted(found):
        if name in names:
            yield getattr(getattr(torch.ops, space), name), f"torch.ops.{space}.{name}"


def has_lowering(op: torch._ops.OpOverload) -> bool:
    """Whether Inductor's own table lowers ``op``."""
    from torch._inductor.lowering import lowerings

    return op in lowerings


def stock_decompositions(options: Mapping[str, Any]) -> tuple[Mapping[Any, Callable[..., Any]], str]:
    """The table that Inductor would take in this thread with these options, and which of its two it is."""
    from torch._inductor.decomposition import select_decomp_table

    with inductor_flags(options):
        return select_decomp_table(), f"fallback_random={inductor_config.fallback_random}"


def node_being_lowered() -> fx.Node | None:
    """The node that Inductor lowers in this thread, None outside lowering."""
    from torch._inductor.graph import GraphLowering
    from torch._inductor.virtualized import V

    return V.graph.current_node if isinstance(V.graph, GraphLowering) else None


def lower_with(
    op: torch._ops.OpOverload,
    function: Callable[..., Any],
    node: fx.Node,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Any:
    """Lower one call of ``op`` by ``function``, its inputs laid out as Inductor would for ``op``."""
    from torch._inductor.lowering import maybe_layout_constraints

    args, kwargs = _laid_out(maybe_layout_constraints(op), op, node, args, kwargs)
    return function(*args, **kwargs)


def result_faults(out: Any, wanted: Any) -> Iterator[str]:
    """Where what a lowering returned is not of the kind, element type or size that the graph goes on with.

    What has none of these faults is held to Inductor's own ``validate_ir``.

    Args:
        out: Inductor's IR, or a collection of it.
        wanted: the node's fake output; None: nothing is known.
    """
    from torch._inductor.ir import IRNode
    from torch._inductor.lowering import validate_ir

    if isinstance(wanted, torch.Tensor):
        if not isinstance(out, IRNode):
            yield f"expected a tensor of Inductor's IR, found a {type(out).__qualname__}"
            return
        validate_ir(out)
        if out.maybe_get_dtype() != wanted.dtype:
            yield f"expected {wanted.dtype}, found {out.maybe_get_dtype()}"
        size = list(out.maybe_get_size() or ())
        if len(size) != wanted.dim() or any(
            str(mine) != str(theirs) for mine, theirs in zip(size, wanted.shape, strict=True)
            if isinstance(theirs, int) and getattr(mine, "is_number", True)
        ):
            yield f"expected size {list(wanted.shape)}, found {size}"
    elif isinstance(wanted, (tuple, list)):
        if not isinstance(out, (tuple, list)) or len(out) != len(wanted):
            yield f"expected {len(wanted)} outputs, found {len(out) if isinstance(out, (tuple, list)) else 'one'}"
            return
        for index, (one, other) in enumerate(zip(out, wanted, strict=True)):
            yield from (f"output {index}: {fault}" for fault in result_faults(one, other))


def lower_as_fallback(
    op: torch._ops.OpOverload, node: fx.Node, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Lower one call of ``op`` to its eager kernel, inputs with the strides they were traced with.

    ``make_fallback`` would do this for the whole process.
    """
    from torch._inductor.lowering import constrain_to_fx_strides, fallback_handler, maybe_layout_constraints

    args, kwargs = _laid_out(maybe_layout_constraints(op) or constrain_to_fx_strides, op, node, args, kwargs)
    return fallback_handler(op, add_to_fallback_set=False)(*args, **kwargs)


def _laid_out(
    constraint: Callable[..., Any] | None,
    op: torch._ops.OpOverload,
    node: fx.Node,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> tuple[Any, Any]:
    from torch._inductor.lowering import constrain_to_fake_tensors
    from torch.fx.operator_schemas import normalize_function

    if constraint is None:
        return args, kwargs
    if constraint is not constrain_to_fake_tensors:
        return constraint(node, *args, **kwargs)  # type: ignore[no-any-return]
    if "eager_input_vals" not in node.meta:
        return args, kwargs
    (given, fake) = (normalize_function(op, *one) for one in ((args, kwargs), node.meta["eager_input_vals"]))
    assert given is not None and fake is not None, f"the arguments of {node.name} do not fit {op}'s schema"
    return constrain_to_fake_tensors(*given, *fake)  # type: ignore[no-any-return, no-untyped-call]


PASSES_ON: Mapping[str, Any] = MappingProxyType({"use_post_grad_passes": True, "disabled_passes": ""})
"""Options under which Inductor runs the pass that hands nodes to the policy."""


def unsupported_modes(options: Mapping[str, Any]) -> list[str]:
    """Why a policy cannot be applied to a compile with these Inductor options in this thread, by mode."""
    from torch._inductor import compile_fx
    from torch._inductor.virtualized import V

    def value(name: str) -> Any:
        return options.get(name, getattr(inductor_config, name))

    def on(name: str) -> bool:
        return bool(value(name))

    lite = is_lite(options)
    modes = {
        f"subprocess or serialised FX compile (fx_compile_mode={compile_fx.fx_compile_mode.name}) drops custom passes "
        "and would poison the cache: use FxCompileMode.NORMAL": (
            compile_fx.fx_compile_mode is not compile_fx.FxCompileMode.NORMAL
        ),
        "asynchronous FX compile (TORCHINDUCTOR_FX_COMPILE_MODE=async+...) drops custom passes: turn it off": (
            compile_fx.fx_compile_async
        ),
        "progressive FX compile (TORCHINDUCTOR_FX_COMPILE_MODE=progressive+...) drops custom passes: turn it off": (
            compile_fx.fx_compile_progressive
        ),
        "AOTInductor is not covered: use torch.compile": bool(V.aot_compilation),
        "cpp_wrapper is not covered: use the Python wrapper": on("cpp_wrapper"),
        "fx_wrapper is not covered: use the Python wrapper": on("fx_wrapper"),
        "freezing folds weights before any policy is asked: turn it off": on("freezing"),
        "lite mode (fallback_by_default) lowers operators by itself and runs no pass: leave it out, or use backend="
        "'collective_identity' with option 'policy', which applies the policy in marked regions": lite,
        "use_post_grad_passes=False leaves out the pass that policies lower with: turn it on": (
            not lite and not on("use_post_grad_passes")
        ),
        f"disabled_passes={value('disabled_passes')!r} leaves out the pass that policies lower with: take it out": (
            _SLOT.upper() in str(value("disabled_passes")).upper()  # as GraphTransformObserver asks
        ),
    }
    return [text for text, found in modes.items() if found]


class _PostGradLast(CustomGraphPass):
    """The user's ``post_grad_custom_post_pass`` first, then ours."""

    def __init__(self, run: Callable[[fx.Graph], None], identity: str, user: tuple[Any, ...]) -> None:
        self._run, self._identity, self._user = run, identity, user

    def __deepcopy__(self, memo: object) -> _PostGradLast:
        return self  # Inductor copies its configuration deeply

    def __call__(self, graph: fx.Graph) -> None:
        for one in self._user:
            one(graph)
        self._run(graph)

    def uuid(self) -> Any | None:
        users = [one.uuid() if isinstance(one, CustomGraphPass) else None for one in self._user]
        return None if any(one is None for one in users) else (self._identity, *users)


def post_grad_post_pass(
    run: Callable[[fx.Graph], None], identity: str, options: Mapping[str, Any]
) -> Mapping[str, Any]:
    """Options that run ``run`` last on each graph about to be lowered; ``identity`` enters both caches' keys."""
    user = options.get(_SLOT, inductor_config.post_grad_custom_post_pass)
    users = tuple(user) if isinstance(user, (list, tuple)) else () if user is None else (user,)
    return {_SLOT: _PostGradLast(run, identity, users)}


def current_compile_fx() -> Callable[..., Any]:
    """What ``torch.compile`` calls for Inductor."""
    from torch._inductor import compile_fx

    return compile_fx.compile_fx


def set_compile_fx(function: Callable[..., Any]) -> None:
    """Have ``torch.compile`` call ``function`` for Inductor: a registration, which its owner undoes."""
    from torch._inductor import compile_fx

    compile_fx.compile_fx = function  # type: ignore[assignment]


def compile_arguments(compile_fx: Callable[..., Any], *args: Any, **kwargs: Any) -> dict[str, Any]:
    """The arguments of one call of Inductor's ``compile_fx``, by name."""
    return dict(inspect.signature(compile_fx).bind(*args, **kwargs).arguments)


def compile_scoped(
    compile_fx: Callable[..., Any],
    arguments: Mapping[str, Any],
    patches: Mapping[str, Any],
    decompositions: Mapping[Any, Any],
    provider: Callable[[], Mapping[Any, Any]],
) -> Any:
    """That call under a policy."""
    from torch._inductor.compile_fx import compile_fx_inner

    inner = reading(provider, arguments.get("inner_compile", compile_fx_inner))
    changed = {"inner_compile": inner, "config_patches": dict(patches), "decompositions": decompositions}
    return compile_fx(**{**arguments, **changed})


def patched_config(options: dict[str, Any]) -> Mapping[str, Any]:
    """Inductor's configuration with these options in force."""
    from torch._inductor.compile_fx import get_patched_config_dict

    return get_patched_config_dict(config_patches=options)  # type: ignore[no-any-return]
