"""Where do the nodes of a plan stand? Has them built, and puts everything in order."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass

from torch import fx

from collective_identity.transports import Transport, waits_of

from .build import build_bucket, sent_by
from .hazards import hazards_of
from .order import RingError, stable_order
from .plan import Bucket, Plan


def apply_plan(gm: fx.GraphModule, plan: Plan) -> bool:
    """Replace the members of each bucket by one collective; True if the graph changed.

    Its code is not generated again: that is the caller's `gm.recompile()`.

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
            built = build_bucket(gm.graph, bucket)
            emitted.update({items.launch: built.launch, items.wait: built.wait})
            for place, (item, result) in enumerate(zip(items.results, built.results, strict=True)):
                emitted[item] = result
                replaced.update((old, result[-1]) for old in bucket.results(place))
    redirect_users(replaced)
    members = [m for b in plan.buckets for m in b.members]
    members += [n for b in plan.buckets for place in range(len(b.members)) for n in b.left_out(place)]
    final = [n for item in sequence for n in emitted.get(item) or (layout.nodes[item],)]
    gone = {*members, *replaced}
    kept = (n for n in layout.nodes if n not in gone)
    unmoved = sum(1 for _ in itertools.takewhile(lambda p: p[0] is p[1], zip(final, kept, strict=False)))
    for node in final[unmoved:-1]:
        output.prepend(node)
    place_of = layout.index
    for node in sorted(gone, key=place_of.__getitem__, reverse=True):
        gm.graph.erase_node(node)
    return True


def redirect_users(replaced: Mapping[fx.Node, fx.Node]) -> None:
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
    index: dict[fx.Node, int]

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
        index = {node: i for i, node in enumerate(nodes)}
        return _Layout(nodes, plan.buckets, tuple(parts), number, index)

    def order(self) -> list[int]:
        """Items in their new order, without the old start and wait nodes of the members."""
        index = self.index
        inputs = [sent_by(m) for b in self.buckets for m in b.members]
        hazards = hazards_of(self.nodes, inputs)
        stands_for: dict[int, int] = {}
        is_old_wait: set[int] = set()
        for bucket, items in zip(self.buckets, self.parts, strict=True):
            for number, (member, result) in enumerate(zip(bucket.members, items.results, strict=True)):
                stands_for[index[member]] = items.launch
                for wait in waits_of(member):
                    stands_for[index[wait]] = result
                    is_old_wait.add(index[wait])
                for node in bucket.left_out(number):
                    stands_for[index[node]] = items.launch if index[node] < index[member] else result
        before: list[list[int]] = [[] for _ in range(self.size)]
        priority: list[float] = [float(i) for i in range(self.size)]
        for i, node in enumerate(self.nodes):
            if node.op == "placeholder":
                priority[i] = -1.0
            if i in is_old_wait:  # hands on memory, reads and writes none
                continue
            item = stands_for.get(i, i)
            earlier = itertools.chain((index[n] for n in node.all_input_nodes), hazards.before.get(i, ()))
            before[item] += [q for q in (stands_for.get(p, p) for p in earlier) if q != item]
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
