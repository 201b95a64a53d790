"""``trace_train_step``: whole steps as one graph, replayed and compiled, bit for bit as eager FSDP2."""

from __future__ import annotations

from typing import Any

import pytest

from collective_identity import GRAD_REDUCE_SHARD, GRAD_REPLICATE_REDUCE, PARAM_UNSHARD
from tests.distributed import step_runs
from tests.distributed.launch import launch

pytestmark = pytest.mark.distributed

Run = step_runs.Run
EAGER = {"inner": "aot_eager"}
TWO = [
    *(Run("uneven", optimizer) for optimizer in ("adamw", "sgd")),
    Run("bf16", "adamw fused", clip=True),
    Run("nested", "adamw", inside=False),
    Run("keep_after_forward", "adamw fused"),
    Run("checkpointed", "adamw"),
    Run("twice", "adamw"),
    Run("uneven", "adamw", inside=False, options=EAGER),
    Run("uneven", "adamw foreach", options=EAGER, clip=True),
    Run("uneven", "adamw fused", options=EAGER),
]
OPTIMIZERS_MORE = ("adamw foreach", "adamw fused", "adam amsgrad", "sgd foreach", "rmsprop", "adagrad")
MORE = [
    *(Run("uneven", optimizer) for optimizer in OPTIMIZERS_MORE),
    Run("uneven", "adamw", inside=False),
    Run("uneven", "adamw foreach", clip=True),
    Run("uneven", "sgd", options=EAGER),
]
FOUR = [
    Run("hybrid", "adamw foreach", clip=True),
    Run("tensor_parallel", "sgd", inside=False),
    Run("uneven", "adamw", clip=True),
    Run("uneven", "adamw fused", options=EAGER),
    Run("bf16", "adamw foreach"),
    Run("twice", "adamw"),
]


def check(found: dict[str, dict[str, Any]]) -> None:
    for name, facts in found.items():
        exact = facts["loss"], facts["parameters"], facts["eager afterwards"]
        assert (name, *exact, facts["moved"]) == (name, 0.0, 0.0, 0.0, True)
        assert facts["failures"] == [], name
        captured = facts["captured"]
        assert sum(captured[PARAM_UNSHARD].values()) == facts["roles"][PARAM_UNSHARD]
        assert captured[GRAD_REDUCE_SHARD]["backward"] == facts["roles"][GRAD_REDUCE_SHARD]


def test_two_ranks_replay_exactly() -> None:
    """Losses, parameters, and eager FSDP2 training that goes on from there."""
    found = launch(step_runs.replay, 2, TWO, timeout=300)[0]
    assert len(found) == len(TWO)
    check(found)
    for name, facts in found.items():
        assert (facts["unlabelled"] > 0) == ("clipped" in name), "the norm of all gradients needs a collective"
    assert found["uneven, adamw, in the graph"]["captured"][PARAM_UNSHARD] == {
        "forward": 14, "regather": 8, "backward": 0
    }
    assert found["twice, adamw, in the graph"]["captured"][PARAM_UNSHARD] == {
        "forward": 26, "regather": 8, "backward": 0
    }, "the second call of a block gathers again, as the backward of both does"
    assert found["keep_after_forward, adamw fused, in the graph"]["captured"][PARAM_UNSHARD]["regather"] == 0


@pytest.mark.long
def test_every_optimizer_replays_exactly() -> None:
    found = launch(step_runs.replay, 2, MORE, timeout=300)[0]
    assert {run.optimizer for run in (*TWO, *MORE)} == set(step_runs.OPTIMIZERS)
    check(found)


def test_four_ranks_replay_exactly() -> None:
    """In one dimension as well: gloo adds up four numbers in an order that their place in the buffer decides."""
    found = launch(step_runs.replay, 4, FOUR, timeout=300)[0]
    assert len(found) == len(FOUR)
    check(found)
    hybrid, tensor, *plain = found.values()
    assert hybrid["roles"][GRAD_REPLICATE_REDUCE] == 3
    assert {facts["roles"][GRAD_REDUCE_SHARD] for facts in (hybrid, *plain)} == {3}, "one a unit, as FSDP2's"
    assert tensor["unlabelled"] == 4, "tensor parallelism's own all-reduces"


def test_random_numbers_buffers_and_containers() -> None:
    for found in launch(step_runs.noisy, 2, timeout=120):
        assert all(found["same"]) and found["batches"] == 3, found


def test_a_gradient_scaler() -> None:
    """The step in which one rank overflows changes nothing on either, and the scale follows eager's."""
    for found in launch(step_runs.scaled, 2, timeout=120):
        assert len(found) == 5
        for name, facts in found.items():
            assert (name, facts) == (
                name, {"losses": True, "scales": True, "parameters": 0.0, "moved": True, "state": True}
            )


def test_what_is_refused() -> None:
    said = launch(step_runs.wrong, 2, timeout=120)[0]
    for name, text in {
        "other shape": "expects tensor 0 of its arguments to be int64[4, 5] on cpu, as it was traced, found",
        "other structure": "expects arguments as it was traced with",
        "other dtype": "found int32[4, 5] on cpu: trace a step for each shape",
        "other weight decay": "expects weight_decay=0.01 of parameter group 0, as it was traced, found 0.5: only lr",
        "left-over gradient": "expects no gradient in 'embed.weight', found one, which its optimizer would not see",
        "stale": "in parameter group 0 that is not: build the optimizer after fully_shard",
        "adamax": "expects an optimizer of SGD, Adam, AdamW, RMSprop, Adagrad, found Adamax",
        "dampening": "expects SGD with dampening=0, found 0.1",
        "tensor lr": "expects a float as lr of AdamW, found a tensor",
        "differentiable": "expects SGD(differentiable=False), found True",
        "fused sgd": "expects SGD without fused=True, found it, which eager FSDP2 does not run either",
        "hooks": "expects SGD without step hooks, found some",
        "before_step alone": "expects before_step together with optimizer, found it alone",
        "not sharded": "install expects a model with fully_shard applied",
        "no scalar": "expects loss_fn to return a scalar loss that depends on the parameters",
        "no gradient": "expects loss_fn to return a scalar loss that depends on the parameters",
        "other constant": "expects the argument 2.0 that it was traced with, found 3.0",
        "eager still works": "True",
    }.items():
        assert text in said[name], (name, said[name])
