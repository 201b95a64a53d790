"""Overlap: where FSDP's collectives start and end, and that nothing else changes."""

from __future__ import annotations

import operator
from typing import Any

import pytest
import torch
from torch import fx

from collective_identity import GRAD_REDUCE_SHARD, PARAM_UNSHARD, stamp, start_nodes
from collective_identity.store import identity_of
from collective_identity.transports import WAIT
from inductor_passes.bucketing import apply_plan, plan_buckets
from inductor_passes.overlap import apply_overlap, plan_overlap
from tests import random_graphs
from tests.graphs import Builder, identity

aten, C = torch.ops.aten, torch.ops._c10d_functional


def layers(count: int, *, role: str | None = PARAM_UNSHARD) -> tuple[fx.GraphModule, list[Any], list[fx.Node]]:
    """Each layer gathers its weight right before it is used, as the capture does."""
    b = Builder()
    x = b.placeholder("x", (8, 8))
    shards = [b.placeholder(f"w{i}", (4, 8)) for i in range(count)]
    gathers, products = [], []
    for shard in shards:
        made = b.all_gather(b.cast(shard, torch.float32), role=role)
        gathers.append(made)
        x = b.call(aten.mm.default, x, b.call(aten.t.default, made.wait))
        products.append(x)
    b.output(x)
    return b.module(), gathers, products


def positions(gm: fx.GraphModule) -> dict[fx.Node, int]:
    return {node: i for i, node in enumerate(gm.graph.nodes)}


@pytest.mark.parametrize("ahead", [0, 1, 2])
def test_a_gather_starts_ahead_and_is_waited_for_at_its_use(ahead: int) -> None:
    gm, gathers, products = layers(4)
    plan = plan_overlap(gm, ahead=ahead)
    apply_overlap(gm, plan)
    gm.graph.lint()
    at = positions(gm)
    for k, (made, product) in enumerate(zip(gathers, products, strict=True)):
        assert at[made.wait] < at[product]
        if k:
            assert at[made.wait] > at[products[k - 1]], "waited for when it is needed, not before"
        earlier = k - ahead - 1
        if earlier >= 0:
            assert at[made.start] > at[products[earlier]], "no more gathered groups alive than asked for"
        if ahead and k >= ahead:
            assert at[made.start] < at[gathers[k - ahead].wait], "on its way while the earlier one is used"
    assert plan.to_dict() == {"gathers": 4, "reductions": 0}


@pytest.mark.parametrize("ahead", [0, 1])
def test_a_coalesced_gather_is_one_gather_with_several_waits(ahead: int) -> None:
    b = Builder()
    x = b.placeholder("x", (8, 8))
    pairs = [[b.placeholder(f"{name}{i}", (4, 8)) for name in "vw"] for i in range(3)]
    starts, waits, products = [], [], []
    for pair in pairs:
        start = b.call(C.all_gather_into_tensor_coalesced.default, pair, 2, "dp")
        stamp(start, identity(PARAM_UNSHARD))
        parts = [b.call(WAIT, b.call(operator.getitem, start, i)) for i in range(2)]
        for part in parts:
            x = b.call(aten.mm.default, x, part)
        starts.append(start)
        waits.append(parts)
        products.append(x)
    b.output(x)
    gm = b.module()
    plan = plan_overlap(gm, ahead=ahead)
    assert plan.to_dict() == {"gathers": 3, "reductions": 0}
    apply_overlap(gm, plan)
    gm.graph.lint()
    at = positions(gm)
    for k in range(1, 3):
        assert at[products[k - 1]] < min(at[wait] for wait in waits[k]) < at[products[k]]
        assert (at[starts[k]] < at[products[k - 1]]) == bool(ahead)


def test_what_is_not_fsdps_stays_where_it_is() -> None:
    for role in ("tp.activation_gather", None):
        gm, _, _ = layers(3, role=role)
        before = list(gm.graph.nodes)
        assert not apply_overlap(gm, plan_overlap(gm))
        assert list(gm.graph.nodes) == before


def test_a_reduction_is_waited_for_where_the_next_one_starts() -> None:
    b = Builder()
    g = b.placeholder("g", (8, 8))
    scatters, computed = [], []
    for _ in range(3):
        g = b.call(aten.mm.default, g, g)
        computed.append(g)
        scatters.append(b.reduce_scatter(g, role=GRAD_REDUCE_SHARD))
    b.output(*(made.wait for made in scatters))
    gm = b.module()
    starts = [made.start for made in scatters]
    assert plan_overlap(gm).delayed == tuple(starts)
    assert apply_overlap(gm, plan_overlap(gm))
    gm.graph.lint()
    at = positions(gm)
    assert [n for n in gm.graph.nodes if n in starts] == starts
    for k, made in enumerate(scatters[:-1]):
        assert at[computed[k + 1]] < at[made.wait] < at[scatters[k + 1].start]
    assert at[scatters[2].wait] == len(at) - 2


