"""What must stay in order although no value flows between the nodes? Writes, random numbers, effects."""

from __future__ import annotations

import operator
from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Final

import torch
from torch import fx

from collective_identity import compat
from collective_identity.subgraphs import submodule_of
from collective_identity.transports import is_start, is_wait, launch_of

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
class Hazards:
    """Order that the data flow does not show.

    Attributes:
        before: position of a node → positions of nodes that must stay before it.
        writes: sorted positions of the nodes that write, or may write, a watched tensor.
    """

    before: Mapping[int, Sequence[int]]
    writes: tuple[int, ...]

    def epoch(self, position: int) -> int:
        """How many writes to watched tensors come before a position; equal for two nodes: none in between."""
        return bisect_left(self.writes, position)


def hazards_of(nodes: Sequence[fx.Node], watched: Iterable[fx.Node]) -> Hazards:
    """The hazards of a graph; linear in nodes and edges.

    Memory is told apart by what views declare, and by the storages of ``meta['val']`` where tracing recorded
    that two values share one. A write is ordered against every read of the same memory; a node of unknown
    behaviour against everything. A collective is under way until it is waited for: the wait reads what was sent,
    and writes what an in-place or out= form receives into.

    Args:
        nodes: the graph's nodes in order.
        watched: nodes whose tensors a pass wants to read at another time, e.g. the inputs of collectives.
    """
    reader = _EffectReader()
    effects = [reader.of(node) for node in nodes]
    if not any(e.writes or e.ordered or e.opaque for e in effects):
        return Hazards(MappingProxyType({}), ())
    index = {node: i for i, node in enumerate(nodes)}
    memory = _Memory(nodes, effects, index)
    of_interest = {memory.root(index[node]) for node in watched if node in index}
    written = {memory.root(index[w]) for e in effects for w in e.writes}
    received = {
        memory.root(index[w]) for node, e in zip(nodes, effects, strict=True) if e.writes and is_start(node)
        for w in e.writes
    }
    sent: dict[int, list[int]] = {}  # what is under way, by what it yields

    before: dict[int, list[int]] = {}
    readers: dict[int, list[int]] = {}
    writer: dict[int, int] = {}
    touching: list[int] = []
    since_wall: list[int] = []
    wall = last_ordered = -1
    for i, (node, effect) in enumerate(zip(nodes, effects, strict=True)):
        if node.op in ("placeholder", "get_attr", "output"):
            continue
        needs: list[int] = []
        if effect.opaque:
            needs += since_wall
            since_wall, wall, last_ordered = [], i, -1
            readers.clear()
            writer.clear()
            touching.append(i)
        elif wall >= 0:
            needs.append(wall)
        since_wall.append(i)
        if effect.ordered:
            if last_ordered >= 0:
                needs.append(last_ordered)
            last_ordered = i
        targets = {memory.root(index[w]) for w in effect.writes}
        reads = {memory.root(index[read]) for read in node.all_input_nodes} if written else set()
        if written and is_wait(node):  # hands on memory without reading it
            root = memory.root(i)
            targets.update({root} & received)
            one = _place(node)
            reads = set(sent.pop(root, ())) if one is None else set(sent.get(root, ())[one : one + 1])
        elif written and (launch := launch_of(node)) is not None:
            sent.setdefault(memory.root(i), []).extend(memory.root(index[one]) for one in launch.inputs)
        for root in targets:
            needs += readers.pop(root, ())
            if root in writer:
                needs.append(writer[root])
            writer[root] = i
        if not targets.isdisjoint(of_interest):
            touching.append(i)
        for root in reads & written - targets:
            if root in writer:
                needs.append(writer[root])
            readers.setdefault(root, []).append(i)
        if needs:
            before[i] = needs
    return Hazards(MappingProxyType(before), tuple(touching))


def _place(wait: fx.Node) -> int | None:
    """Which of a coalesced collective's results is waited for; None where there is one."""
    (result,) = wait.all_input_nodes
    place = result.args[1] if result.target is operator.getitem else None
    return place if isinstance(place, int) else None


class _Memory:
    """Which values may share memory: a union-find over node positions."""

    def __init__(
        self, nodes: Sequence[fx.Node], effects: Sequence[Effect], index: Mapping[fx.Node, int]
    ) -> None:
        self._parent = list(range(len(nodes)))
        storages: dict[int, int] = {}
        for i, (node, effect) in enumerate(zip(nodes, effects, strict=True)):
            for other in (*effect.views, *effect.writes):
                self._join(i, index[other])
            for value in _tensors(node.meta.get("val")):
                self._join(i, storages.setdefault(value, i))

    def root(self, i: int) -> int:
        """The position that stands for all values that may share memory with the one at ``i``."""
        parent = self._parent
        while parent[i] != i:
            parent[i] = parent[parent[i]]
            i = parent[i]
        return i

    def _join(self, a: int, b: int) -> None:
        a, b = self.root(a), self.root(b)
        if a != b:
            self._parent[max(a, b)] = min(a, b)


def _tensors(value: object) -> list[int]:
    """The identities of the storages in a ``meta['val']``; sparse and the like have none."""
    found = []
    for item in value if isinstance(value, (list, tuple)) else (value,):
        if isinstance(item, torch.Tensor) and item.layout is torch.strided:
            found.append(item.untyped_storage()._cdata)
    return found


@dataclass(slots=True)
class _EffectReader:
    """Reads effects, each operator's schema once."""

    known: dict[Any, tuple[tuple[int | str, ...], tuple[int | str, ...], bool, bool] | None] = field(
        default_factory=dict
    )

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
        if overload not in self.known:
            self.known[overload] = _schema_effect(node, overload)
        known = self.known[overload]
        if known is None:
            return _PURE
        writes, views, ordered, opaque = known
        return Effect(_given(node, writes), _given(node, views), ordered, opaque)

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


def _schema_effect(
    node: fx.Node, overload: torch._ops.OpOverload
) -> tuple[tuple[int | str, ...], tuple[int | str, ...], bool, bool] | None:
    """(written arguments, viewed arguments, ordered, opaque) of an operator; None when it has no effect."""
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
    return (tuple(writes), tuple(views), ordered, opaque) if writes or views or ordered or opaque else None


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
