"""Graphs in which it matters who writes to which memory, and when, each by name: `GRAPHS`."""

from __future__ import annotations

import operator
from collections.abc import Callable
from types import MappingProxyType

from tests.graphs import Builder, aten
from tests.passes.hostile_parts import TP, C, Made, gather, inputs, out_gather, reduce, scatter


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


def gradient_written_behind_the_wait() -> Made:
    """The buffer of a gradient is used again once it has been scattered; overlap delays the wait for that."""
    b = Builder()
    g, h = inputs(b, 2)
    first = scatter(b, g)
    write = b.call(aten.copy_.default, g, b.call(aten.mul.Tensor, h, 2))
    return b, [first, scatter(b, write), b.call(aten.neg.default, first), scatter(b, b.call(aten.neg.default, h))]


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


GRAPHS: MappingProxyType[str, Callable[[], Made]] = MappingProxyType({
    make.__name__: make for make in (
        write_behind_the_wait_of_another, write_behind_the_wait_of_a_reduction, gradient_written_behind_the_wait,
        buffer_read_by_its_own_name, buffer_filled_twice, reduced_in_place, reduced_in_place_and_waited_for_by_name,
        reduced_in_place_together, views_of_one_buffer, inputs_that_are_one_tensor, result_written_by_its_first_user,
        result_of_a_reduction_written, copied_back_into_the_parameter, gathered_again_after_the_step,
    )
})
