"""Bucketing on random graphs: every value, every write and every random number stays the same."""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

import networkx as nx
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import fx

from collective_identity.store import identity_of, members_of
from collective_identity.transports import Transport, launch_of, start_nodes
from inductor_passes.bucketing import BUCKETED, REASONS, apply_plan, bucket_collectives, plan_buckets
from inductor_passes.bucketing.levels import depths
from inductor_passes.bucketing.order import RingError, stable_order
from tests.graphs import Builder, aten
from tests.passes.simulated_world import SIZES, random_inputs, run, same

UNSHARD, REDUCE, REPLICATE = "fsdp.param_unshard", "fsdp.grad_reduce_shard", "fsdp.grad_replicate_reduce"
SLOW = settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))

# ---- the pure cores


@st.composite
def dags(draw: st.DrawFn) -> list[list[int]]:
    size = draw(st.integers(0, 40))
    return [
        draw(st.lists(st.integers(0, i - 1), max_size=4)) if i else [] for i in range(size)
    ]


@settings(max_examples=200, deadline=None)
@given(dags(), st.data())
def test_levels_rise_along_every_path_so_that_merging_leaves_no_ring(
    before: list[list[int]], data: st.DataObject
) -> None:
    flags = st.lists(st.booleans(), min_size=len(before), max_size=len(before))
    counted, late = data.draw(flags), data.draw(flags)
    levels = depths(before, counted, late)
    graph = nx.DiGraph([(p, i) for i, earlier in enumerate(before) for p in earlier])
    graph.add_nodes_from(range(len(before)))
    chosen = [i for i, c in enumerate(counted) if c]
    for i in chosen:
        assert levels[i] >= 0
        assert all(levels[i] < levels[j] for j in nx.descendants(graph, i) if counted[j])
    merged = nx.DiGraph()
    name = {i: ("level", levels[i], late[i]) if counted[i] else i for i in range(len(before))}
    merged.add_nodes_from(name.values())
    merged.add_edges_from((name[p], name[i]) for p, i in graph.edges)
    assert nx.is_directed_acyclic_graph(merged)


def test_levels_of_a_last_layer() -> None:
    # gather 0 feeds reduction 2; reduction 1 needs no gather: both reductions still share a level
    assert depths([[], [], [0]], [True, True, True], [False, True, True])[1:] == [1, 1]
    # without that, the lowest possible level keeps them apart
    assert depths([[], [], [0]], [True, True, True], [False, False, False])[1:] == [0, 1]


@settings(max_examples=200, deadline=None)
@given(dags(), st.data())
def test_stable_order_is_topological_and_keeps_what_it_can(
    before: list[list[int]], data: st.DataObject
) -> None:
    size = len(before)
    hoisted = data.draw(st.lists(st.integers(0, size - 1), max_size=3)) if size else []
    wishes: list[float] = [float(i) for i in range(size)]
    assert stable_order(before, wishes, ()) == list(range(size))
    for h in hoisted:
        wishes[h] = data.draw(st.floats(0, size))
    order = stable_order(before, wishes, hoisted)
    place = {item: i for i, item in enumerate(order)}
    assert sorted(order) == list(range(size))
    assert all(place[p] < place[i] for i in range(size) for p in before[i])
    graph = nx.DiGraph([(p, i) for i, earlier in enumerate(before) for p in earlier])
    graph.add_nodes_from(range(size))
    moved = {a for h in hoisted for a in (h, *nx.ancestors(graph, h))}
    moved |= {d for m in hoisted for d in nx.descendants(graph, m)}
    stay = [i for i in order if i not in moved]
    assert stay == sorted(stay)


def test_a_hoisted_item_takes_what_it_needs_along() -> None:
    before = [[], [], [], [2], [3]]
    assert stable_order(before, [0, 1, 2, 3, 0.5], [4]) == [0, 2, 3, 4, 1]
    assert stable_order(before, [0, 1, 2, 3, 0.5], []) == [0, 1, 2, 3, 4]


def test_a_ring_is_an_error() -> None:
    with pytest.raises(RingError, match="ring") as error:
        stable_order([[], [2], [1], [2]], [0, 1, 2, 3], [])
    assert error.value.items == (1, 2, 3)


