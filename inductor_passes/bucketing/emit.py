"""How does a bucket look in the graph? Builds the nodes of a plan directly and puts everything in order."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import fx

from collective_identity import merge, store
from collective_identity.transports import WAIT, Transport, default_overload, launch_of, waits_of

from .hazards import hazards_of
from .node_builder import NodeBuilder, mode_of
from .order import RingError, stable_order
from .plan import Bucket, Plan

PASS_NAME: Final = "bucketing"
"""Producer of the identities written here, and the pass named in the provenance records."""

_ATEN: Final = torch.ops.aten
# Where the code came from, and in which half of the step it runs: taken from the first member.
_HANDED_ON: Final = ("stack_trace", "nn_module_stack", "partitioner_tag", "autograd_backward")


def apply_plan(gm: fx.GraphModule, plan: Plan) -> bool:
    """Replace the members of each bucket by one collective; True if the graph changed.

    A gather bucket stands where its first member stood, and what the others send is computed before; a
    reduction bucket stands where its last member stood, and what uses the earlier results comes after. Other
    nodes keep their order as far as that allows; writes, random numbers and effects keep it exactly.

    The new start node carries the members' combined identity and one shared `BucketRecord`; nothing else that
    is new carries any. All new nodes have ``meta['val']``, computed under the fake mode of the inputs, with
    the same shapes, dtypes and (contiguous) strides as the results they replace.

    The order is found before the graph is touched: an error leaves it as it was.

    Raises:
        ValueError: the plan is not of this graph, or its buckets wait for each other.
    """
    if not plan.buckets:
        return False
    layout = _Layout.of(gm, plan)
    sequence = layout.order()
    output = layout.nodes[-1]
    emitted: dict[int, list[fx.Node]] = {}
    replaced: dict[fx.Node, fx.Node] = {}
    with gm.graph.inserting_before(output):
        for bucket, items in zip(plan.buckets, layout.parts, strict=True):
            built = _emit(gm.graph, bucket, items)
            emitted.update(built)
            for member, result in zip(bucket.members, items.results, strict=True):
                replaced.update((wait, built[result][-1]) for wait in waits_of(member))
    _redirect_users(replaced)
    members = [m for b in plan.buckets for m in b.members]
    final = [n for item in sequence for n in emitted.get(item) or (layout.nodes[item],)]
    gone = {*members, *replaced}
    kept = (n for n in layout.nodes if n not in gone)
    unmoved = sum(1 for _ in itertools.takewhile(lambda p: p[0] is p[1], zip(final, kept, strict=False)))
    for node in final[unmoved:-1]:
        output.prepend(node)
    for node in (*replaced, *members):
        gm.graph.erase_node(node)
    gm.recompile()
    return True


def _redirect_users(replaced: Mapping[fx.Node, fx.Node]) -> None:
    """Give every user the new nodes, each user once: a graph's output may use them all."""

    def new(node: fx.Node) -> fx.Node:
        return replaced.get(node, node)

    for user in dict.fromkeys(user for old in replaced for user in old.users):
        user.args = fx.map_arg(user.args, new)
        user.kwargs = fx.map_arg(user.kwargs, new)


