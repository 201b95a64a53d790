"""``trace_train_step``: whole steps as one graph, replayed and compiled, bit for bit as eager FSDP2."""

from __future__ import annotations

from typing import Any

import pytest

from collective_identity import GRAD_REDUCE_SHARD, GRAD_REPLICATE_REDUCE, PARAM_UNSHARD
from tests.distributed import step_runs
from tests.distributed.launch import launch

pytestmark = pytest.mark.distributed

EAGER = {"inner": "aot_eager"}
TWO = [
    ("uneven", "adamw", False, None),
    ("uneven", "adamw", True, None),
    ("uneven", "momentum", True, None),
    ("bf16", "adamw", True, None),
    ("nested", "adamw", False, None),
    ("keep_after_forward", "adamw", True, None),
    ("uneven", "adamw", False, EAGER),
    ("uneven", "momentum", True, EAGER),
]
FOUR = [("hybrid", "adamw", True, None), ("tensor_parallel", "momentum", False, None)]


def check(found: dict[str, dict[str, Any]]) -> None:
    for name, facts in found.items():
        exact = facts["loss"], facts["parameters"], facts["eager afterwards"]
        assert (name, *exact) == (name, 0.0, 0.0, 0.0)
        assert facts["failures"] == [], name
        captured = facts["captured"]
        assert sum(captured[PARAM_UNSHARD].values()) == facts["roles"][PARAM_UNSHARD]
        assert captured[GRAD_REDUCE_SHARD]["backward"] == facts["roles"][GRAD_REDUCE_SHARD]


def test_two_ranks_replay_exactly() -> None:
    """Losses, parameters, and eager FSDP2 training that goes on from there."""
    found = launch(step_runs.replay, 2, TWO, timeout=300)[0]
    assert len(found) == len(TWO)
    check(found)
    assert all(facts["unlabelled"] == 0 for facts in found.values())
    assert found["uneven, adamw, in the graph"]["captured"][PARAM_UNSHARD] == {
        "forward": 14, "regather": 8, "backward": 0
    }
    assert found["keep_after_forward, adamw, in the graph"]["captured"][PARAM_UNSHARD]["regather"] == 0


def test_four_ranks_replay_exactly() -> None:
    found = launch(step_runs.replay, 4, FOUR, timeout=300)[0]
    check(found)
    hybrid, tensor = found.values()
    assert hybrid["roles"][GRAD_REPLICATE_REDUCE] == 14 and hybrid["unlabelled"] == 0
    assert tensor["unlabelled"] == 4, "tensor parallelism's own all-reduces"


def test_random_numbers_buffers_and_containers() -> None:
    for found in launch(step_runs.noisy, 2, timeout=120):
        assert all(found["same"]) and found["batches"] == 3, found


def test_what_is_refused() -> None:
    said = launch(step_runs.wrong, 2, timeout=120)[0]
    for name, text in {
        "other shape": "expects tensor 0 of its arguments to be int64[4, 5] on cpu, as it was traced, found",
        "other structure": "expects arguments as it was traced with",
        "other dtype": "found int32[4, 5] on cpu: trace a step for each shape",
        "other lr": "expects lr=0.01 of parameter group 0, as it was traced, found 0.5: trace it again",
        "fused in a compile": "compile expects a step without AdamW in the graph",
        "not sharded": "install expects a model with fully_shard applied",
        "no scalar": "expects loss_fn to return a scalar loss that depends on the parameters",
        "no gradient": "expects loss_fn to return a scalar loss that depends on the parameters",
        "not fused": "expects AdamW(..., fused=True), found fused=None",
        "adagrad": "expects an optimizer of SGD, Adam or AdamW, found Adagrad",
        "other constant": "expects the argument 2.0 that it was traced with, found 3.0",
        "eager still works": "True",
    }.items():
        assert text in said[name], (name, said[name])