# ---- whole graphs


class RandomGraph:
    """A graph of gathers, reductions, arithmetic, views, writes and random numbers, from one seed."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.b = Builder()
        self.pool: list[fx.Node] = []
        self.outputs: list[fx.Node] = []
        self.writes = self.rng.random() < 0.5
        self.dtypes = self.rng.choice([[torch.float32], [torch.float32, torch.float64, torch.bfloat16]])
        self.groups = self.rng.choice([["dp"], ["dp", "other", "tp", "world", "self"]])

    def shape(self) -> tuple[int, ...]:
        return self.rng.choice([(4, 3), (4,), (8, 1, 2), (4, 0), (0, 2), (4, 3), (1, 5), (1,), (4, 2)])

    def build(self) -> fx.GraphModule:
        rng, b = self.rng, self.b
        for i in range(rng.randint(2, 5)):
            self.pool.append(b.placeholder(f"p{i}", self.shape(), dtype=rng.choice(self.dtypes)))
        for _ in range(rng.randint(5, 40)):
            self.step()
        kept = rng.sample(self.pool, min(len(self.pool), 8))
        b.output(*self.outputs, *kept)
        return b.module()

    def add(self, node: fx.Node) -> None:
        self.pool.append(node)

    def step(self) -> None:
        rng, b = self.rng, self.b
        x = rng.choice(self.pool)
        what = rng.random()
        if what < 0.55:
            self.collective(x)
        elif what < 0.65:
            self.add(b.call(aten.mul.Tensor, x, 0.5))
        elif what < 0.72:
            alike = [n for n in self.pool if n.meta["val"].shape == x.meta["val"].shape
                     and n.meta["val"].dtype == x.meta["val"].dtype]
            self.add(b.call(aten.add.Tensor, x, rng.choice(alike)))
        elif what < 0.8:
            dims = list(range(x.meta["val"].dim()))
            rng.shuffle(dims)
            self.add(b.call(aten.permute.default, x, dims))
        elif what < 0.86:
            self.add(b.call(aten.slice.Tensor, x, 0, 0, max(1, x.meta["val"].shape[0] // 2))
                     if x.meta["val"].dim() else x)
        elif what < 0.92 and self.writes:
            self.b.call(aten.mul_.Tensor, x, rng.choice([2.0, 0.5]))
        elif what < 0.96:
            self.add(b.call(aten.rand.default, list(x.meta["val"].shape)))
        else:
            self.add(b.call(aten.sum.default, x))

    def collective(self, x: fx.Node) -> None:
        rng, b = self.rng, self.b
        group = rng.choice(self.groups)
        size = SIZES[group]
        shape = x.meta["val"].shape
        unit = rng.choice([None, "a", "b"])
        role = rng.choices(["fsdp", "tp.activation", None], [8, 1, 1])[0]
        fields: dict[str, Any] = {}
        if unit:
            fields = {"param_group": unit, "params": (f"{unit}.{rng.randint(0, 9)}",)}

        def named(fsdp: str) -> dict[str, Any]:
            return {} if role is None else {"role": fsdp if role == "fsdp" else role, **fields}

        kinds = ["reduce"]
        if len(shape) > 0:
            kinds += ["gather"] * 3 if x.meta["val"].numel() < 200 else []
            kinds += ["scatter"] * 2 if shape[0] % size == 0 else []
        kind = rng.choice(kinds)
        if kind == "gather":
            made = b.all_gather(x, group=group, size=size, **named(UNSHARD))
        elif kind == "scatter":
            made = b.reduce_scatter(x, group=group, size=size, op=rng.choice(["sum", "avg"]), **named(REDUCE))
        else:
            made = b.all_reduce(x, group=group, op=rng.choice(["sum", "max"]), **named(REPLICATE))
        self.add(made.wait)
        if rng.random() < 0.1:
            self.add(b.wait(made.start))
        if rng.random() < 0.5:
            self.outputs.append(made.wait)


def check(seed: int, **options: Any) -> Counter[str]:
    gm = RandomGraph(seed).build()
    inputs, again = random_inputs(gm, seed), random_inputs(gm, seed)
    expected = run(gm, inputs, seed)
    starts = start_nodes(gm)
    roles = {n: identity_of(n) for n in starts}
    old = set(gm.graph.nodes)
    names = [n.name for n in gm.graph.nodes]
    plan = plan_buckets(gm, identities=roles, **options)
    assert names == [n.name for n in gm.graph.nodes], "a plan changes nothing"
    merged = [m for b in plan.buckets for m in b.members]
    assert Counter(merged + [r.node for r in plan.refusals]) == Counter(starts), "each exactly once"
    assert all(r.reason.id in REASONS for r in plan.refusals)
    for bucket in plan.buckets:
        assert len(bucket.members) > 1
        assert {roles[m].role for m in bucket.members} == {bucket.key.role}  # type: ignore[union-attr]
    changed = apply_plan(gm, plan)
    gm.graph.lint()
    assert changed == bool(plan.buckets)
    results = run(gm, again, seed)
    assert same(expected, results), f"seed {seed}: other values"
    assert same(inputs, again), f"seed {seed}: other writes"
    assert len(start_nodes(gm)) == len(starts) - sum(len(b.members) - 1 for b in plan.buckets)
    for node in gm.graph.nodes:
        if members_of(node) is not None:
            identity = identity_of(node)
            assert identity is not None and identity.producer == "bucketing" and launch_of(node) is not None
        elif node not in roles:
            assert "custom" not in node.meta
    truthful(gm, again, seed, old)
    assert all(b.nbytes == 0 for b in plan_buckets(gm, cap_mb=1e-9).buckets), "only the empty fit"
    return Counter(r.reason.slug for r in plan.refusals) + Counter(bucketed=len(merged))


def truthful(gm: fx.GraphModule, inputs: list[list[torch.Tensor]], seed: int, old: set[fx.Node]) -> None:
    """Every new node's meta['val'] has the shape, dtype and strides that the node really yields."""
    probe = fx.GraphModule(gm, fx.Graph())
    env: dict[fx.Node, fx.Node] = {}
    for node in gm.graph.nodes:
        if node.op != "output":
            env[node] = probe.graph.node_copy(node, lambda n: env[n])
    tensors = [n for n in gm.graph.nodes if isinstance(n.meta.get("val"), torch.Tensor)]
    probe.graph.output([env[n] for n in tensors])
    values = run(probe, inputs, seed)[0]
    for node, value in zip(tensors, values, strict=True):
        found, real = node.meta["val"], value
        assert found.dtype == real.dtype and found.shape == real.shape, node.format_node()
        if node not in old and real.numel():
            assert found.stride() == real.stride(), node.format_node()