@dataclass(frozen=True, slots=True)
class _Items:
    """Positions of a bucket's parts among the items to be ordered: launch, wait, one result per member."""

    launch: int
    wait: int
    results: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class _Layout:
    """The graph as it will be, as numbered items: old nodes by position, then the parts of each bucket."""

    nodes: list[fx.Node]
    buckets: tuple[Bucket, ...]
    parts: tuple[_Items, ...]
    size: int

    @staticmethod
    def of(gm: fx.GraphModule, plan: Plan) -> _Layout:
        nodes = list(gm.graph.nodes)
        if not nodes or nodes[-1].op != "output":
            raise ValueError("expected the last node of the graph to be its output, found "
                             f"{nodes[-1].op if nodes else 'no node'}; repair the graph first")
        present = set(nodes)
        taken: set[fx.Node] = set()
        for bucket in plan.buckets:
            for member in bucket.members:
                if member not in present or member in taken:
                    what = "twice in the plan" if member in taken else "not in this graph"
                    raise ValueError(f"expected a plan of this graph, found collective {member.name!r} "
                                     f"{what}; plan again after any change to the graph")
                taken.add(member)
        parts, number = [], len(nodes)
        for bucket in plan.buckets:
            results = tuple(range(number + 2, number + 2 + len(bucket.members)))
            parts.append(_Items(number, number + 1, results))
            number += 2 + len(results)
        return _Layout(nodes, plan.buckets, tuple(parts), number)

    def order(self) -> list[int]:
        """Items in their new order, without the old start and wait nodes of the members."""
        index = {node: i for i, node in enumerate(self.nodes)}
        inputs = [_sent(m) for b in self.buckets for m in b.members]
        hazards = hazards_of(self.nodes, inputs)
        stands_for: dict[int, int] = {}
        is_old_wait: set[int] = set()
        for bucket, items in zip(self.buckets, self.parts, strict=True):
            for member, result in zip(bucket.members, items.results, strict=True):
                stands_for[index[member]] = items.launch
                for wait in waits_of(member):
                    stands_for[index[wait]] = result
                    is_old_wait.add(index[wait])
        before: list[list[int]] = [[] for _ in range(self.size)]
        priority: list[float] = [float(i) for i in range(self.size)]
        for i, node in enumerate(self.nodes):
            if node.op == "placeholder":
                priority[i] = -1.0
            if i in is_old_wait:  # hands on memory, reads and writes none
                continue
            item = stands_for.get(i, i)
            earlier = itertools.chain((index[n] for n in node.all_input_nodes), hazards.before.get(i, ()))
            before[item] += [stands_for.get(p, p) for p in earlier]
        hoisted = []
        for bucket, items in zip(self.buckets, self.parts, strict=True):
            places = [index[m] for m in bucket.members]
            waits = [min(index[w] for w in waits_of(m)) for m in bucket.members]
            gather = bucket.key.transport is Transport.ALL_GATHER
            priority[items.launch] = min(places) if gather else max(places)
            priority[items.wait] = min(waits)
            before[items.wait].append(items.launch)
            if gather:
                hoisted.append(items.launch)
            for result, place in zip(items.results, waits, strict=True):
                priority[result] = place
                before[result].append(items.wait)
        try:
            ordered = stable_order(before, priority, hoisted)
        except RingError as ring:
            stuck = set(ring.items)
            pairs = zip(self.buckets, self.parts, strict=True)
            names = ", ".join(bucket.members[0].name for bucket, part in pairs if part.launch in stuck)
            raise ValueError("expected buckets that do not wait for each other, found a ring through the "
                             f"buckets of {names}; use plan_buckets, which builds none") from ring
        return [item for item in ordered if item not in stands_for]


def _emit(graph: fx.Graph, bucket: Bucket, items: _Items) -> dict[int, list[fx.Node]]:
    """Build one bucket; the new nodes by item. A member's result is the last node of its item."""
    first = bucket.members[0]
    sent = [_sent(m) for m in bucket.members]
    build = NodeBuilder(graph, mode_of(sent), {k: first.meta[k] for k in _HANDED_ON if k in first.meta})
    ranks = bucket.key.group_size or 1
    if bucket.key.transport is Transport.REDUCE_SCATTER:
        rows, joined_along, received_rows = ranks, 1, 1
    else:
        rows, joined_along = 1, 0
        received_rows = ranks if bucket.key.transport is Transport.ALL_GATHER else 1
    sizes = [build.value(n).numel() // rows for n in sent]

    launch: list[fx.Node] = []
    flat = [
        build.reshape(node, [rows, size] if rows > 1 else [size], launch)
        for node, size in zip(sent, sizes, strict=True)
    ]
    if rows > 1:
        joined = build.call(_ATEN.cat.default, (flat, joined_along), launch)
        joined = build.reshape(joined, [rows * sum(sizes)], launch)
    else:
        joined = build.call(_ATEN.cat.default, (flat,), launch)
    start = build.call(default_overload(bucket.key.transport), _arguments(joined, bucket), launch)
    _identify(start, bucket)

    wait: list[fx.Node] = []
    received = build.call(WAIT, (start,), wait)
    if received_rows > 1:
        received = build.reshape(received, [received_rows, sum(sizes)], wait)
    split = build.split(received, sizes, 1 if received_rows > 1 else 0, wait)
    emitted = {items.launch: launch, items.wait: wait}
    for place, (member, item) in enumerate(zip(bucket.members, items.results, strict=True)):
        result: list[fx.Node] = []
        piece = build.item(split, place, result)
        build.contiguous(piece, member.meta["val"], result)
        emitted[item] = result
    return emitted


def _arguments(joined: fx.Node, bucket: Bucket) -> tuple[Any, ...]:
    """Arguments in the operators' order, see `default_overload`."""
    key = bucket.key
    reduce_op = () if key.reduce_op is None else (key.reduce_op,)
    size = () if key.transport is Transport.ALL_REDUCE else (key.group_size,)
    return (joined, *reduce_op, *size, key.group)


def _identify(start: fx.Node, bucket: Bucket) -> None:
    members = tuple(store.Member(m.name, i) for m, i in zip(bucket.members, bucket.identities, strict=True))
    store.set_members(start, store.BucketRecord(PASS_NAME, members))
    identity = merge.combine(bucket.identities, producer=PASS_NAME)
    if identity is None:
        raise ValueError(f"expected one role in the bucket of {bucket.members[0].name!r}, found several")
    store.stamp(start, identity)


def _sent(member: fx.Node) -> fx.Node:
    launch = launch_of(member)
    if launch is None or len(launch.inputs) != 1:
        raise ValueError(f"expected {member.name!r} to send one tensor, found {member.format_node()}")
    return launch.inputs[0]
