"""Activation checkpointing of installed models: every place of the checkpoint, compiled and not, is eager FSDP2."""

from __future__ import annotations

import pytest

from tests.distributed import checkpoint_runs
from tests.distributed.launch import launch

pytestmark = pytest.mark.distributed


def test_checkpointed_training_is_eager_fsdp2s_bit_for_bit() -> None:
    """Five AdamW steps on two ranks; attention recomputes a random operator, DTensor parameters bring a mesh."""
    results = launch(checkpoint_runs.compare, 2, timeout=400)[0]
    assert len(results) == len(checkpoint_runs.RUNS)
    for result in results:
        assert (result["run"], result["loss"], result["param"]) == (result["run"], 0.0, 0.0)
        if result["run"][2]:
            report = result["report"]
            assert (result["run"], report["agreement"]) == (result["run"], "agreed")
            if result["run"][:2] == ("around the block", False):  # the checkpoint gathers again what was to be kept
                assert ["regather" in failure for failure in report["failures"]] == [True], report["failures"]
            else:
                assert (result["run"], report["failures"]) == (result["run"], [])
            counts = report["counts"]
            assert (result["run"], sum(counts.values())) == (result["run"], counts["explicit"])
            assert counts["explicit"] > 0


def test_a_checkpoint_around_a_block_needs_dynamos_flag_and_dynamo_names_it() -> None:
    for message in launch(checkpoint_runs.without_the_flag, 2, timeout=200):
        assert "skip_fwd_side_effects_in_bwd_under_checkpoint" in message
