"""Where does each payload belong? Plan which move to a start node and which go, then apply.

A producer's annotation covers a region, so casts, pads, views and waits beside the collective are stamped
too. Only the start node may carry an identity.
"""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Final

from torch import fx

from . import codes, compat, store
from .codes import Code
from .identity import Identity
from .roles import DEFAULT_ROLES, RoleTable
from .scan import GraphScan, scan_graphs
from .subgraphs import graph_modules, wrapped_bodies
from .transports import Launch, is_wait, waited_start

PASS_NAME: Final = "normalize"
"""The pass named in the losses recorded here."""

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
    """A payload on a node that launches no collective, and why it goes instead of moving.

    Attributes:
        node: where it lies.
        code: ``REMOVED_PAYLOAD`` or ``AMBIGUOUS_PAYLOAD``; in ``refused`` also what a role table objects to.
        detail: expected and found, in words.
        why: what makes it invalid at the start node it lies beside; None when that is not the reason.
    """

    node: fx.Node
    code: Code
    detail: str
    why: Code | None = None

    @property
    def lost_as(self) -> Code:
        """The code to record on the start node that is left without an identity."""
        return self.why or self.code


@dataclass(frozen=True, slots=True)
class NormalizationPlan:
    """What `normalize` would do to a graph and its sub-graphs, decided without touching it.

    Attributes:
        moves: in graph order, at most one per start node.
        removals: in graph order, every other payload off a start node.
        refused: start node without an identity → what kept it from having one: a payload beside it that fits
            nowhere, or, under another role table than the default, its own. Recorded there as lost.
    """

    moves: tuple[Move, ...] = ()
    removals: tuple[Removal, ...] = ()
    refused: Mapping[fx.Node, Removal] = field(default_factory=lambda: MappingProxyType({}))
    _at: Mapping[fx.Node, Mapping[str, object]] = field(default_factory=lambda: MappingProxyType({}), repr=False)

    @property
    def changes(self) -> bool:
        """Whether applying the plan would change the graph."""
        return bool(self.moves or self.removals or self.refused)

    def summary(self) -> dict[str, int]:
        """How many payloads move, go by code, and are refused; only what is there."""
        counts = Counter(removal.code.slug for removal in self.removals)
        counts.update(moved_payload=len(self.moves), refused=len(self.refused))
        return {name: count for name, count in sorted(counts.items()) if count}

    def payloads_at(self, start: fx.Node) -> Mapping[str, object]:
        """The raw payloads a start node has once the plan is applied, by key."""
        moved = self._at.get(start)
        return store.raw_payloads(start) if moved is None else moved


def plan_normalization(gm: fx.GraphModule, *, roles: RoleTable = DEFAULT_ROLES) -> NormalizationPlan:
    """Decide where each payload goes. Reads only; linear in nodes + edges.

    A payload on a wait, cast, view, slice, pad, cat or placeholder moves to the start node if exactly one is
    reached through such nodes, that node has no payload and no recorded loss, and the payload is valid there.
    One in the body of a ``control_deps`` node counts as that node's. Equal payloads move as one; different ones that
    would all fit are ambiguous and go. An explicit payload goes before inferred ones, the start node's own included
    (that of a merged node excepted).

    Args:
        gm: the graph.
        roles: role × transport rows. Payloads on start nodes that these rows refuse, and the default rows do not,
            are refused for good, so that whoever reads the graph later needs no table.
    """
    return plan_scanned(scan_graphs(gm), roles)


def plan_scanned(scans: Collection[GraphScan], roles: RoleTable = DEFAULT_ROLES) -> NormalizationPlan:
    """`plan_normalization` for graphs that were scanned already."""
    moves: list[Move] = []
    removals: list[Removal] = []
    refused: dict[fx.Node, Removal] = {}
    for scan in scans:
        if scan.strays:
            _plan_graph(scan, roles, moves, removals, refused)
    at = MappingProxyType({move.target: move.payloads for move in moves})
    if roles is not DEFAULT_ROLES:
        for scan in scans:
            for start, launch in scan.launches.items():
                if start not in at and store.verdict_for(start, launch, own := store.raw_payloads(start)).identity:
                    verdict = store.verdict_for(start, launch, own, roles=roles)
                    if verdict.code is not None:
                        refused[start] = Removal(start, verdict.code, verdict.detail, verdict.code)
    for start in at:
        refused.pop(start, None)
    return NormalizationPlan(tuple(moves), tuple(removals), MappingProxyType(refused), at)


