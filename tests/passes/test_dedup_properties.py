"""Dedup on random graphs: what every plan says, and that values, writes and identities are what they were."""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import fx

from collective_identity import absence_of, codes, identity_of, members_of, start_nodes
from collective_identity.transports import Transport, launches
from inductor_passes.dedup import REASONS, DedupPlan, apply_dedup, plan_dedup
from inductor_passes.dedup.trees import sums_of
from tests.graphs import Builder, aten
from tests.passes.simulated_world import SIZES, random_inputs, run, same

REDUCE, TP = "fsdp.grad_reduce_shard", "tp.output_reduce_scatter"
SLOW = settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))


class RandomSums:
    """Scattered gradients and other tensors, added up in every way, written and scattered again, from one seed."""

    def __init__(self, seed: int) -> None:
        self.rng, self.b = random.Random(seed), Builder()
        self.writes = self.rng.random() < 0.4
        self.dtypes = self.rng.choice([[torch.float32], [torch.float32, torch.float64, torch.int32]])
        self.groups = self.rng.choice([["dp"], ["dp", "dp", "other", "tp", "self"]])
        self.shapes = self.rng.choice([[(4, 3)], [(4, 3), (4, 1), (8, 3)]])
        self.inputs: list[fx.Node] = []
        self.pool: list[fx.Node] = []

    def build(self) -> fx.GraphModule:
        rng, b = self.rng, self.b
        count = rng.randint(3, 8)
        kinds = [(rng.choice(self.shapes), rng.choice(self.dtypes)) for _ in range(count)]
        self.inputs = [b.placeholder(f"g{i}", shape, dtype=dtype) for i, (shape, dtype) in enumerate(kinds)]
        steps = [self.scatter, self.add, self.write, self.other]
        for _ in range(rng.randint(8, 40)):
            rng.choices(steps, [5, 6, 1, 1])[0]()
        for _ in range(len(self.pool) if rng.random() < 0.7 else 0):
            self.add()
        unused = [node for node in self.pool if not node.users]
        b.output(*unused, *rng.sample(self.pool, min(len(self.pool), rng.randint(0, 1))))
        return b.module()

    def scatter(self) -> None:
        rng, b = self.rng, self.b
        group = rng.choice(self.groups)
        again = [n for n in self.pool if n.meta["val"].shape[0] % SIZES[group] == 0]
        x = rng.choice(again) if again and rng.random() < 0.1 else rng.choice(self.inputs)
        if rng.random() < 0.5:
            x = b.call(aten.mul.Tensor, x, 2)
        op = rng.choices(["sum", "avg", "max"], [6, 2, 1])[0]
        role = rng.choices([REDUCE, TP, None], [6, 1, 1])[0]
        if x.meta["val"].dtype is torch.int32 and op == "avg":
            op = "sum"
        fields: dict[str, Any] = {} if role is None else {"role": role, "params": (f"p{len(self.pool)}",)}
        self.pool.append(b.reduce_scatter(x, group=group, size=SIZES[group], op=op, **fields).wait)

    def add(self) -> None:
        """Mostly of two that nobody uses yet, so that trees grow; of any shapes and types that add up at all."""
        rng = self.rng
        free = [n for n in self.pool if not n.users] if rng.random() < 0.9 else self.pool
        if len(free) < 2:
            return
        left, right = rng.sample(free, 2) if rng.random() < 0.95 else [free[0], free[0]]
        sizes = left.meta["val"].shape[0], right.meta["val"].shape[0]
        if sizes[0] != sizes[1] and 1 not in sizes:
            return
        scale: dict[str, Any] = {"alpha": rng.choice([1, 2])} if rng.random() < 0.1 else {}
        if self.writes and rng.random() < 0.1 and sizes[0] >= sizes[1]:
            left_value, right_value = left.meta["val"], right.meta["val"]
            if left_value.shape == right_value.shape and left_value.dtype is right_value.dtype:
                self.pool.append(self.b.call(aten.add_.Tensor, left, right, **scale))
                return
        self.pool.append(self.b.call(aten.add.Tensor, left, right, **scale))

    def write(self) -> None:
        if self.writes:
            self.b.call(aten.mul_.Tensor, self.rng.choice(self.inputs), 2)

    def other(self) -> None:
        if self.pool:
            self.pool.append(self.b.call(aten.neg.default, self.rng.choice(self.pool)))


