"""Every pass on every hostile graph: values, what is written and what is on record stay what they were."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import pytest
from torch import fx

from collective_identity.transports import Transport, launches
from inductor_passes import bucket_collectives, bucketing, dedup, dedup_reduce_scatters, fuse_tensor_parallel, fusion
from inductor_passes.overlap import apply_overlap, plan_overlap
from tests.passes import hostile_graphs, hostile_writes
from tests.passes.simulated_world import random_inputs, run, same


def fuse(gm: fx.GraphModule) -> None:
    fuse_tensor_parallel(gm, enabled=lambda group: True)


def overlap(gm: fx.GraphModule) -> None:
    apply_overlap(gm, plan_overlap(gm))


def everything(gm: fx.GraphModule) -> None:
    for one in (fuse, dedup_reduce_scatters, bucket_collectives, overlap):
        one(gm)


GRAPHS = {**hostile_graphs.GRAPHS, **hostile_writes.GRAPHS}

PASSES: Mapping[str, Callable[[fx.GraphModule], object]] = {
    "bucket": bucket_collectives,
    "bucket for kernels, overlap": lambda gm: (bucket_collectives(gm, order="graph", kernels="triton"), overlap(gm)),
    "bucket as bytes": lambda gm: bucket_collectives(gm, order="graph", mixed_dtypes=True),
    "bucket under a cap": lambda gm: bucket_collectives(gm, cap_mb=512 / 2**20),
    "dedup": dedup_reduce_scatters,
    "fuse": fuse,
    "overlap": overlap,
    "all": everything,
}


def made(name: str) -> fx.GraphModule:
    b, outputs = GRAPHS[name]()
    b.output(*outputs)
    return b.module()


@pytest.mark.parametrize("graph", sorted(GRAPHS))
@pytest.mark.parametrize("name", list(PASSES))
def test_values_stay_what_they_were(name: str, graph: str) -> None:
    before, after = made(graph), made(graph)
    PASSES[name](after)
    after.graph.lint()
    inputs, again = random_inputs(before), random_inputs(before)
    assert same(run(before, inputs), run(after, again)), after.graph
    assert same(inputs, again), "what the graph leaves in its inputs"


@pytest.mark.parametrize("graph", sorted(GRAPHS))
def test_whatever_is_left_alone_has_one_reason(graph: str) -> None:
    """Each collective is in one bucket, merge or fusion, or has one refusal, with a code of the pass's table."""
    gm = made(graph)
    found = launches(gm)
    scatters = [start for start, launch in found.items() if launch.transport is Transport.REDUCE_SCATTER]
    buckets, merges = bucketing.plan_buckets(gm), dedup.plan_dedup(gm)
    fusions = fusion.plan_fusions(gm, enabled=lambda group: True)
    for asked, taken, refusals, table in (
        (list(found), [m for b in buckets.buckets for m in b.members], buckets.refusals, bucketing.REASONS),
        (scatters, [m for one in merges.merges for m in one.members], merges.refusals, dedup.REASONS),
        (list(found), [one.match.start for one in fusions.fusions], fusions.refusals, fusion.REASONS),
    ):
        assert sorted([*taken, *(r.node for r in refusals)]) == asked
        assert all(table[r.reason.id] is r.reason and r.detail for r in refusals)
