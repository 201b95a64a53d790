"""Order that the data flow does not show: writes, random numbers, effects, unknown nodes."""

from __future__ import annotations

import operator
from typing import Any

import pytest
import torch
from torch import fx

from collective_identity.transports import WAIT
from inductor_passes.bucketing.hazards import Hazards, hazards_of
from tests.graphs import Builder, aten


def edges(b: Builder, *watched: fx.Node) -> tuple[set[tuple[str, str]], Hazards]:
    nodes = list(b.graph.nodes)
    found = hazards_of(nodes, watched)
    return {(nodes[p].name, nodes[i].name) for i, earlier in found.before.items() for p in earlier}, found


def test_a_pure_graph_has_none() -> None:
    b = Builder()
    x = b.placeholder("x")
    b.output(b.call(aten.add.Tensor, b.all_gather(x).wait, 1.0))
    assert edges(b, x) == (set(), Hazards({}, ()))


@pytest.mark.parametrize("alias", ["same", "view", "undeclared view", "storage"])
def test_reads_and_writes_of_one_memory_keep_their_order(alias: str) -> None:
    b = Builder()
    x, y = b.placeholder("x"), b.placeholder("y")
    other = x
    if alias == "view":
        other = b.call(aten.permute.default, x, [1, 0])
    elif alias == "undeclared view":
        other = b.call(aten._unsafe_view.default, x, [32])
        other.meta.pop("val")
    elif alias == "storage":
        other = b.placeholder("z")
        other.meta["val"] = x.meta["val"].view(4, 8)
    early = b.call(aten.sin.default, x)
    write = b.graph.call_function(aten.mul_.Tensor, (other, 2.0))
    late = b.call(aten.cos.default, x)
    b.call(aten.cos.default, y)
    rewrite = b.graph.call_function(aten.mul_.Tensor, (x, 2.0))
    b.output(early, late)
    found, hazards = edges(b, x)
    assert {(early.name, write.name), (write.name, late.name), (write.name, rewrite.name),
            (late.name, rewrite.name)} <= found
    assert not any("y" in pair for pair in found)
    place = {n: i for i, n in enumerate(b.graph.nodes)}
    assert hazards.writes == (place[write], place[rewrite])
    assert [hazards.epoch(place[n]) for n in (early, late)] == [0, 1]


def test_a_write_by_keyword_and_into_a_list() -> None:
    b = Builder()
    x, y = b.placeholder("x"), b.placeholder("y")
    read = b.call(aten.sin.default, x)
    out = b.graph.call_function(aten.add.out, (y, y), {"out": x})
    each = b.graph.call_function(torch.ops.aten._foreach_add_.Scalar, ([y, x], 1.0))
    b.output(read)
    found, hazards = edges(b, x)
    assert (read.name, out.name) in found and (out.name, each.name) in found
    assert len(hazards.writes) == 2


@pytest.mark.parametrize("target", [aten.rand.default, aten._assert_async.msg])
def test_random_numbers_and_assertions_keep_their_place_among_their_like(target: Any) -> None:
    b = Builder()
    x = b.placeholder("x", (1,))
    args = ([4, 8],) if target is aten.rand.default else (x, "message")
    nodes = [b.graph.call_function(target, args) for _ in range(3)]
    pure = b.call(aten.sin.default, x)
    b.output(pure)
    found, hazards = edges(b, x)
    assert found == {(nodes[0].name, nodes[1].name), (nodes[1].name, nodes[2].name)}
    assert hazards.writes == ()


def test_a_node_of_unknown_behaviour_keeps_its_place_among_all() -> None:
    b = Builder()
    x = b.placeholder("x")
    before = [b.call(aten.sin.default, x), b.call(aten.cos.default, x)]
    wall = b.graph.call_function(print, (x,))
    after = b.call(aten.tan.default, x)
    second = b.graph.call_method("add_", (x, 1))
    b.output(after)
    found, hazards = edges(b, x)
    assert found == {(before[0].name, wall.name), (before[1].name, wall.name), (wall.name, after.name),
                     (wall.name, second.name), (after.name, second.name)} | {(wall.name, second.name)}
    assert len(hazards.writes) == 2


def test_python_functions_on_sizes_are_pure_and_in_place_ones_write() -> None:
    b = Builder()
    x, y = b.placeholder("x"), b.placeholder("y")
    b.graph.call_function(operator.mul, (2, 3))
    b.graph.call_function(torch.sym_max, (2, 3))
    read = b.call(aten.sin.default, x)
    write = b.graph.call_function(operator.iadd, (x, y))
    b.output(read)
    found, hazards = edges(b, x)
    assert found == {(read.name, write.name)} and len(hazards.writes) == 1


def higher_order(name: str, b: Builder, *args: Any) -> fx.Node:
    return b.graph.call_function(getattr(torch.ops.higher_order, name), args)


def body(target: Any) -> fx.GraphModule:
    graph = fx.Graph()
    x = graph.placeholder("x")
    graph.output((graph.call_function(target, (x,)),))
    return fx.GraphModule(torch.nn.Module(), graph)


