"""Bucketing on real ranks (gloo): random graphs give the same values before and after, bit for bit."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import fx

from collective_identity.transports import start_nodes
from inductor_passes.bucketing import bucket_collectives
from tests.distributed.launch import launch
from tests.distributed.transform_runs import inputs_for
from tests.graphs import Builder, aten

UNSHARD, REDUCE, REPLICATE = "fsdp.param_unshard", "fsdp.grad_reduce_shard", "fsdp.grad_replicate_reduce"
SHAPES: list[tuple[int, ...]] = [(4, 3), (8,), (4, 1, 5), (0, 3), (4, 0), (12, 2)]
DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.int64]


def random_graph(seed: int, group: str, size: int) -> fx.GraphModule:
    """Gathers of parameters, arithmetic, scatters of what came out, reductions of the shards; some in two units."""
    rng, b = random.Random(seed), Builder()
    dtypes = rng.sample(DTYPES, rng.choice([1, 2]))
    outputs, grads = [], []
    for i in range(rng.randint(3, 8)):
        shape, dtype, unit = rng.choice(SHAPES), rng.choice(dtypes), rng.choice(["a", "b"])
        shard = b.placeholder(f"w{i}", shape, dtype=dtype)
        sent = b.call(aten.mul.Tensor, shard, 2) if rng.random() < 0.5 else shard
        gathered = b.all_gather(sent, group=group, size=size, role=UNSHARD, param_group=unit)
        if rng.random() < 0.2:
            outputs.append(b.wait(gathered.start))
        grads.append((b.call(aten.mul.Tensor, gathered.wait, 3), unit))
        outputs.append(gathered.wait)
    for grad, unit in reversed(grads):
        scattered = b.reduce_scatter(grad, group=group, size=size, op="sum", role=REDUCE, param_group=unit)
        if rng.random() < 0.5:
            reduced = b.all_reduce(scattered.wait, group=group, op="sum", role=REPLICATE, param_group=unit)
            outputs.append(reduced.wait)
        outputs.append(scattered.wait)
    b.output(*outputs)
    return b.module()


def compare(rank: int, ranks: int, seeds: list[int], integers: bool) -> tuple[int, int]:
    """Runs every graph before and after; returns how many collectives there were and are."""
    group = dist.group.WORLD.group_name  # type: ignore[union-attr]
    before = after = 0
    for seed in seeds:
        gm = random_graph(seed, group, ranks)
        tensors = inputs_for(gm, 1000 * seed + rank, integers)
        expected = gm(*tensors)
        before += len(start_nodes(gm))
        bucket_collectives(gm, order=random.Random(seed).choice(["param_group", "graph", "fqn"]))
        gm.graph.lint()
        after += len(start_nodes(gm))
        found = gm(*tensors)
        for i, (x, y) in enumerate(zip(expected, found, strict=True)):
            assert x.dtype == y.dtype and x.shape == y.shape and torch.equal(x, y), f"seed {seed}, output {i}"
    return before, after


@pytest.mark.distributed
@pytest.mark.parametrize(("ranks", "integers"), [(2, False), (4, True)])
def test_values_are_equal_bit_for_bit(ranks: int, integers: bool) -> None:
    # two addends add up the same in any order; with four, the library's order may depend on the buffer's
    # layout, so that only sums that are exact in any order can be compared
    results: list[Any] = launch(compare, ranks, list(range(25 if ranks == 2 else 10)), integers, timeout=120)
    assert len(set(results)) == 1, "every rank made the same decisions"
    before, after = results[0]
    assert after < before / 2
