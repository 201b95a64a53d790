"""Where does each payload belong? Plan which move to a start node and which go, then apply.

A producer's annotation covers a region, so casts, pads, views and waits beside the collective are stamped
too. Only the start node may carry an identity.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Final

from torch import fx

from . import codes, compat, store
from .codes import Code
from .transports import graph_modules, is_start, is_wait, launch_of, waits_of

# Operators that only pass data along: casts, views, slices, pads, cats.
_CARRIERS: Final = frozenset(
    "_to_copy to type_as contiguous clone alias detach lift_fresh_copy view view_as _unsafe_view reshape "
    "_reshape_alias flatten unflatten squeeze unsqueeze expand permute transpose t as_strided slice narrow "
    "select split split_with_sizes chunk unbind constant_pad_nd pad cat concat stack "
    "convert_element_type".split()
)
_NAMESPACES: Final = ("aten", "prims")


@dataclass(frozen=True, slots=True)
class Move:
    """A payload found on ``origin`` that belongs to start node ``target``."""

    origin: fx.Node
    target: fx.Node
    payloads: Mapping[str, object]
    code: Code = codes.MOVED_PAYLOAD


@dataclass(frozen=True, slots=True)
class Removal:
    """A payload on a node that launches no collective, and why it goes instead of moving."""

    node: fx.Node
    code: Code
    detail: str


@dataclass(frozen=True, slots=True)
class NormalizationPlan:
    """What `normalize` would do to a graph and its sub-graphs, decided without touching it.

    Attributes:
        moves: in graph order, at most one per start node.
        removals: in graph order, every other payload off a start node.
    """

    moves: tuple[Move, ...] = ()
    removals: tuple[Removal, ...] = ()
    _at: Mapping[fx.Node, Mapping[str, object]] = field(default_factory=lambda: MappingProxyType({}), repr=False)

    @property
    def changes(self) -> bool:
        """Whether applying the plan would change the graph."""
        return bool(self.moves or self.removals)

    def payloads_at(self, start: fx.Node) -> Mapping[str, object]:
        """The raw payloads a start node has once the plan is applied, by key."""
        moved = self._at.get(start)
        return store.raw_payloads(start) if moved is None else moved


def plan_normalization(gm: fx.GraphModule) -> NormalizationPlan:
    """Decide where each payload goes. Reads only; linear in nodes + edges.

    A payload on a wait, cast, view, slice, pad, cat or placeholder moves to the start node if exactly one is
    reached through such nodes, that node has no payload and no recorded loss, and the payload is valid there.
    Equal payloads move as one; different ones that would all fit are ambiguous and go.
    """
    moves: list[Move] = []
    removals: list[Removal] = []
    for module in graph_modules(gm):
        strays = [n for n in module.graph.nodes if store.has_payload(n) and not is_start(n)]
        if strays:
            _plan_graph(module.graph, strays, moves, removals)
    at = MappingProxyType({move.target: move.payloads for move in moves})
    return NormalizationPlan(tuple(moves), tuple(removals), at)


def apply_normalization(gm: fx.GraphModule, plan: NormalizationPlan) -> bool:
    """Carry out a plan made for this graph. Only metadata changes, never a node or edge.

    Returns:
        Whether anything changed.

    Raises:
        ValueError: the plan was made for another graph, or the graph lost a node since.
    """
    live = {node for module in graph_modules(gm) for node in module.graph.nodes}
    touched = [n for m in plan.moves for n in (m.origin, m.target)] + [r.node for r in plan.removals]
    for node in touched:
        if node not in live:
            raise ValueError(
                f"expected a plan made for this graph, found one that names node {node.name!r} of "
                "another; plan again after a pass that adds or erases nodes"
            )
    for move in plan.moves:
        store.put(move.target, move.payloads)
        store.put(move.origin, {})
    for removal in plan.removals:
        store.put(removal.node, {})
    return plan.changes


def normalize(gm: fx.GraphModule) -> bool:
    """Bring every payload of the graph and its sub-graphs to its start node, remove the rest.

    Returns:
        Whether anything changed; a second call returns False.
    """
    return apply_normalization(gm, plan_normalization(gm))


@dataclass(frozen=True, slots=True)
class _Reach:
    """Start nodes reached from a node: none, exactly one, or several; and whether any lacks a payload."""

    one: fx.Node | None = None
    several: bool = False
    bare: bool = False

    def merge(self, other: _Reach) -> _Reach:
        if other.one is None and not other.several:
            return self
        if self.one is None and not self.several:
            return other
        if self.one is other.one and not self.several and not other.several:
            return self
        return _Reach(None, True, self.bare or other.bare)


_NOTHING: Final = _Reach()


def _is_carrier(node: fx.Node) -> bool:
    if node.op != "call_function":
        return False
    namespace, _, name = (compat.op_name(node.target) or "").partition("::")
    return node.target is operator.getitem or (namespace in _NAMESPACES and name in _CARRIERS)


def _is_bare(start: fx.Node) -> bool:
    return not store.has_payload(start) and store.dropped_of(start) is None


def _at_start(start: fx.Node) -> _Reach:
    return _Reach(start, False, _is_bare(start))


def _merged(reaches: Iterable[_Reach]) -> _Reach:
    result = _NOTHING
    for reach in reaches:
        result = result.merge(reach)
    return result


def _reaches(graph: fx.Graph) -> dict[fx.Node, _Reach]:
    """Start nodes reached from each wait (its own), carrier (upwards and downwards) and placeholder."""
    nodes = list(graph.nodes)
    up: dict[fx.Node, _Reach] = {}
    down: dict[fx.Node, _Reach] = {}
    feeds: dict[fx.Node, _Reach] = {}
    for node in nodes:
        launch = launch_of(node)
        if launch is not None:
            here = up[node] = _at_start(node)
            for wait in waits_of(node):
                up[wait] = here
            for source in launch.inputs:
                feeds[source] = feeds.get(source, _NOTHING).merge(here)
        elif _is_carrier(node) or (is_wait(node) and node not in up):
            up[node] = _merged(up.get(i, _NOTHING) for i in node.all_input_nodes)
    for node in reversed(nodes):
        if node.op == "placeholder" or _is_carrier(node):
            through = _merged(down[u] for u in node.users if _is_carrier(u))
            down[node] = feeds.get(node, _NOTHING).merge(through)
    return {
        n: up.get(n, _NOTHING) if is_wait(n) else up.get(n, _NOTHING).merge(down.get(n, _NOTHING))
        for n in nodes
        if n.op == "placeholder" or is_wait(n) or _is_carrier(n)
    }


def _plan_graph(graph: fx.Graph, strays: list[fx.Node], moves: list[Move], removals: list[Removal]) -> None:
    reaches = _reaches(graph)
    fitting: dict[fx.Node, list[fx.Node]] = {}
    reasons: dict[fx.Node, Removal] = {}
    for node in strays:
        reach = reaches.get(node, _NOTHING)
        reason = _why_not(node, reach)
        if reason is None and reach.one is not None:
            fitting.setdefault(reach.one, []).append(node)
        elif reason is not None:
            reasons[node] = reason
    for start, origins in fitting.items():
        payloads = [store.raw_payloads(n) for n in origins]
        if all(p == payloads[0] for p in payloads):
            moves.append(Move(origins[0], start, MappingProxyType(payloads[0])))
            for node in origins[1:]:
                reasons[node] = Removal(node, codes.REMOVED_PAYLOAD, f"the same payload moves to {start.name!r}")
        else:
            for node in origins:
                detail = f"{len(origins)} nodes beside {start.name!r} carry different payloads"
                reasons[node] = Removal(node, codes.AMBIGUOUS_PAYLOAD, detail)
    removals += [reasons[n] for n in strays if n in reasons]


def _why_not(node: fx.Node, reach: _Reach) -> Removal | None:
    """Why the payload of ``node`` cannot move to the one start node it reaches; None when it can."""
    if reach.several:
        code = codes.AMBIGUOUS_PAYLOAD if reach.bare else codes.REMOVED_PAYLOAD
        return Removal(node, code, "it lies beside several collectives")
    start = reach.one
    if start is None:
        return Removal(node, codes.REMOVED_PAYLOAD, "it lies beside no collective")
    if not reach.bare:
        had = "a payload of its own" if store.has_payload(start) else "lost its identity in a pass"
        return Removal(node, codes.REMOVED_PAYLOAD, f"{start.name!r} has {had}")
    launch = launch_of(start)
    if launch is None or store.raw_payload(node) is None:
        return Removal(node, codes.REMOVED_PAYLOAD, f"{codes.SEQ_NR_COPY}: only a copied forward payload")
    verdict = store.verdict_for(start, launch, store.raw_payloads(node))
    if verdict.identity is None:
        return Removal(node, codes.REMOVED_PAYLOAD, f"not valid at {start.name!r}: {verdict.code}: {verdict.detail}")
    return None