@pytest.mark.parametrize(("target", "writes", "ordered"), [
    (aten.sin.default, 0, False), (aten.sin_.default, 1, True), (aten.bernoulli.default, 0, True),
])
def test_higher_order_operators_do_what_their_bodies_do(target: Any, writes: int, ordered: bool) -> None:
    root = torch.nn.Module()
    root.body = body(target)
    b = Builder(root)
    x = b.placeholder("x")
    noise = b.graph.call_function(aten.rand.default, ([4, 8],))
    inner = b.graph.get_attr("body")
    node = higher_order("invoke_subgraph", b, inner, "key", x)
    b.output(node)
    fx.GraphModule(root, b.graph)
    found, hazards = edges(b, x)
    assert len(hazards.writes) == writes
    assert ((noise.name, node.name) in found) == ordered


def test_an_unknown_higher_order_operator_may_write_what_it_is_given() -> None:
    b = Builder()
    x, y = b.placeholder("x"), b.placeholder("y")
    read, apart = b.call(aten.sin.default, x), b.call(aten.sin.default, y)
    node = higher_order("run_and_save_rng_state", b, aten.bernoulli.default, x)
    b.output(read, apart)
    found, hazards = edges(b, x)
    assert found == {(read.name, node.name)} and len(hazards.writes) == 1


def test_in_place_collectives_write() -> None:
    b = Builder()
    x = b.placeholder("x")
    read = b.call(aten.sin.default, x)
    node = b.graph.call_function(torch.ops._c10d_functional.all_reduce_.default, (x, "sum", "dp"))
    b.output(read)
    found, _ = edges(b, x)
    assert found == {(read.name, node.name)}


@pytest.mark.parametrize("target", ["inductor.resize_storage_bytes_", "fsdp.all_gather_copy_in", "hazards.user_"])
def test_writes_that_the_schema_does_not_declare(target: str) -> None:
    import torch._inductor.compile_fx
    import torch.distributed.fsdp._fully_shard._fsdp_collectives  # defines fsdp.*

    namespace, name = target.split(".")
    library = torch.library.Library("hazards", "FRAGMENT")
    if name == "user_":
        library.define("user_(Tensor written) -> Tensor")
    b = Builder()
    x, y = b.placeholder("x"), b.placeholder("y")
    read, apart = b.call(aten.sin.default, x), b.call(aten.sin.default, y)
    args = {"resize_storage_bytes_": (x, 0), "all_gather_copy_in": ([x], x, [32], 32, 0), "user_": (x,)}[name]
    node = b.graph.call_function(getattr(getattr(torch.ops, namespace), name).default, args)
    late = b.call(aten.cos.default, x)
    b.output(read, apart, late)
    found, hazards = edges(b, x)
    assert found == {(read.name, node.name), (node.name, late.name)} and len(hazards.writes) == 1


def test_collectives_of_process_groups_themselves_order_everything() -> None:
    """They declare no write, and the object that is waited for is no tensor."""
    b = Builder()
    x, y = b.placeholder("x"), b.placeholder("y")
    read = b.call(aten.sin.default, x)
    node = b.graph.call_function(torch.ops.c10d._allgather_base_.default, (y, y, "group"))
    late = b.call(aten.cos.default, x)
    b.output(read, late)
    found, hazards = edges(b, x)
    assert found == {(read.name, node.name), (node.name, late.name)} and len(hazards.writes) == 1


@pytest.mark.parametrize("form", ["default", "in place", "out", "received"])
def test_a_collective_is_under_way_until_it_is_waited_for(form: str) -> None:
    """What it sends may be written behind its wait only, and what it receives into be read behind its wait only."""
    functional = torch.ops._c10d_functional
    b = Builder()
    x, y = b.placeholder("x"), b.placeholder("y", (8, 8))
    if form == "default":
        start = b.all_gather(x).start
        b.graph.erase_node(next(iter(start.users)))
    else:
        target, args, given = {
            "in place": (functional.all_reduce_.default, (x, "sum", "dp"), {}),
            "out": (functional.all_gather_into_tensor_out.default, (x, 2, "dp"), {"out": y}),
            "received": (functional.broadcast_.default, (x, 0, "dp"), {}),
        }[form]
        start = b.graph.call_function(target, args, given)
        start.meta["val"] = (y if form == "out" else x).meta["val"]
    wait = b.wait(start)
    into = {"out": y, "in place": x, "received": x}.get(form)
    read = None if into is None else b.call(aten.sin.default, into)
    write = b.graph.call_function(aten.mul_.Tensor, (x, 2))
    b.output(write, *([] if read is None else [read]))
    found, _ = edges(b, x)
    assert (wait.name, write.name) in found
    assert read is None or (wait.name, read.name) in found


def test_what_a_coalesced_collective_sends_is_read_until_its_own_wait() -> None:
    b = Builder()
    shards = [b.placeholder(name) for name in "vw"]
    start = b.call(torch.ops._c10d_functional.all_gather_into_tensor_coalesced.default, shards, 2, "dp")
    waits = [b.call(WAIT, b.call(operator.getitem, start, place)) for place in range(2)]
    written = b.call(torch.ops.aten.mul_.Tensor, shards[1], 2.0)
    b.output(*waits)
    nodes = list(b.module().graph.nodes)
    index = {node: i for i, node in enumerate(nodes)}
    before = hazards_of(nodes, shards).before
    assert index[waits[1]] in before[index[written]] and index[waits[0]] not in before[index[written]]