@SLOW
@given(st.integers(0, 2**32), st.sampled_from(["param_group", "graph", "fqn"]),
       st.sampled_from([None, 0.0002, [0.0001, 0.0004]]), st.sets(st.sampled_from(BUCKETED)),
       st.sampled_from(["ops", "triton"]))
def test_values_writes_and_random_numbers_stay_the_same(
    seed: int, order: str, cap: Any, coalesced: set[Transport], kernels: str
) -> None:
    check(seed, order=order, cap_mb=cap, coalesced=coalesced, kernels=kernels)


def test_the_random_graphs_reach_what_they_are_for() -> None:
    met: Counter[str] = Counter()
    for seed in range(40):
        met += check(seed, order="graph")
        check(seed, order="graph", coalesced=BUCKETED)
        if seed % 4 == 0:
            check(seed, order="graph", kernels="triton")
    assert met["bucketed"] > 100
    assert {"no_role", "other_role", "depends", "mutated", "incompatible", "alone"} <= set(met)


@SLOW
@given(st.integers(0, 2**32))
def test_bucketing_twice_equals_values_too(seed: int) -> None:
    gm = RandomGraph(seed).build()
    inputs, again = random_inputs(gm, seed), random_inputs(gm, seed)
    expected = run(gm, inputs, seed)
    for order in ("param_group", "graph", "graph"):
        bucket_collectives(gm, order=order)  # type: ignore[arg-type]
        gm.graph.lint()
    assert same(expected, run(gm, again, seed))