def check(seed: int, mixed: str) -> Counter[str]:
    gm = RandomSums(seed).build()
    inputs, again = random_inputs(gm, seed), random_inputs(gm, seed)
    expected = run(gm, inputs, seed)
    found = {n: launch for n, launch in launches(gm).items() if launch.transport is Transport.REDUCE_SCATTER}
    said = {n: identity_of(n) for n in found}
    names = [n.name for n in gm.graph.nodes]
    plan = plan_dedup(gm, mixed=mixed)
    assert names == [n.name for n in gm.graph.nodes], "a plan changes nothing"
    merged = [m for merge in plan.merges for m in merge.members]
    assert Counter(merged + [r.node for r in plan.refusals]) == Counter(list(found)), "each exactly once"
    assert {r.reason.id for r in plan.refusals} <= set(REASONS)
    addends = {leaf: one.root for one in sums_of(gm.graph.nodes) for leaf in one.addends}
    for merge in plan.merges:
        assert len(merge.members) > 1 and list(merge.members) == sorted(merge.members)
        facts = {(found[m].group, found[m].group_size, found[m].reduce_op, m.meta["val"].dtype, m.meta["val"].shape)
                 for m in merge.members}
        assert len(facts) == 1, f"seed {seed}: members of different kinds"
        assert {addends[next(iter(m.users))] for m in merge.members} == {merge.sum.root}
        assert all(len(m.users) == len(next(iter(m.users)).users) == 1 for m in merge.members)
        if mixed == "refuse":
            assert len({i.role if i else None for i in merge.identities}) == 1
    assert plan == plan_dedup(gm, mixed=mixed), "the same graph, the same plan"
    lost = _lost(plan)
    assert apply_dedup(gm, plan) == bool(plan.merges)
    gm.graph.lint()
    assert same(expected, run(gm, again, seed)), f"seed {seed}: other values"
    assert same(inputs, again), f"seed {seed}: other writes"
    left = [n for n, launch in launches(gm).items() if launch.transport is Transport.REDUCE_SCATTER]
    assert len(left) == len(found) - sum(len(m.members) - 1 for m in plan.merges)
    _identities(gm, said, plan)
    assert not plan_dedup(gm, mixed=mixed).merges, f"seed {seed}: one step leaves work for a second"
    return Counter(r.reason.slug for r in plan.refusals) + Counter(merged=len(merged), lost=lost)


def _lost(plan: DedupPlan) -> int:
    return sum(merge.outcome.code is codes.DROPPED_MIXED for merge in plan.merges)


def _identities(gm: fx.GraphModule, said: dict[fx.Node, Any], plan: DedupPlan) -> None:
    """What was not merged says what it said; what was merged says what its members said, or that it was dropped."""
    new = [n for n in start_nodes(gm) if members_of(n) is not None]
    assert len(new) == len(plan.merges)
    by_members = {tuple(m.name for m in record.members): n for n in new if (record := members_of(n))}
    for merge in plan.merges:
        node = by_members[tuple(m.name for m in merge.members)]
        roles = {i.role if i else None for i in merge.identities}
        found, absence = identity_of(node), absence_of(node)
        if len(roles) == 1 and None not in roles:
            assert found is not None and {found.role} == roles and found.explicit and found.producer == "dedup"
            assert found.params == tuple(sorted(p for i in merge.identities if i for p in i.params or ()))
        else:
            assert found is None
            dropped = absence is not None and absence.code is codes.DROPPED_MIXED
            assert dropped == (roles != {None}), "a loss has a name, nothing lost has none"
    gone = {m for merge in plan.merges for m in merge.members}
    assert all(identity_of(node) == identity for node, identity in said.items() if node not in gone)


@SLOW
@given(st.integers(0, 2**32), st.sampled_from(["drop", "refuse"]))
def test_plans_keep_their_word(seed: int, mixed: str) -> None:
    check(seed, mixed)


def test_the_random_graphs_reach_what_they_are_for() -> None:
    met = {mixed: sum((check(seed, mixed) for seed in range(90)), Counter()) for mixed in ("drop", "refuse")}
    assert min(found["merged"] for found in met.values()) > 30
    assert met["drop"]["lost"] > 5 and met["refuse"]["lost"] == 0
    reached = set(met["drop"]) | set(met["refuse"])
    assert {"not_linear", "other_users", "not_added", "scaled", "unequal", "alone", "incompatible", "other_role",
            "mutated", "in_place"} <= reached, reached


@pytest.mark.parametrize("mixed", ["drop", "refuse"])
def test_the_order_of_the_addends_does_not_matter(mixed: str) -> None:
    """The same terms in any order and bracketing: the same members."""
    roles = [REDUCE, TP, REDUCE, None, TP, REDUCE]
    members = set()
    for seed in range(20):
        b, rng = Builder(), random.Random(seed)
        waits = [b.reduce_scatter(b.placeholder(f"g{i}"), op="sum", role=r).wait for i, r in enumerate(roles)]
        while len(waits) > 1:
            rng.shuffle(waits)
            waits.append(b.call(aten.add.Tensor, waits.pop(), waits.pop()))
        b.output(*waits)
        plan = plan_dedup(b.module(), mixed=mixed)
        members.add(frozenset(tuple(m.name for m in merge.members) for merge in plan.merges))
    assert len(members) == 1
