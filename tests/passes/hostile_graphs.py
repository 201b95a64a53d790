"""Graphs in which something that is easily overlooked would change values, each by name: `GRAPHS`.

Every collective that could be merged, fused or moved has the role that invites it.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from types import MappingProxyType
from typing import Any

import torch
from torch import fx

from collective_identity.store import stamp
from collective_identity.subgraphs import CONTROL_DEPS
from tests.graphs import Builder, Collective, aten, identity

C = torch.ops._c10d_functional
UNSHARD, REDUCE, REPLICATE = "fsdp.param_unshard", "fsdp.grad_reduce_shard", "fsdp.grad_replicate_reduce"
TP = "tp.activation"
Made = tuple[Builder, list[fx.Node]]


def gather(b: Builder, x: fx.Node, **given: Any) -> fx.Node:
    return b.all_gather(x, **{"role": UNSHARD, **given}).wait


def scatter(b: Builder, x: fx.Node, **given: Any) -> fx.Node:
    return b.reduce_scatter(x, **{"role": REDUCE, "op": "sum", **given}).wait


def reduce(b: Builder, x: fx.Node, **given: Any) -> fx.Node:
    return b.all_reduce(x, **{"role": REPLICATE, **given}).wait


def late(made: Collective) -> fx.Node:
    """The wait of a collective, moved to the end of the graph so far."""
    last = list(made.start.graph.nodes)[-1]
    if last is not made.wait:
        last.append(made.wait)
    return made.wait


def inputs(b: Builder, count: int, shape: tuple[int, ...] = (4, 8), **given: Any) -> list[fx.Node]:
    return [b.placeholder(f"x{i}", shape, **given) for i in range(count)]


# ---- memory: who writes to what, and when


def write_behind_the_wait_of_another() -> Made:
    """What a tensor-parallel gather sends is written once it is waited for, and a parameter is made of it."""
    b = Builder()
    x, w = inputs(b, 2)
    first = gather(b, w)
    other = b.all_gather(x, group="tp", role=TP)
    kept = b.call(aten.sin.default, other.wait)
    write = b.call(aten.mul_.Tensor, x, 2)
    return b, [first, kept, gather(b, b.call(aten.neg.default, write))]


def write_behind_the_wait_of_a_reduction() -> Made:
    b = Builder()
    x, g, h = inputs(b, 3)
    made = b.reduce_scatter(x, group="tp", op="sum", role=TP)
    write = b.call(aten.mul_.Tensor, x, 2)
    return b, [scatter(b, g), made.wait, scatter(b, b.call(aten.neg.default, write)), scatter(b, h)]


def buffer_read_by_its_own_name() -> Made:
    """An out= gather: what it fills is read by the buffer's name, once it has been waited for."""
    b = Builder()
    w, x = inputs(b, 2)
    first = gather(b, w)
    buffer = b.call(aten.full.default, [8, 8], 0.0)
    start = out_gather(b, x, buffer)
    b.wait(start)
    return b, [first, gather(b, b.call(aten.mul.Tensor, buffer, 2))]


def buffer_filled_twice() -> Made:
    b = Builder()
    x, y, w, v = inputs(b, 4)
    buffer = b.call(aten.full.default, [8, 8], 0.0)
    outs = []
    for sent, shard in ((x, w), (y, v)):
        b.wait(out_gather(b, sent, buffer))
        outs += [b.call(aten.mul.Tensor, buffer, 2), gather(b, shard)]
    return b, outs


def reduced_in_place() -> Made:
    """An in-place all-reduce between two gathers; the second sends what it left, by the tensor's own name."""
    b = Builder()
    w, x = inputs(b, 2)
    first = gather(b, w)
    start = b.graph.call_function(C.all_reduce_.default, (x, "sum", "dp"))
    start.meta["val"] = x.meta["val"]
    b.wait(start)
    return b, [first, gather(b, b.call(aten.mul.Tensor, x, 2)), gather(b, x)]


def reduced_in_place_and_waited_for_by_name() -> Made:
    b = Builder()
    w, x = inputs(b, 2)
    first = gather(b, w)
    start = b.graph.call_function(C.all_reduce_.default, (x, "sum", "dp"))
    start.meta["val"] = x.meta["val"]
    b.wait(x)
    return b, [first, gather(b, b.call(aten.neg.default, x))]


def reduced_in_place_together() -> Made:
    b = Builder()
    w, x, y = inputs(b, 3)
    first = gather(b, w)
    start = b.graph.call_function(C.all_reduce_coalesced_.default, ([x, y], "sum", "dp"))
    start.meta["val"] = [x.meta["val"], y.meta["val"]]
    pieces = [b.graph.call_function(operator.getitem, (start, i)) for i in range(2)]
    for piece, x_or_y in zip(pieces, (x, y), strict=True):
        piece.meta["val"] = x_or_y.meta["val"]
        b.wait(piece)
    return b, [first, gather(b, b.call(aten.neg.default, y)), gather(b, x)]


