"""The collectives expected of a sharded model, read from FSDP2 alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy

import collective_identity as ci
import fsdp_hooks
from collective_identity import GRAD_REDUCE_SHARD, GRAD_REPLICATE_REDUCE, PARAM_UNSHARD
from tests.unit.sharded import sharded

pytestmark = pytest.mark.usefixtures("fake_world")

Rows = dict[tuple[str, str, str, str], tuple[int | None, int | None]]


def rows_of(model: nn.Module, **options: Any) -> Rows:
    rows = fsdp_hooks.expected_collectives(model, **options).rows
    found = {(r.role, r.phase, r.param_group, r.dtype): (r.count, r.buckets) for r in rows}
    assert len(found) == len(rows)
    return found


def gathers_and_reductions(group: str, count: int, dtype: str = "torch.float32") -> Rows:
    return {
        (PARAM_UNSHARD, "forward", group, dtype): (count, 1),
        (GRAD_REDUCE_SHARD, "backward", group, dtype): (count, 1),
    }


PLAIN = gathers_and_reductions("blocks.0", 2) | gathers_and_reductions("blocks.1", 2) | gathers_and_reductions("", 1)
FLOAT = "torch.float32"


def test_expected_one_dimensional() -> None:
    """The re-gather of what backward needs is unknown until the graph is; the root is not resharded."""
    unknown: Rows = {(PARAM_UNSHARD, "regather", f"blocks.{i}", FLOAT): (None, None) for i in (0, 1)}
    model = sharded()
    assert rows_of(model) == PLAIN | unknown
    assert fsdp_hooks.expected_collectives(model).world == {"shard": 4, "replicate": 1}
    assert fsdp_hooks.expected_collectives(model).model == "FSDPModel"
    fsdp_hooks.install(model)
    assert rows_of(model) == PLAIN | unknown, "the same for an installed model"
    assert fsdp_hooks.expected_collectives(model).model == "FSDPModel"


def test_expected_with_what_backward_needs() -> None:
    saved = {"blocks.1.weight", "blocks.0.0.weight", "head.weight", "no.such"}
    regather: Rows = {(PARAM_UNSHARD, "regather", f"blocks.{i}", FLOAT): (1, 1) for i in (0, 1)}
    assert rows_of(sharded(), saved_for_backward=saved) == PLAIN | regather
    assert rows_of(sharded(), saved_for_backward=()) == PLAIN


def test_expected_without_reshard() -> None:
    model = sharded(reshard_after_forward=False)
    assert rows_of(model) == PLAIN | {(PARAM_UNSHARD, "regather", "blocks.1", FLOAT): (None, None)}
    always = sharded()
    always.set_reshard_after_forward(True)
    saved = {"head.weight"}
    assert rows_of(always, saved_for_backward=saved) == PLAIN | {(PARAM_UNSHARD, "regather", "", FLOAT): (1, 1)}


def test_expected_hybrid() -> None:
    model = sharded(shape=(2, 2))
    replicas: Rows = {
        (GRAD_REPLICATE_REDUCE, "backward", group, FLOAT): (count, 1)
        for group, count in (("blocks.0", 2), ("blocks.1", 2), ("", 1))
    }
    assert rows_of(model, saved_for_backward=()) == PLAIN | replicas
    assert fsdp_hooks.expected_collectives(model).world == {"shard": 2, "replicate": 2}


def test_expected_of_one_rank_a_shard_group() -> None:
    """Nothing to gather or to scatter, only replicas to reduce."""
    assert {key[0] for key in rows_of(sharded(shape=(4, 1)))} == {GRAD_REPLICATE_REDUCE}


def test_expected_frozen() -> None:
    model = sharded()
    model.blocks[1].requires_grad_(False)
    model.blocks[0][0].bias.requires_grad_(False)
    want = dict(PLAIN)
    del want[GRAD_REDUCE_SHARD, "backward", "blocks.1", FLOAT]
    want[GRAD_REDUCE_SHARD, "backward", "blocks.0", FLOAT] = (1, 1)
    assert rows_of(model, saved_for_backward=()) == want


def test_expected_mixed_precision() -> None:
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    found = rows_of(sharded(mp_policy=policy), saved_for_backward=())
    assert found[PARAM_UNSHARD, "forward", "blocks.0", "torch.bfloat16"] == (2, 1)
    assert found[GRAD_REDUCE_SHARD, "backward", "blocks.0", FLOAT] == (2, 1)
    low = rows_of(sharded(mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16)), saved_for_backward=())
    assert low[GRAD_REDUCE_SHARD, "backward", "blocks.0", "torch.bfloat16"] == (2, 1)


def test_expected_is_declared_at_install() -> None:
    with ci.enable() as handle:
        model = fsdp_hooks.install(sharded())
        (record,) = [r for r in handle.session.ledger.records() if type(r).__name__ == "ExpectedRecord"]
    assert record.rows == fsdp_hooks.expected_collectives(model).rows
