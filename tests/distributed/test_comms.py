"""Eager FSDP2 with functional comms on real processes: the same bits, and a role on every collective."""

from __future__ import annotations

import pytest

from collective_identity import GRAD_REDUCE_SHARD, GRAD_REPLICATE_REDUCE, PARAM_UNSHARD
from tests.distributed import comms_runs
from tests.distributed.launch import launch

pytestmark = pytest.mark.distributed


@pytest.mark.parametrize("ranks", [2, 4])
def test_ten_steps_are_bit_for_bit_those_of_plain_fsdp2(ranks: int) -> None:
    for results in launch(comms_runs.compare, ranks, timeout=300):
        assert set(results) > set(comms_runs.CASES[ranks])
        for name, result in results.items():
            assert (name, result) == (name, {"losses": True, "moved": True, "parameters": True})


@pytest.mark.parametrize("ranks", [2, 4])
def test_every_collective_of_a_traced_step_says_why(ranks: int) -> None:
    groups = ["", "blocks.0", "blocks.1"]
    for facts in launch(comms_runs.traced, ranks, timeout=120):
        per_role = {role: [] for role in (PARAM_UNSHARD, GRAD_REDUCE_SHARD, GRAD_REPLICATE_REDUCE)}
        for role, source, producer, param_group in facts["identities"]:
            assert (source, producer) == ("explicit", "fsdp2_eager")
            per_role[role].append(param_group)
        assert sorted(per_role[PARAM_UNSHARD]) == sorted([*groups, "blocks.0", "blocks.1"]), "the root is kept"
        assert sorted(per_role[GRAD_REDUCE_SHARD]) == groups
        assert sorted(per_role[GRAD_REPLICATE_REDUCE]) == (groups if ranks == 4 else [])
        assert facts["params"][""] == ("embed.weight", "head.weight")
        assert facts["groups"] == (2 if ranks == 4 else 1)
        assert facts["raw"] == []
        assert facts["routed"] is (ranks == 4)
        assert facts["restored"] is True


def test_the_last_model_restored_takes_the_router_away() -> None:
    assert launch(comms_runs.two_models, 4, timeout=120) == [[True, True, False]] * 4
