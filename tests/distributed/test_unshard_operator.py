"""`torch.ops.fsdp_hooks.unshard` over two real ranks against a direct computation, bit for bit."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist

from fsdp_hooks.operator import UnshardArgs, unshard
from tests.distributed.launch import launch

pytestmark = pytest.mark.distributed


@dataclass(frozen=True)
class Case:
    """A parameter, how it is sharded and reduced; the numbers are such that every result is exact."""

    shape: tuple[int, ...] = (4, 6)
    dim: int = 0
    op: str = "avg"
    predivide: float | None = None
    postdivide: float | None = None
    dtype: torch.dtype = torch.float32
    param_dtype: torch.dtype | None = None
    reduce_dtype: torch.dtype | None = None
    shards: int = 2
    replicas: int | None = None
    replicate_op: str = "avg"


CASES = {
    "even": Case(),
    "uneven": Case(shape=(5, 3)),
    "last rank empty": Case(shape=(1, 3)),
    "vector": Case(shape=(5,)),
    "vector with an empty shard": Case(shape=(1,)),
    "dim 1": Case(shape=(3, 4), dim=1),
    "dim 1 uneven": Case(shape=(3, 5), dim=1),
    "dim 1 empty": Case(shape=(3, 1), dim=1),
    "dim 1 of three": Case(shape=(2, 5, 3), dim=1),
    "last of three": Case(shape=(2, 3, 4), dim=2),
    "sum": Case(op="sum"),
    "pre- and postdivide": Case(op="sum", predivide=2.0, postdivide=4.0),
    "uneven, divided": Case(shape=(5, 3), op="sum", postdivide=2.0),
    "bf16": Case(param_dtype=torch.bfloat16),
    "bf16 reduced in fp32": Case(param_dtype=torch.bfloat16, reduce_dtype=torch.float32),
    "fp16 reduced": Case(reduce_dtype=torch.float16, op="sum", predivide=2.0),
    "fp64 shard in fp32": Case(dtype=torch.float64, param_dtype=torch.float32),
    "replicas only": Case(shards=1, replicas=2),
    "replicas only, sum": Case(shards=1, replicas=2, replicate_op="sum", predivide=2.0, postdivide=2.0),
    "shards, replica of one": Case(replicas=1, replicate_op="sum", op="sum", postdivide=2.0),
}


def direct(case: Case, rank: int, parameter: torch.Tensor, gradients: list[torch.Tensor]) -> tuple[Any, Any, Any]:
    """(shard, full, gradient of the shard) of this rank without any collective."""
    chunks = torch.chunk(parameter, case.shards, case.dim)
    place = rank if case.shards > 1 else 0
    empty = parameter.narrow(case.dim, 0, 0)
    shard = chunks[place] if place < len(chunks) else empty
    full = parameter.to(case.param_dtype or case.dtype)
    wire = case.reduce_dtype or full.dtype
    total = sum(g.to(wire) / (case.predivide or 1) for g in gradients)
    assert isinstance(total, torch.Tensor)
    if (case.op if case.shards > 1 else case.replicate_op) == "avg":
        total = total / 2
    total = (total / (case.postdivide or 1)).to(case.dtype)
    parts = torch.chunk(total, case.shards, case.dim)
    return shard, full, parts[place] if place < len(parts) else empty


def differences(rank: int, ranks: int) -> dict[str, str]:
    """What differs, by case; every case passes through forward and backward on every rank."""
    world = dist.group.WORLD.group_name
    alone = [dist.new_group([r]) for r in range(ranks)][rank].group_name
    found = {}
    for name, case in CASES.items():
        count = torch.Size(case.shape).numel()
        parameter = torch.arange(count, dtype=case.dtype).view(case.shape)
        gradients = [torch.arange(count).mul(2 * r + 2).sub(8 * r).view(case.shape) for r in range(ranks)]
        wanted_shard, wanted_full, wanted = direct(case, rank, parameter, gradients)
        shard = wanted_shard.clone().requires_grad_()
        args = UnshardArgs(
            version=1,
            producer="test",
            param="p",
            param_group="",
            dim=case.dim,
            size=case.shape[case.dim],
            group=world if case.shards > 1 else alone,
            group_size=case.shards,
            reduce_group=world if case.shards > 1 else alone,
            reduce_op=case.op,
            replicate_group={None: None, 1: alone, 2: world}[case.replicas],
            replicate_size=case.replicas or 1,
            replicate_op=case.replicate_op,
            predivide=case.predivide,
            postdivide=case.postdivide,
            param_dtype=case.param_dtype,
            reduce_dtype=case.reduce_dtype,
            reshard_after_forward=False,
        )
        full = unshard(shard, args)
        full.backward(gradients[rank].to(full.dtype))
        assert shard.grad is not None
        for what, got, want in (("full", full.detach(), wanted_full), ("gradient", shard.grad, wanted)):
            if (got.dtype, got.shape) != (want.dtype, want.shape) or not torch.equal(got, want):
                found[f"{name}: {what}"] = f"found {got}, expected {want}"
    return found


def test_two_ranks_equal_the_direct_computation() -> None:
    assert launch(differences, 2, timeout=120) == [{}, {}]
