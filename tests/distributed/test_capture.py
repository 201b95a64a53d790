"""Captured FSDP2 against eager FSDP2 on real processes: equal losses and parameters, every collective accounted for."""

from __future__ import annotations

from typing import Any

import pytest

from collective_identity import GRAD_REDUCE_SHARD, GRAD_REPLICATE_REDUCE, PARAM_UNSHARD
from tests.distributed import capture_runs
from tests.distributed.capture_cases import FOUR_RANKS, TWO_RANKS
from tests.distributed.launch import launch

pytestmark = pytest.mark.distributed

EAGER = {"inner": "aot_eager"}


def halves(names: list[str]) -> list[tuple[str, ...]]:
    """Several cases a launch: starting processes costs more than training in them."""
    middle = (len(names) + 1) // 2
    return [tuple(names[:middle]), tuple(names[middle:])]


def check_report(report: dict[str, Any], groups: int) -> None:
    assert report["failures"] == []
    assert report["agreement"] == "agreed"
    counts = report["counts"]
    assert counts["malformed"] == counts["dropped"] == counts["inferred"] == counts["not_captured"] == 0
    found, expected = report["collectives"]["captured"], report["collectives"]["expected"]
    assert found[PARAM_UNSHARD]["forward"] == expected[PARAM_UNSHARD]["forward"] > 0
    assert found[GRAD_REDUCE_SHARD]["backward"] == expected[GRAD_REDUCE_SHARD]["backward"] > 0
    total = sum(n for phases in found.values() for n in phases.values())
    assert counts["explicit"] == total


@pytest.mark.parametrize("names", halves(list(TWO_RANKS)), ids="-".join)
def test_two_ranks_train_bit_for_bit_as_eager_fsdp2(names: tuple[str, ...]) -> None:
    """With graphs run eagerly, capture and bucketing change no bit of any loss or parameter."""
    for name, result in launch(capture_runs.compare, 2, "TWO_RANKS", names, EAGER, timeout=500)[0].items():
        assert (name, result["loss"], result["param"]) == (name, 0.0, 0.0)
        check_report(result["report"], groups=3)


def test_four_ranks_train_bit_for_bit_as_eager_fsdp2() -> None:
    """Hybrid sharding and FSDP over tensor parallelism."""
    results = launch(capture_runs.compare, 4, "FOUR_RANKS", tuple(FOUR_RANKS), EAGER, timeout=500)[0]
    for name, result in results.items():
        assert (name, result["loss"], result["param"]) == (name, 0.0, 0.0)
        check_report(result["report"], groups=3)
    hybrid, tensor = results["hybrid"]["report"], results["tensor_parallel"]["report"]
    assert hybrid["collectives"]["captured"][GRAD_REPLICATE_REDUCE]["backward"] == 14
    assert hybrid["collectives"]["after_bucketing"][GRAD_REPLICATE_REDUCE] == 3
    assert tensor["counts"]["other"] == 4, "two all-reduces of tensor parallelism forward, two backward"


def test_one_bucket_for_each_parameter_group_and_phase() -> None:
    """One forward gather, one re-gather if resharded, one reduction if anything is trained."""
    names = ("uneven", "keep_after_forward", "frozen")
    results = launch(capture_runs.compare, 2, "TWO_RANKS", names, EAGER, timeout=500)[0]
    after = {name: results[name]["report"]["collectives"]["after_bucketing"] for name in names}
    assert after["uneven"] == {PARAM_UNSHARD: 3 + 2, GRAD_REDUCE_SHARD: 3}  # the root is not resharded
    assert after["keep_after_forward"] == {PARAM_UNSHARD: 3, GRAD_REDUCE_SHARD: 3}
    assert after["frozen"][GRAD_REDUCE_SHARD] == 2, "the frozen block reduces nothing"


@pytest.mark.long
def test_inductor_trains_within_rounding_of_eager_fsdp2() -> None:
    """Uneven shards; even ones train with Inductor in test_example and test_hf."""
    results = launch(capture_runs.compare, 2, "TWO_RANKS", ("uneven",), {}, timeout=600)[0]
    assert results["uneven"]["loss"] <= 1e-5
    check_report(results["uneven"]["report"], groups=3)


def test_state_stays_fsdp2s() -> None:
    """Parameters, gradients, optimizer state and state_dict are the DTensors FSDP2 made; uninstall gives it back."""
    for facts in launch(capture_runs.state_facts, 2, timeout=120):
        assert facts == {
            "same_parameters": True,
            "dtensor_gradients": True,
            "dtensor_optimizer_state": True,
            "same_keys": True,
            "outside_forward_reads_the_shard": True,
            "checkpoint_round_trip": 0.0,
            "eager_after_uninstall": 0.0,
            "classes_restored": True,
        }


def test_inference_and_an_installed_model_that_is_not_compiled() -> None:
    for found in launch(capture_runs.without_training, 2, timeout=200):
        assert found == {"no_grad": 0.0, "inference_mode after a step": 0.0, "not compiled": 0.0}


def test_passes_off_and_observe_change_nothing_but_the_graph() -> None:
    """bucketing=False and an observe session train to the same bits; observe leaves every graph as it was."""
    for facts in launch(capture_runs.modes, 2, timeout=200):
        assert facts["optimize"]["params"] == facts["unbucketed"]["params"] == facts["observe"]["params"]
        assert facts["observe"]["after"] == facts["observe"]["before"] == facts["unbucketed"]["after"]
        assert sum(facts["optimize"]["after"].values()) < sum(facts["optimize"]["before"].values())
        assert facts["observe"]["changed"] == []


def test_resharded_parameters_are_not_saved_for_backward() -> None:
    """No gathered parameter of a resharded group crosses from forward to backward; without marks they do."""
    for saved in launch(capture_runs.saved_parameters, 2, timeout=200):
        assert saved["resharded"] == ["head.weight"], "only the root's, which FSDP2 does not reshard"
        assert {"blocks.0.up.weight", "blocks.1.down.weight", "head.weight"} <= set(saved["kept"])


def test_planted_payloads() -> None:
    """A refuted payload counts as absent, is said once, and training goes on with the same numbers."""
    for facts in launch(capture_runs.planted, 2, timeout=200):
        assert [one["loss"] for one in facts.values()] == [0.0] * 4
        assert [one["ok"] for one in facts.values()] == [False, False, False, True]
        assert [len(one["warned"]) for one in facts.values()] == [1, 1, 1, 0]
        assert "1 inferred only" in facts["remove"]["failures"][0]
        for fault, code in (("remove", "CI033"), ("role", "CI006"), ("group", "CI007")):
            (text,) = facts[fault]["warned"]
            assert code in text and "all_gather_into_tensor" in text, text


def test_ranks_that_compile_different_things_stop_and_say_why() -> None:
    """One rank asks for other buckets: both raise before anything runs."""
    for rank, facts in enumerate(launch(capture_runs.disagree, 2, timeout=120)):
        assert facts["raised"].startswith("RanksDisagree"), facts
        assert f"on rank {rank}" in facts["raised"] and f"on rank {1 - rank}" in facts["raised"]
        assert facts["seconds"] < 60


def test_a_recompile_of_one_rank_alone_is_waited_for_once_and_briefly() -> None:
    """Not the whole `agreement_timeout`, and not again for the backward of the same compile."""
    zero, one = launch(capture_runs.one_rank_recompiles, 2, timeout=150)
    assert zero["statuses"] == ["agreed", "agreed"]
    assert one["statuses"] == ["agreed", "agreed", "timeout", "off"]
    assert one["seconds"] < 55