def views_of_one_buffer() -> Made:
    """Two parameters in one flat buffer, which is written as a whole between their gathers."""
    b = Builder()
    flat, w = b.placeholder("flat", (64,)), b.placeholder("w", (4, 8))
    left, right = (b.view(b.slice(flat, i, i + 32), [4, 8]) for i in (0, 32))
    first = gather(b, left)
    write = b.call(aten.mul_.Tensor, flat, 2)
    return b, [first, gather(b, right), gather(b, w), write]


def inputs_that_are_one_tensor() -> Made:
    """Two inputs that tracing saw as one memory."""
    b = Builder()
    x, y, w = inputs(b, 3)
    y.meta["val"] = x.meta["val"].view(4, 8)
    first = gather(b, x)
    b.call(aten.mul_.Tensor, y, 2)
    return b, [first, gather(b, w), y]


def result_written_by_its_first_user() -> Made:
    b = Builder()
    x, y = inputs(b, 2)
    first, second = gather(b, x), gather(b, y)
    write = b.call(aten.add_.Tensor, first, 1)
    return b, [b.call(aten.mul.Tensor, first, 2), write, b.call(aten.mul.Tensor, second, first)]


def result_of_a_reduction_written() -> Made:
    """The pieces of a reduced bucket lie in one buffer: a write to one must not reach the other."""
    b = Builder()
    x, y = inputs(b, 2)
    first, second = reduce(b, x), reduce(b, y)
    b.call(aten.mul_.Tensor, first, 3)
    return b, [first, second, b.call(aten.add.Tensor, second, first)]


def copied_back_into_the_parameter() -> Made:
    """The optimizer's epilogue: parameters are gathered, scattered gradients are added to them, in place."""
    b = Builder()
    ws = inputs(b, 2, (4, 4))
    fulls = [gather(b, w) for w in ws]
    grads = [scatter(b, b.call(aten.mul.Tensor, full, 2)) for full in reversed(fulls)]
    for w, grad in zip(reversed(ws), grads, strict=True):
        b.call(aten.copy_.default, w, b.call(aten.add.Tensor, w, grad))
    return b, [*fulls, *ws]


def gathered_again_after_the_step() -> Made:
    b = Builder()
    ws = inputs(b, 2)
    before = [gather(b, w) for w in ws]
    for w in ws:
        b.call(aten.mul_.Tensor, w, 2)
    return b, [*before, *(gather(b, w) for w in ws)]


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


def add(b: Builder, *values: fx.Node, **given: Any) -> fx.Node:
    return b.call(aten.add.Tensor, *values, **given)


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


# ---- helpers


def out_gather(b: Builder, x: fx.Node, buffer: fx.Node) -> fx.Node:
    start = b.graph.call_function(C.all_gather_into_tensor_out.default, (x, 2, "dp"), {"out": buffer})
    start.meta["val"] = buffer.meta["val"]
    return start


def control(b: Builder, behind: list[fx.Node], target: Any, *args: Any) -> fx.Node:
    """The operator in a ``control_deps`` that makes it run behind others, as torch's overlap scheduler wraps it."""
    graph = fx.Graph()
    given = [a for a in args if isinstance(a, fx.Node)]
    inner = {}
    for i, node in enumerate(given):
        inner[node] = graph.placeholder(f"a{i}")
        inner[node].meta["val"] = node.meta["val"]
    made = graph.call_function(target, tuple(inner.get(a, a) if isinstance(a, fx.Node) else a for a in args))
    if target is C.all_gather_into_tensor.default:
        shape = given[0].meta["val"].shape
        made.meta["val"] = b.empty((shape[0] * 2, *shape[1:]))
    else:
        with b.fake:
            made.meta["val"] = target(*(a.meta["val"] if isinstance(a, fx.Node) else a for a in args))
    graph.output(made)
    name = f"behind_{len(b.graph.nodes)}"
    setattr(b.root, name, fx.GraphModule(torch.nn.Module(), graph))
    body = b.graph.get_attr(name)
    node = b.graph.call_function(getattr(torch.ops.higher_order, CONTROL_DEPS), (tuple(behind), body, *given))
    node.meta["val"] = made.meta["val"]
    return node


GRAPHS: MappingProxyType[str, Callable[[], Made]] = MappingProxyType({
    make.__name__: make for make in (
        write_behind_the_wait_of_another, write_behind_the_wait_of_a_reduction, buffer_read_by_its_own_name,
        buffer_filled_twice, reduced_in_place, reduced_in_place_and_waited_for_by_name, reduced_in_place_together,
        views_of_one_buffer, inputs_that_are_one_tensor, result_written_by_its_first_user,
        result_of_a_reduction_written, copied_back_into_the_parameter, gathered_again_after_the_step,
        waited_for_late_and_in_another_order, dead_and_several_waits, nobody_uses_the_waits, ordering_dependencies,
        computation_behind_a_gather, write_behind_a_gather, operations, sums_of_other_operations,
        one_set_of_ranks_two_groups, rings_through_three_buckets, through_a_foreign_collective, types_and_bytes,
        negated_and_conjugated_views, expanded_and_overlapping, empty_shards, sums_with_something_wrong, sum_in_place,
        sum_that_feeds_its_own_addend, added_to_itself, gathered_and_written_between_products,
        gathered_and_written_before_the_product, product_written_through_a_view, weight_written_between_products,
        products_of_fsdps,
    )
})