def apply_normalization(gm: fx.GraphModule, plan: NormalizationPlan) -> bool:
    """Carry out a plan made for this graph. Only metadata changes, never a node or edge.

    Returns:
        Whether anything changed.

    Raises:
        ValueError: the plan was made for another graph, or the graph lost a node since.
    """
    if not plan.changes:
        return False
    modules = [m for module in graph_modules(gm) for m in (module, *(body for body, _ in wrapped_bodies(module)))]
    live = {node for module in modules for node in module.graph.nodes}
    touched = [n for m in plan.moves for n in (m.origin, m.target)] + [r.node for r in plan.removals] + [*plan.refused]
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
    for start, removal in plan.refused.items():
        store.drop(start, removal.lost_as, PASS_NAME, removal.detail)
    return True


def normalize(gm: fx.GraphModule, *, roles: RoleTable = DEFAULT_ROLES) -> bool:
    """Bring every payload of the graph and its sub-graphs to its start node, remove the rest.

    A start node whose only payloads fit nowhere says so: its absence is ``dropped`` by ``normalize``, with the code.

    Args:
        gm: the graph.
        roles: role × transport rows, see `plan_normalization`.

    Returns:
        Whether anything changed; a second call returns False.
    """
    return apply_normalization(gm, plan_normalization(gm, roles=roles))


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


class _Neighbourhood:
    """Start nodes reached from a wait (its own), a carrier (upwards and downwards) or a placeholder.

    Looks only at what lies between the nodes asked about and the collectives they reach, at each node once.
    """

    def __init__(self, launches: Mapping[fx.Node, Launch], runners: Mapping[fx.Node, tuple[fx.Node, ...]]) -> None:
        self._launches = launches
        self._runners = runners
        self._up: dict[fx.Node, _Reach] = {}
        self._down: dict[fx.Node, _Reach] = {}
        self._carriers: dict[int, bool] = {}
        self._fed: dict[fx.Node, _Reach] = {}
        for start, launch in launches.items():
            for source in launch.inputs:
                self._fed[source] = self._fed.get(source, _NOTHING).merge(_at_start(start))

    def of(self, node: fx.Node) -> _Reach:
        if node in self._runners:
            return _merged(self.of(runner) for runner in self._runners[node])
        if node in self._launches:
            return _at_start(node)
        if is_wait(node):
            return self._settled(node, self._up, self._above, self._own)
        down = _NOTHING
        if node.op == "placeholder" or self._is_carrier(node):
            down = self._settled(node, self._down, self._below, self._feeds)
        up = self._settled(node, self._up, self._above, self._own) if self._is_carrier(node) else _NOTHING
        return up.merge(down)

    def _settled(
        self,
        node: fx.Node,
        table: dict[fx.Node, _Reach],
        onwards: Callable[[fx.Node], list[fx.Node]],
        own: Callable[[fx.Node], _Reach],
    ) -> _Reach:
        stack = [(node, False)]
        while stack:
            current, entered = stack.pop()
            if entered:
                table[current] = _merged([own(current), *(table[n] for n in onwards(current))])
            elif current not in table:
                stack.append((current, True))
                stack += [(n, False) for n in onwards(current) if n not in table]
        return table[node]

    def _own(self, node: fx.Node) -> _Reach:
        start = waited_start(node, self._launches) if node not in self._launches else node
        return _NOTHING if start is None else _at_start(start)

    def _above(self, node: fx.Node) -> list[fx.Node]:
        if node in self._launches or waited_start(node, self._launches) is not None:
            return []
        return [i for i in node.all_input_nodes if i in self._launches or self._is_carrier(i) or is_wait(i)]

    def _feeds(self, node: fx.Node) -> _Reach:
        return self._fed.get(node, _NOTHING)

    def _below(self, node: fx.Node) -> list[fx.Node]:
        return [user for user in node.users if self._is_carrier(user)]

    def _is_carrier(self, node: fx.Node) -> bool:
        if node.op != "call_function":
            return False
        key = id(node.target)
        found = self._carriers.get(key)
        if found is None:
            namespace, _, name = (compat.op_name(node.target) or "").partition("::")
            found = node.target is operator.getitem or (namespace in _NAMESPACES and name in _CARRIERS)
            self._carriers[key] = found
        return found


