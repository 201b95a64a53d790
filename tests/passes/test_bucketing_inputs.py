"""Bucketing whatever a graph holds: odd shapes, shared inputs, several waits; plans that do not fit; the cost."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import pytest
from torch import fx

from collective_identity.transports import is_wait, start_nodes
from inductor_passes.bucketing import Bucket, Plan, apply_plan, bucket_collectives, plan_buckets
from tests.graphs import Builder, aten, identity
from tests.passes.simulated_world import bucketed

UNSHARD, REDUCE, REPLICATE = "fsdp.param_unshard", "fsdp.grad_reduce_shard", "fsdp.grad_replicate_reduce"


# ---- inputs of every shape


@pytest.mark.parametrize("shapes", [
    [(0, 4), (2, 4)], [(0, 4), (0, 2)], [(2, 0), (4, 1), (0,)], [(2,), (2, 1, 3)], [(4, 8), (4, 8), (4, 8)],
])
@pytest.mark.parametrize("kind", ["all_gather", "reduce_scatter", "all_reduce"])
@pytest.mark.parametrize("group", ["dp", "world", "self"])
def test_shapes(shapes: list[tuple[int, ...]], kind: str, group: str) -> None:
    b = Builder()
    size = {"dp": 2, "world": 4, "self": 1}[group]
    made = []
    for i, shape in enumerate(shapes):
        tensor = b.placeholder(f"t{i}", (shape[0] * 4, *shape[1:]) if kind == "reduce_scatter" else shape)
        role = {"all_gather": UNSHARD, "reduce_scatter": REDUCE, "all_reduce": REPLICATE}[kind]
        more = {} if kind == "all_reduce" else {"size": size}
        made.append(getattr(b, kind)(tensor, group=group, role=role, **more))
    outs = [b.call(aten.mul.Tensor, c.wait, 2.0) for c in made]
    b.output(*outs, *(c.wait for c in made))
    gm = b.module()
    assert [len(x.members) for x in bucketed(gm).buckets] == [len(shapes)]
    assert len(start_nodes(gm)) == 1
    for node, shape in zip(gm.graph.output_node().args[0][len(made):], made, strict=True):
        assert node.meta["val"].shape == shape.start.meta["val"].shape
        assert node.meta["val"].is_contiguous()


def test_transposed_inputs() -> None:
    b = Builder()
    made = []
    for i in range(2):
        turned = b.call(aten.permute.default, b.placeholder(f"w{i}", (6, 4)), [1, 0])
        made += [b.all_gather(turned, role=UNSHARD), b.reduce_scatter(turned, role=REDUCE),
                 b.all_reduce(turned, role=REPLICATE)]
    b.output(*(c.wait for c in made))
    gm = b.module()
    assert len(bucketed(gm).buckets) == 3 and len(start_nodes(gm)) == 3


def test_tied_parameters() -> None:
    b = Builder()
    w = b.placeholder("w")
    made = [b.all_gather(w, role=UNSHARD) for _ in range(2)]
    b.output(*(c.wait for c in made))
    gm = b.module()
    bucketed(gm)
    assert len(start_nodes(gm)) == 1


def test_several_waits_on_one_start() -> None:
    b = Builder()
    first, second = b.all_gather(b.placeholder("w0"), role=UNSHARD), b.all_gather(b.placeholder("w1"), role=UNSHARD)
    again = b.wait(first.start)
    b.output(b.call(aten.add.Tensor, first.wait, again), second.wait, again)
    gm = b.module()
    assert len(bucketed(gm).buckets) == 1
    assert sum(map(is_wait, gm.graph.nodes)) == 1


def test_a_result_written_between_two_waits() -> None:
    b = Builder()
    first, second = b.all_gather(b.placeholder("w0"), role=UNSHARD), b.all_gather(b.placeholder("w1"), role=UNSHARD)
    b.call(aten.mul_.Tensor, first.wait, 3.0)
    again = b.wait(first.start)
    b.output(first.wait, b.call(aten.sin.default, again), second.wait)
    gm = b.module()
    assert len(bucketed(gm).buckets) == 1


def test_alternating_groups_and_interleaved_kinds() -> None:
    b = Builder()
    made = []
    for i in range(6):
        gathered = b.all_gather(b.placeholder(f"w{i}"), group=["dp", "tp"][i % 2], role=UNSHARD)
        made += [gathered, b.reduce_scatter(gathered.wait, group=["dp", "tp"][i % 2], role=REDUCE)]
    b.output(*(c.wait for c in made))
    gm = b.module()
    assert [(x.key.transport.value, x.key.group, len(x.members)) for x in bucketed(gm).buckets] == [
        ("all_gather", "dp", 3), ("reduce_scatter", "dp", 3), ("all_gather", "tp", 3), ("reduce_scatter", "tp", 3),
    ]
    assert len(start_nodes(gm)) == 4


def test_values_traced_under_different_fake_modes() -> None:
    b, c = Builder(), Builder()
    made = [b.all_gather(b.placeholder(f"w{i}"), role=UNSHARD) for i in range(2)]
    for node in (made[1].start.args[0], made[1].start, made[1].wait):
        node.meta["val"] = c.empty(tuple(node.meta["val"].shape))  # type: ignore[union-attr]
    b.output(*(x.wait for x in made))
    gm = b.module()
    assert len(bucketed(gm).buckets) == 1
    assert all(n.meta["val"].fake_mode is b.fake for n in gm.graph.output_node().args[0])


# ---- plans that do not fit


def pair() -> tuple[fx.GraphModule, Plan]:
    b = Builder()
    made = [b.all_gather(b.placeholder(f"w{i}"), role=UNSHARD) for i in range(2)]
    b.output(*(c.wait for c in made))
    gm = b.module()
    return gm, plan_buckets(gm)


def test_a_plan_of_another_graph_is_refused() -> None:
    gm, plan = pair()
    code = gm.code
    other, _ = pair()
    with pytest.raises(ValueError, match="not in this graph; plan again"):
        apply_plan(other, plan)
    assert other.code == code
    assert apply_plan(gm, plan)
    with pytest.raises(ValueError, match="not in this graph; plan again"):
        apply_plan(gm, plan)


def test_a_hand_made_plan_with_a_ring_is_refused_before_anything_is_touched() -> None:
    b = Builder()
    inner = b.all_gather(b.placeholder("w"), role=UNSHARD)
    outer = b.all_gather(inner.wait, role=UNSHARD)
    b.output(outer.wait)
    gm = b.module()
    _, like = pair()
    ring = Bucket(like.buckets[0].key, (inner.start, outer.start), (identity(UNSHARD),) * 2, 0)
    code = gm.code
    with pytest.raises(ValueError, match="found a ring through the buckets of all_gather_into_tensor_default"):
        apply_plan(gm, Plan((ring,), ()))
    assert gm.code == code


# ---- cost


def calls(work: Callable[[], object]) -> int:
    count = 0

    def profile(frame: Any, event: str, arg: Any) -> None:
        nonlocal count
        count += event == "call"

    sys.setprofile(profile)
    try:
        work()
    finally:
        sys.setprofile(None)
    return count


@pytest.mark.parametrize("per_unit", [10**6, 10])
def test_cost_grows_linearly(per_unit: int) -> None:
    def cost(count: int) -> int:
        b = Builder()
        made = [b.all_gather(b.placeholder(f"w{i}"), role=UNSHARD, param_group=str(i // per_unit))
                for i in range(count)]
        b.output(*(c.wait for c in made))
        gm = b.module()
        return calls(lambda: bucket_collectives(gm))

    cost(100)  # fill torch's caches
    small, large = cost(100), cost(400)
    assert large < 4.4 * small
