"""Graphs in which something that is easily overlooked would change values, each by name: `GRAPHS`.

Every collective that could be merged, fused or moved has the role that invites it. Those about writes are in
`hostile_writes`.
"""

from __future__ import annotations

from collections.abc import Callable
from types import MappingProxyType

import torch

from collective_identity.store import stamp
from tests.graphs import Builder, aten, identity
from tests.passes.hostile_parts import REDUCE, TP, UNSHARD, C, Made, add, control, gather, inputs, late, reduce, scatter

# ---- waits


def waited_for_late_and_in_another_order() -> Made:
    b = Builder()
    x, y, g, h = inputs(b, 4)
    made = [b.all_gather(x, role=UNSHARD), b.reduce_scatter(g, op="sum", role=REDUCE)]
    made += [b.all_gather(y, role=UNSHARD), b.reduce_scatter(h, op="sum", role=REDUCE)]
    return b, [late(one) for one in reversed(made)]


def dead_and_several_waits() -> Made:
    b = Builder()
    x, y = inputs(b, 2)
    first, second = b.all_gather(x, role=UNSHARD), b.all_gather(y, role=UNSHARD)
    again = b.wait(first.start)
    b.wait(second.start)
    return b, [first.wait, again, b.call(aten.mul.Tensor, again, first.wait), second.wait, second.wait]


def nobody_uses_the_waits() -> Made:
    b = Builder()
    x, y = inputs(b, 2)
    b.all_gather(x, role=UNSHARD)
    b.reduce_scatter(y, role=REDUCE, op="sum")
    b.all_gather(y, role=UNSHARD)
    return b, [x]


def ordering_dependencies() -> Made:
    """The next gather may only start behind the wait of the one before: a ``control_deps`` says so."""
    b = Builder()
    x, y, z = inputs(b, 3)
    first = b.all_gather(x, role=UNSHARD)
    behind = control(b, [first.wait], C.all_gather_into_tensor.default, y, 2, "dp")
    stamp(behind, identity(UNSHARD))
    third = gather(b, z)
    return b, [first.wait, third, b.wait(behind)]


def waits_with_dependencies() -> Made:
    """A wait that is wrapped to run behind another's, and an operator wrapped to run behind a start node."""
    b = Builder()
    x, y, z = inputs(b, 3)
    first, second, third = (b.all_gather(w, role=UNSHARD) for w in (x, y, z))
    b.graph.erase_node(second.wait)
    wrapped = control(b, [first.wait], C.wait_tensor.default, second.start)
    behind = control(b, [third.start], aten.neg.default, x)
    return b, [first.wait, late(third), wrapped, gather(b, behind)]


def computation_behind_a_gather() -> Made:
    """An operator wrapped so that it runs behind a gather's wait, and what it yields is gathered."""
    b = Builder()
    x, y, z = inputs(b, 3)
    first = gather(b, x)
    second = gather(b, control(b, [first], aten.neg.default, y))
    return b, [first, second, gather(b, z)]


def write_behind_a_gather() -> Made:
    b = Builder()
    x, y, z = inputs(b, 3)
    first = gather(b, x)
    before = gather(b, y)
    control(b, [first], aten.neg_.default, y)
    return b, [first, before, gather(b, y), gather(b, z)]


# ---- what must agree


def operations() -> Made:
    """Every reduce operation twice, in turn."""
    b = Builder()
    xs = inputs(b, 10)
    ops = ("sum", "max", "min", "product", "avg")
    shards = [scatter(b, x, op=op) for x, op in zip(xs, ops * 2, strict=True)]
    return b, [*shards, *(reduce(b, shard, op=op) for shard, op in zip(shards, ops * 2, strict=True))]


def sums_of_other_operations() -> Made:
    b = Builder()
    xs = inputs(b, 6)
    total = scatter(b, xs[0])
    for x, op in zip(xs[1:], ("max", "sum", "avg", "product", "sum"), strict=True):
        total = b.call(aten.add.Tensor, total, scatter(b, x, op=op))
    return b, [total]