def _is_bare(start: fx.Node) -> bool:
    return not store.has_payload(start) and store.dropped_of(start) is None


def _at_start(start: fx.Node) -> _Reach:
    return _Reach(start, False, _is_bare(start))


def _merged(reaches: Iterable[_Reach]) -> _Reach:
    result = _NOTHING
    for reach in reaches:
        result = result.merge(reach)
    return result


def _plan_graph(
    scan: GraphScan,
    roles: RoleTable,
    moves: list[Move],
    removals: list[Removal],
    refused: dict[fx.Node, Removal],
) -> None:
    near = _Neighbourhood(scan.launches, scan.runners)
    fitting: dict[fx.Node, list[tuple[fx.Node, Identity]]] = {}
    reasons: dict[fx.Node, Removal] = {}
    for node in scan.strays:
        reach = near.of(node)
        found = _fit(node, reach, scan.launches, roles)
        if isinstance(found, Removal):
            reasons[node] = found
            if found.why is not None and reach.one is not None and found.why is not codes.SEQ_NR_COPY:
                refused.setdefault(reach.one, found)
        else:
            start, identity = found
            fitting.setdefault(start, []).append((node, identity))
    for start, candidates in fitting.items():
        explicit = any(identity.explicit for _, identity in candidates)
        chosen = [(node, identity) for node, identity in candidates if identity.explicit == explicit]
        origin, first = chosen[0]
        if all(_same(identity, first) for _, identity in chosen):
            moves.append(Move(origin, start, MappingProxyType(store.raw_payloads(origin))))
            refused.pop(start, None)
            for node, identity in candidates:
                if node is not origin:
                    which = "the same payload" if identity.explicit == explicit else "an explicit payload"
                    reasons[node] = Removal(node, codes.REMOVED_PAYLOAD, f"{which} moves to {start.name!r}")
        else:
            for node, _ in candidates:
                detail = f"{len(candidates)} nodes beside {start.name!r} carry different payloads"
                reasons[node] = Removal(node, codes.AMBIGUOUS_PAYLOAD, detail)
            if _is_bare(start):
                refused.setdefault(start, reasons[origin])
    removals += [reasons[n] for n in scan.strays if n in reasons]


def _same(one: Identity, other: Identity) -> bool:
    """Whether two payloads say the same; the order of parameter names says nothing."""
    return one == other or (
        sorted(one.params or ()) == sorted(other.params or ())
        and (one.params is None) == (other.params is None)
        and replace(one, params=None) == replace(other, params=None)
    )


def _fit(
    node: fx.Node, reach: _Reach, launches: Mapping[fx.Node, Launch], roles: RoleTable
) -> tuple[fx.Node, Identity] | Removal:
    """The start node that the payload of ``node`` belongs to and what it says there, or why there is none."""
    if reach.several:
        code = codes.AMBIGUOUS_PAYLOAD if reach.bare else codes.REMOVED_PAYLOAD
        return Removal(node, code, "it lies beside several collectives")
    start = reach.one
    if start is None:
        return Removal(node, codes.REMOVED_PAYLOAD, "it lies beside no collective")
    payloads = store.raw_payloads(node)
    verdict = store.verdict_for(start, launches[start], payloads, roles=roles)
    if not reach.bare:
        if verdict.identity is not None and verdict.identity.explicit and _only_inferred(start, launches[start]):
            return start, verdict.identity
        had = "a payload of its own" if store.has_payload(start) else "lost its identity in a pass"
        return Removal(node, codes.REMOVED_PAYLOAD, f"{start.name!r} has {had}")
    if store.key_of(node) not in payloads:
        return Removal(node, codes.REMOVED_PAYLOAD, f"{codes.SEQ_NR_COPY}: only a copied forward payload")
    if verdict.identity is None:
        detail = f"not valid at {start.name!r}: {verdict.code}: {verdict.detail}"
        return Removal(node, codes.REMOVED_PAYLOAD, detail, verdict.code)
    return start, verdict.identity


def _only_inferred(start: fx.Node, launch: Launch) -> bool:
    """Whether what the start node says is a guess that an explicit word replaces; a merged node's is none."""
    own = store.verdict_for(start, launch, store.raw_payloads(start)).identity
    return own is not None and not own.explicit and store.members_of(start) is None and store.dropped_of(start) is None
