"""When should each FSDP collective start, and when should its result be waited for? A plan, from roles alone.

What eager FSDP2 does by hand with streams, as an order of nodes: the gather of the next parameter group starts
before this group's is waited for, and is unpacked where it is first used; a reduction is waited for where the next
one is packed. So at most ``ahead + 1`` gathered groups and one unreduced group are alive beside those in use.
Collectives of other roles, and what merely looks like FSDP's, keep their places.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import fx

from collective_identity.identity import Source
from collective_identity.roles import GRAD_REDUCE_SHARD, GRAD_REPLICATE_REDUCE, PARAM_UNSHARD
from collective_identity.store import identity_of
from collective_identity.transports import is_start, is_wait, launches, waits_of

_WAIT, _START = 0.5, 0.75  # before the node at that position; a start before the wait that stands there too


@dataclass(frozen=True, slots=True)
class OverlapPlan:
    """Places for nodes; every other node keeps its own.

    Attributes:
        places: node → the position in the old order that it should stand at, between two whole ones.
        started: gathers that start earlier or later than they did, in order of their first use.
        delayed: reductions that are waited for later, in order.
    """

    places: Mapping[fx.Node, float]
    started: tuple[fx.Node, ...]
    delayed: tuple[fx.Node, ...]

    def to_dict(self) -> dict[str, Any]:
        """The plan as JSON values."""
        return {"gathers": len(self.started), "reductions": len(self.delayed)}


def plan_overlap(gm: fx.GraphModule, *, ahead: int = 1) -> OverlapPlan:
    """Decide where FSDP's collectives start and end. Changes nothing; linear in nodes and edges.

    Args:
        gm: a graph with payloads on its start nodes; only explicit ``fsdp.*`` identities are planned.
        ahead: how many parameter groups ahead of its first use a gather starts; 0 only delays what came too early.

    Raises:
        ValueError: ``ahead`` is negative.
    """
    if ahead < 0:
        raise ValueError(f"expected ahead >= 0 parameter groups, found {ahead}")
    nodes = list(gm.graph.nodes)
    index = {node: i for i, node in enumerate(nodes)}
    by_role: dict[str, list[fx.Node]] = {PARAM_UNSHARD: [], GRAD_REDUCE_SHARD: [], GRAD_REPLICATE_REDUCE: []}
    for start in launches(gm):
        identity = identity_of(start)
        if identity is None or identity.source is not Source.EXPLICIT or not waits_of(start):
            continue
        if identity.role in by_role:
            by_role[identity.role].append(start)
    places: dict[fx.Node, float] = {}
    started = _gathers(by_role[PARAM_UNSHARD], index, ahead, places)
    delayed = _reductions(by_role[GRAD_REDUCE_SHARD], by_role[GRAD_REPLICATE_REDUCE], index, places)
    return OverlapPlan(places, tuple(started), tuple(delayed))


def _gathers(
    starts: Sequence[fx.Node], index: Mapping[fx.Node, int], ahead: int, places: dict[fx.Node, float]
) -> list[fx.Node]:
    found = []
    for start in starts:
        packing = _packing(start)
        if packing is None:
            continue
        waits = waits_of(start)
        below = _unpacking(*waits)
        first = _first_use(below, index, default=min(index[wait] for wait in waits))
        found.append((first, start, packing, below))
    found.sort(key=lambda one: (one[0], index[one[1]]))
    for k, (first, start, packing, below) in enumerate(found):
        when = -math.inf if k < ahead else found[k - ahead][0] - _START
        places[start] = when
        places.update(dict.fromkeys(packing, when))
        places.update(dict.fromkeys(below, first - _WAIT))
    return [start for _, start, _, _ in found]


def _reductions(
    scatters: Sequence[fx.Node],
    reduces: Sequence[fx.Node],
    index: Mapping[fx.Node, int],
    places: dict[fx.Node, float],
) -> list[fx.Node]:
    """Wait for each where the next is packed; an all-reduce of what was scattered starts then, and ends one later."""
    last = float(len(index)) - 1 - _WAIT  # before the output
    behind = [*(index[_joined(start)] - _WAIT for start in scatters), last, last]
    ends: dict[fx.Node, int] = {}
    for k, start in enumerate(scatters):
        below = _unpacking(*waits_of(start))
        when = min(behind[k + 1], _first_use(below, index, default=len(index)) - _WAIT)
        places.update(dict.fromkeys(below, when))
        ends.update(dict.fromkeys(below, k + 1))
    for start in reduces:
        above = next((node for node in start.all_input_nodes if node in ends), None)
        if above is None:
            continue
        below = _unpacking(*waits_of(start))
        use = _first_use(below, index, default=len(index)) - _WAIT
        places[start] = min(behind[ends[above]], use)
        places.update(dict.fromkeys(below, min(behind[ends[above] + 1], use)))
    return list(scatters)


def _first_use(below: Collection[fx.Node], index: Mapping[fx.Node, int], *, default: int) -> int:
    """Position of the first node that computes with any of these, not counting the graph's output."""
    return min(
        (index[u] for node in below for u in node.users if u not in below and u.op != "output"), default=default
    )


def _packing(start: fx.Node) -> list[fx.Node] | None:
    """What only ``start`` needs, above it; None when something above it communicates."""
    above: list[fx.Node] = []
    seen = {start}
    todo = [start]
    while todo:
        for node in todo.pop().all_input_nodes:
            if node in seen or node.op in ("placeholder", "get_attr"):
                continue
            if is_start(node) or is_wait(node):
                return None
            if all(user in seen for user in node.users):
                above.append(node)
            seen.add(node)
            todo.append(node)
    return above


def _unpacking(*waits: fx.Node) -> dict[fx.Node, None]:
    """The waits and everything computed from them alone, in order: splits, views, copies, divisions."""
    below = dict.fromkeys(waits)
    todo = [*waits]
    while todo:
        for user in todo.pop().users:
            if user not in below and user.op == "call_function" and not is_start(user) and not is_wait(user):
                if all(node in below for node in user.all_input_nodes):
                    below[user] = None
                    todo.append(user)
    return below


def _joined(start: fx.Node) -> fx.Node:
    """The node that packs what is sent, or ``start`` itself."""
    node = start
    while len(node.all_input_nodes) == 1 and node.all_input_nodes[0].op == "call_function":
        node = node.all_input_nodes[0]
        if len(node.all_input_nodes) > 1:
            return node
    return start
