"""What does a node do besides computing its value? By its operator's schema, and by lists where that says nothing."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import torch
from torch import fx

from collective_identity import compat
from collective_identity.subgraphs import submodule_of
from collective_identity.transports import is_start, is_wait

# Python functions that FX graphs hold besides operators: `operator` on sizes and lists, `math`, torch.sym_*.
_PURE_MODULES: Final = frozenset({"_operator", "math"})
_WRITING_OPERATORS: Final = frozenset(
    {"setitem", "delitem", "iadd", "iand", "iconcat", "ifloordiv", "ilshift", "imod", "imul", "imatmul",
     "ior", "ipow", "irshift", "isub", "itruediv", "ixor"}
)
# Higher-order operators that run no sub-graph and write nothing (PyTorch 2.11-2.15 torch/_higher_order_ops).
_FUNCTIONAL: Final = frozenset(
    {"auto_functionalized", "auto_functionalized_v2", "triton_kernel_wrapper_functional", "flex_attention",
     "flex_attention_backward", "out_dtype", "inline_asm_elementwise"}
)
# Views by behaviour that the schema does not declare.
_UNDECLARED_VIEWS: Final = frozenset(
    {"aten::_unsafe_view", "_c10d_functional::_wrap_tensor_autograd", "inductor::_alloc_from_pool",
     "inductor::_reinterpret_tensor"}
)
# Writes likewise, besides those of operators whose names end in "_" (``inductor::resize_storage_bytes_``).
_UNDECLARED_WRITES: Final = frozenset(
    {"fsdp::all_gather_copy_in", "_c10d_functional::isend", "_c10d_functional::irecv",
     "_c10d_functional::batch_p2p_ops"}
)
# Operators on streams, events and process groups' own collectives: they order everything around them.
_ORDERING_NAMESPACES: Final = ("streams::", "c10d::")


@dataclass(frozen=True, slots=True)
class Effect:
    """What a node does besides computing its value.

    Attributes:
        writes: nodes whose tensors it writes.
        views: nodes whose memory its own value may share.
        ordered: it draws random numbers, prints, asserts: it keeps its place among its like.
        opaque: nothing is known; it keeps its place among all nodes.
    """

    writes: tuple[fx.Node, ...] = ()
    views: tuple[fx.Node, ...] = ()
    ordered: bool = False
    opaque: bool = False


_PURE: Final = Effect()
_OPAQUE: Final = Effect(opaque=True)


@dataclass(frozen=True, slots=True)
class _Schema:
    """The effect of an operator: as `Effect`, by the positions and names of the arguments."""

    writes: tuple[int | str, ...]
    views: tuple[int | str, ...]
    ordered: bool
    opaque: bool


@dataclass(slots=True)
class EffectReader:
    """Reads effects, each operator's schema once."""

    known: dict[int, _Schema | None] = field(default_factory=dict)  # by id: hashing an operator is a Python call

    def notable(self, node: fx.Node) -> Effect | None:
        """The effect of a node that writes, or is ordered or opaque; None for any other."""
        if node.op == "call_function":
            if node.target is operator.getitem:
                return None
            try:
                known = self.known[id(node.target)]
            except KeyError:
                pass  # of no operator, or of one not met before
            else:
                if known is None or not (known.writes or known.ordered or known.opaque):
                    return None
        effect = self.of(node)
        return effect if effect.writes or effect.ordered or effect.opaque else None

    def of(self, node: fx.Node) -> Effect:
        """The effect of one node."""
        if node.op in ("placeholder", "get_attr", "output"):
            return _PURE
        if node.op != "call_function":
            return _OPAQUE
        overload = compat.op_overload_of(node.target)
        if overload is not None:
            return self._operator(node, overload)
        if compat.higher_order_name(node.target) is not None:
            return self._higher_order(node)
        return _python_effect(node, node.target)

    def _operator(self, node: fx.Node, overload: torch._ops.OpOverload) -> Effect:
        try:
            known = self.known[id(overload)]
        except KeyError:
            known = self.known[id(overload)] = _schema_effect(node, overload)
        if known is None:
            return _PURE
        return Effect(_given(node, known.writes), _given(node, known.views), known.ordered, known.opaque)

    def _higher_order(self, node: fx.Node) -> Effect:
        name = compat.higher_order_name(node.target)
        inputs = tuple(node.all_input_nodes)
        if name in _FUNCTIONAL:
            inner = compat.op_overload_of(node.args[0]) if node.args else None
            return Effect(ordered=node.is_impure() or (inner is not None and _is_random(inner)))
        bodies = [m for m in map(submodule_of, node.args) if m is not None]
        if not bodies:
            return Effect(writes=inputs, ordered=True)
        inside = [self.of(n) for body in bodies for n in body.graph.nodes]
        if any(e.opaque for e in inside):
            return _OPAQUE
        if any(e.writes for e in inside):
            return Effect(writes=inputs, ordered=True)
        return Effect(views=inputs if name == "control_deps" else (), ordered=any(e.ordered for e in inside))


def _schema_effect(node: fx.Node, overload: torch._ops.OpOverload) -> _Schema | None:
    """The effect of an operator by its arguments; None when it has none."""
    writes: list[int | str] = []
    views: list[int | str] = []
    name = str(overload._schema.name)
    undeclared = name in _UNDECLARED_WRITES or (name.endswith("_") and not overload._schema.is_mutable)
    for place, argument in enumerate(overload._schema.arguments):
        if undeclared:  # any of them, and what it yields may be one of them
            writes.extend((place, argument.name))
            views.extend((place, argument.name))
        elif argument.alias_info is not None:
            (writes if argument.alias_info.is_write else views).extend((place, argument.name))
    if is_wait(node) or name in _UNDECLARED_VIEWS:
        views += [0, overload._schema.arguments[0].name]
    ordered = _is_random(overload)
    if not (overload._schema.is_mutable or is_start(node) or is_wait(node)):
        ordered = ordered or node.is_impure()  # prints, asserts, operators registered as effectful
    opaque = name.startswith(_ORDERING_NAMESPACES)
    known = _Schema(tuple(writes), tuple(views), ordered, opaque)
    return known if writes or views or ordered or opaque else None


def _is_random(overload: torch._ops.OpOverload) -> bool:
    return torch.Tag.nondeterministic_seeded in overload.tags


def _python_effect(node: fx.Node, target: Callable[..., Any] | str) -> Effect:
    name, module = getattr(target, "__name__", ""), getattr(target, "__module__", None)
    if target is operator.getitem:
        return Effect(views=tuple(node.all_input_nodes[:1]))
    if module in _PURE_MODULES:
        return Effect(writes=tuple(node.all_input_nodes[:1])) if name in _WRITING_OPERATORS else _PURE
    return _PURE if name.startswith("sym_") else _OPAQUE


def _given(node: fx.Node, arguments: Sequence[int | str]) -> tuple[fx.Node, ...]:
    """The nodes given for these arguments, positional or by name; lists are opened."""
    found: list[fx.Node] = []
    for argument in arguments:
        if isinstance(argument, int):
            value = node.args[argument] if argument < len(node.args) else None
        else:
            value = node.kwargs.get(argument)
        for item in value if isinstance(value, (list, tuple)) else (value,):
            if isinstance(item, fx.Node):
                found.append(item)
    return tuple(found)