def one_set_of_ranks_two_groups() -> Made:
    b = Builder()
    xs = inputs(b, 4)
    waits = [scatter(b, x, group=group) for x, group in zip(xs, ("dp", "other") * 2, strict=True)]
    total = waits[0]
    for wait in waits[1:]:
        total = b.call(aten.add.Tensor, total, wait)
    return b, [total, *(gather(b, x, group=g) for x, g in zip(xs, ("other", "dp") * 2, strict=True))]


def rings_through_three_buckets() -> Made:
    """a1→b2, b1→c2, c1→a2: any two of the three merges are possible, never all of them."""
    b = Builder()
    x, y, z = inputs(b, 3, (8, 8))
    a1, b1, c1 = gather(b, x), scatter(b, y), reduce(b, z)
    a2 = gather(b, b.call(aten.mul.Tensor, c1, 2))
    b2 = scatter(b, b.call(aten.mul.Tensor, a1, 2))
    c2 = reduce(b, b.cat([b1, b1]))
    return b, [a2, b2, c2]


def through_a_foreign_collective() -> Made:
    """A path between two members that leads through a collective of another role."""
    b = Builder()
    x, y = inputs(b, 2)
    first = gather(b, x)
    between = b.all_reduce(b.call(aten.mul.Tensor, first, 2), group="tp", role=TP).wait
    return b, [gather(b, b.slice(between, 0, 4)), gather(b, y), first]


def types_and_bytes() -> Made:
    """Odd lengths of several types; half of a bucket is empty."""
    b = Builder()
    shapes = [(3,), (1, 5), (0, 2), (7,), (2, 0), (1,)]
    dtypes = [torch.bool, torch.float64, torch.float32, torch.bfloat16, torch.int64, torch.int8]
    given = zip(shapes, dtypes, strict=True)
    shards = [b.placeholder(f"x{i}", shape, dtype=dtype) for i, (shape, dtype) in enumerate(given)]
    return b, [gather(b, x) for x in [*shards, *shards[::-1]]]


def negated_and_conjugated_views() -> Made:
    """Views that carry a sign to be applied later."""
    b = Builder()
    x, y = inputs(b, 2)
    z = b.placeholder("z", (4, 8), dtype=torch.int32)
    return b, [gather(b, b.call(aten._neg_view.default, x)), gather(b, y), gather(b, z)]


def expanded_and_overlapping() -> Made:
    b = Builder()
    x, y = b.placeholder("x", (1, 8)), b.placeholder("y", (4, 8))
    wide = b.call(aten.expand.default, x, [4, 8])
    return b, [gather(b, wide), gather(b, y), reduce(b, wide), reduce(b, b.call(aten.permute.default, y, [1, 0]))]


def empty_shards() -> Made:
    b = Builder()
    shards = [b.placeholder(f"x{i}", shape) for i, shape in enumerate([(0, 3), (4, 0), (0,), (2, 3)])]
    fulls = [gather(b, x) for x in shards]
    return b, [*fulls, *(scatter(b, full) for full in fulls), *(reduce(b, x) for x in shards)]


# ---- sums


def sums_with_something_wrong() -> Made:
    """Scaled, broadcast, promoted, used twice, in place: each beside a plain pair in one tree."""
    b = Builder()
    xs = inputs(b, 8)
    row = b.placeholder("row", (2, 8))
    wide = b.placeholder("wide", (4, 8), dtype=torch.float64)
    s = [scatter(b, x) for x in xs]
    scaled = add(b, s[0], s[1], alpha=3)
    spread = add(b, add(b, s[2], s[3]), scatter(b, row))
    promoted = add(b, add(b, s[4], s[5]), scatter(b, wide))
    again = add(b, s[6], s[7])
    return b, [scaled, spread, promoted, again, s[6]]


