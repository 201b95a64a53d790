"""When should each FSDP collective start, and when should its result be waited for? A plan, from roles alone.

What eager FSDP2 does by hand with streams, as an order of nodes: the gather of the next parameter group starts
before this group's is waited for, and is unpacked where it is first used; a reduction starts where its gradients are
there, and is waited for where the next one is packed. So at most ``ahead + 1`` gathered groups and one unreduced
group are alive beside those in use. Collectives of other roles, and what merely looks like FSDP's, keep their places,
but where they wait for one that moved, or where the last reduction needs them early (`last`): on all ranks alike.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import fx

from collective_identity.identity import Source
from collective_identity.roles import GRAD_REDUCE_SHARD, GRAD_REPLICATE_REDUCE, PARAM_UNSHARD
from collective_identity.store import identity_of
from collective_identity.transports import is_start, is_wait, launches, waits_of

from ..uses import Inputs, first_use, packing, ready, unpacking
from .last import Reduction, larger_first

_WAIT, _START = 0.5, 0.75  # before the node at that position; a start before the wait that stands there too
_BEFORE_PACKING, _PACKING = 0.1, 0.25  # after the node at that position, and before a gather that starts there


@dataclass(frozen=True, slots=True)
class OverlapPlan:
    """Places for nodes; every other node keeps its own.

    Attributes:
        places: node → the position in the old order that it should stand at, between two whole ones.
        started: gathers that start earlier or later than they did, in order of their first use.
        delayed: reductions that start and are waited for where they can, in order.
        hurried: a reduction whose inputs are computed before their place, for its own.
    """

    places: Mapping[fx.Node, float]
    started: tuple[fx.Node, ...]
    delayed: tuple[fx.Node, ...]
    hurried: fx.Node | None = None

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
    delayed, hurried = _reductions(by_role[GRAD_REDUCE_SHARD], by_role[GRAD_REPLICATE_REDUCE], index, places)
    return OverlapPlan(places, tuple(started), tuple(delayed), hurried)


def _gathers(
    starts: Sequence[fx.Node], index: Mapping[fx.Node, int], ahead: int, places: dict[fx.Node, float]
) -> list[fx.Node]:
    found, inputs = [], Inputs()
    for start in starts:
        above = _packing(start, index)
        if above is None:
            continue
        waits = waits_of(start)
        below = unpacking(*waits, inputs=inputs)
        first = first_use(below, index, default=min(index[wait] for wait in waits))
        found.append((first, start, above, below))
    found.sort(key=lambda one: (one[0], index[one[1]]))
    for k, (first, start, above, below) in enumerate(found):
        when = -math.inf if k < ahead else found[k - ahead][0] - _START
        places[start] = when
        places.update(dict.fromkeys(above, when))
        places.update(dict.fromkeys(below, first - _WAIT))
    return [start for _, start, _, _ in found]


def _reductions(
    scatters: Sequence[fx.Node],
    reduces: Sequence[fx.Node],
    index: Mapping[fx.Node, int],
    places: dict[fx.Node, float],
) -> tuple[list[fx.Node], fx.Node | None]:
    """Start each where its gradients are there, and wait for it where the next is packed.

    An all-reduce of what was scattered starts then, and ends one later.
    """
    inputs = Inputs()
    packed = [(start, packing(start)) for start in scatters]
    made = [Reduction(ready(start, above, index), start, above) for start, above in packed]
    found, hurried = larger_first(sorted(made, key=lambda one: (one.ready, index[one.start])), index)
    last = float(len(index)) - 1 - _WAIT  # before the output
    behind = [*(one.ready + _BEFORE_PACKING for one in found), last, last]
    ends: dict[fx.Node, int] = {}
    for k, one in enumerate(found):
        places.update(dict.fromkeys((*one.above, one.start), one.ready + _PACKING))
        below = unpacking(*waits_of(one.start), inputs=inputs)
        when = min(behind[k + 1], first_use(below, index, default=len(index)) - _WAIT)
        places.update(dict.fromkeys(below, when))
        ends.update(dict.fromkeys(below, k + 1))
    for start in reduces:
        scattered = next((node for node in start.all_input_nodes if node in ends), None)
        if scattered is None:
            continue
        below = unpacking(*waits_of(start), inputs=inputs)
        use = first_use(below, index, default=len(index)) - _WAIT
        places[start] = min(behind[ends[scattered]], use)
        places.update(dict.fromkeys(below, min(behind[ends[scattered] + 1], use)))
    return [one.start for one in found], hurried


def _packing(start: fx.Node, index: Mapping[fx.Node, int]) -> list[fx.Node] | None:
    """What only ``start`` needs, above it; None when something above it communicates."""
    seen = {start}
    todo = [start]
    while todo:
        for node in todo.pop().all_input_nodes:
            if node in seen or node.op in ("placeholder", "get_attr"):
                continue
            if is_start(node) or is_wait(node):
                return None
            seen.add(node)
            todo.append(node)
    alone = {start: None}
    for node in sorted(seen - {start}, key=index.__getitem__, reverse=True):  # each after all that use it
        if all(user in alone for user in node.users):
            alone[node] = None
    return list(alone)[1:]