def test_a_write_to_a_shard_is_not_passed() -> None:
    """An in-place update of the shard before the gather stays before it."""
    b = Builder()
    x, w0, w1 = b.placeholder("x", (8, 8)), b.placeholder("w0"), b.placeholder("w1")
    first = b.all_gather(w0, role=PARAM_UNSHARD)
    y = b.call(aten.mm.default, x, b.call(aten.t.default, first.wait))
    written = b.call(aten.mul_.Tensor, w1, 2.0)
    second = b.all_gather(w1, role=PARAM_UNSHARD)
    b.output(b.call(aten.mm.default, y, b.call(aten.t.default, second.wait)))
    gm = b.module()
    apply_overlap(gm, plan_overlap(gm))
    gm.graph.lint()
    at = positions(gm)
    assert at[written] < at[second.start]


def test_random_graphs_keep_their_nodes_and_the_order_of_what_is_not_fsdps() -> None:
    moved = 0
    for seed in range(150):
        gm = random_graphs.random_graph(seed)
        random_graphs.annotated(gm, seed)
        nodes = list(gm.graph.nodes)
        for node in nodes:
            node.meta.pop("val", None)  # one value stands for all: as if every node shared one memory
        plan = plan_overlap(gm)
        others = [n for n in start_nodes(gm) if n not in plan.places]
        moved += apply_overlap(gm, plan)
        at = positions(gm)
        assert all(at[above] < at[node] for node in at for above in node.all_input_nodes), f"seed {seed}"
        assert set(gm.graph.nodes) == set(nodes) and len(gm.graph.nodes) == len(nodes), f"seed {seed}"
        assert [n for n in gm.graph.nodes if n in set(others)] == others, f"seed {seed}"
    assert moved > 10


def test_wrong_arguments() -> None:
    gm, _, _ = layers(2)
    with pytest.raises(ValueError, match="expected ahead >= 0 parameter groups, found -1"):
        plan_overlap(gm, ahead=-1)
    other, _, _ = layers(2)
    with pytest.raises(ValueError, match="expected a plan of this graph"):
        apply_overlap(other, plan_overlap(gm))


def test_ranks_that_pad_a_written_shard_order_collectives_as_the_others() -> None:
    def ordered(pads: bool) -> list[str]:
        b = Builder()
        g, shard = b.placeholder("g", (8, 8)), b.placeholder("w", (3 if pads else 4, 8))
        scattered = b.reduce_scatter(b.call(aten.sin.default, g), role=GRAD_REDUCE_SHARD)
        b.call(aten.mul_.Tensor, shard, 2.0)
        gathered = b.all_gather(b.pad(shard, [0, 0, 0, 1]) if pads else shard, role=PARAM_UNSHARD)
        b.output(b.call(aten.mm.default, g, gathered.wait), scattered.wait)
        gm = b.module()
        apply_overlap(gm, plan_overlap(gm, ahead=1))
        gm.graph.lint()
        return [str(node.target) for node in start_nodes(gm)]

    assert ordered(True) == ordered(False)


def launched(gm: fx.GraphModule) -> list[tuple[str, ...]]:
    """Whose collectives start in which order; those of nobody have no names."""
    return [identity_of(node).params if identity_of(node) else () for node in start_nodes(gm)]


@pytest.mark.parametrize("pads", [False, True])
def test_a_member_that_kernels_pad_starts_as_one_that_is_sent_where_it_lies(pads: bool) -> None:
    """What packs is split again for each member: the gather waits behind the write through that as well."""
    b = Builder()
    x, shards = b.placeholder("x", (8, 8)), [b.placeholder(f"w{i}", (3 if pads else 4, 8)) for i in range(2)]
    first = b.all_reduce(x)
    b.call(aten.mul_.Tensor, shards[1], 2.0)
    gathered = [
        b.all_gather(
            b.pad(one, [0, 0, 0, 1]) if pads else one, role=PARAM_UNSHARD, params=(f"w{i}",), param_group="u"
        )
        for i, one in enumerate(shards)
    ]
    for one in gathered:
        x = b.call(aten.mm.default, x, one.wait)
    b.output(x, first.wait)
    gm = b.module()
    assert apply_plan(gm, plan_buckets(gm, coalesced=("all_gather",), kernels="triton"))
    plan = plan_overlap(gm)
    packed = [node for node in gm.graph.nodes if node.target is torch.ops.inductor_passes.pack.default]
    apply_overlap(gm, plan)
    gm.graph.lint()
    assert len(packed) == pads and launched(gm) == [(), ("w0", "w1")]
    split = [node for one in packed for node in one.users]
    assert all(node in plan.places for node in split), "what packs moves as a whole"


@pytest.mark.parametrize("pads", [False, True])
def test_a_pad_that_two_gathers_send_starts_neither_early(pads: bool) -> None:
    """Forward and backward of one graph may share it: no gather's own, and still behind the write to the shard."""
    b = Builder()
    x, shard = b.placeholder("x", (8, 8)), b.placeholder("w", (3 if pads else 4, 8))
    first = b.all_reduce(x)
    b.call(aten.mul_.Tensor, shard, 2.0)
    sent = b.pad(shard, [0, 0, 0, 1]) if pads else shard
    for number in range(2):
        x = b.call(aten.mm.default, x, b.all_gather(sent, role=PARAM_UNSHARD, params=(f"{number}",)).wait)
    b.output(x, first.wait)
    gm = b.module()
    apply_overlap(gm, plan_overlap(gm))
    gm.graph.lint()
    assert launched(gm) == [(), ("0",), ("1",)]