def sum_in_place() -> Made:
    b = Builder()
    xs = inputs(b, 3)
    s = [scatter(b, x) for x in xs]
    b.call(aten.add_.Tensor, s[0], s[1])
    return b, [add(b, s[0], s[2])]


def sum_that_feeds_its_own_addend() -> Made:
    """The partial sum is sent again, and what comes back is added to it."""
    b = Builder()
    x, y, z = inputs(b, 3, (8, 8))
    partial = add(b, scatter(b, x), scatter(b, y))
    again = scatter(b, b.cat([partial, partial]))
    return b, [add(b, add(b, again, scatter(b, z)), partial)]


def added_to_itself() -> Made:
    b = Builder()
    x, y = inputs(b, 2)
    one = b.reduce_scatter(x, role=REDUCE, op="sum")
    return b, [add(b, add(b, one.wait, one.wait), scatter(b, y)), add(b, b.wait(one.start), scatter(b, x))]


# ---- products


def gathered_and_written_between_products() -> Made:
    """A product before and one behind a write to the gathered tensor."""
    b = Builder()
    x, w, v = b.placeholder("x", (4, 6)), b.placeholder("w", (6, 6)), b.placeholder("v", (6, 6))
    full = b.all_gather(x, role=TP).wait
    first = b.call(aten.mm.default, full, w)
    b.call(aten.mul_.Tensor, full, 2)
    return b, [first, b.call(aten.mm.default, full, v), full]


def gathered_and_written_before_the_product() -> Made:
    b = Builder()
    x, w = b.placeholder("x", (4, 6)), b.placeholder("w", (6, 6))
    full = b.all_gather(x, role=TP).wait
    b.call(aten.mul_.Tensor, b.view(full, [-1]), 2)
    return b, [b.call(aten.mm.default, full, w)]


def product_written_through_a_view() -> Made:
    b = Builder()
    x, w = b.placeholder("x", (4, 6)), b.placeholder("w", (6, 6))
    product = b.call(aten.mm.default, x, w)
    flat = b.view(product, [-1])
    b.call(aten.mul_.Tensor, flat, 2)
    return b, [b.reduce_scatter(product, op="sum", role=TP).wait]


def weight_written_between_products() -> Made:
    b = Builder()
    x, w = b.placeholder("x", (4, 6)), b.placeholder("w", (6, 6))
    full = b.all_gather(x, role=TP).wait
    first = b.call(aten.mm.default, full, w)
    b.call(aten.mul_.Tensor, w, 2)
    return b, [first, b.call(aten.mm.default, full, w)]


def products_of_fsdps() -> Made:
    """A gathered parameter on the left, a weight's gradient that is scattered: neither is tensor parallelism's."""
    b = Builder()
    w, act, g = b.placeholder("w", (4, 6)), b.placeholder("act", (6, 6)), b.placeholder("g", (4, 6))
    full = gather(b, w)
    return b, [b.call(aten.mm.default, full, act), scatter(b, b.call(aten.mm.default, g, act))]


GRAPHS: MappingProxyType[str, Callable[[], Made]] = MappingProxyType({
    make.__name__: make for make in (
        waited_for_late_and_in_another_order, dead_and_several_waits, nobody_uses_the_waits, ordering_dependencies,
        waits_with_dependencies, computation_behind_a_gather, write_behind_a_gather, operations,
        sums_of_other_operations, one_set_of_ranks_two_groups, rings_through_three_buckets,
        through_a_foreign_collective, types_and_bytes, negated_and_conjugated_views, expanded_and_overlapping,
        empty_shards, sums_with_something_wrong, sum_in_place, sum_that_feeds_its_own_addend, added_to_itself,
        gathered_and_written_between_products, gathered_and_written_before_the_product,
        product_written_through_a_view, weight_written_between_products, products_of_fsdps,
    )
})
