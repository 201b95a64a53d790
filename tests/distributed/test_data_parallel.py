"""`data_parallel` against FSDP2, DDP and one process, on real processes."""

from __future__ import annotations

from typing import Any

import pytest

from collective_identity import GRAD_REDUCE_SHARD, GRAD_REPLICATE_REDUCE, PARAM_UNSHARD
from tests.distributed import data_parallel_runs as runs
from tests.distributed.launch import launch

pytestmark = pytest.mark.distributed

NAMES = list(runs.TWO_RANKS)


def check(name: str, result: dict[str, Any]) -> None:
    differences = {key: result[key] for key in ("loss", "param", "eager loss", "eager param")}
    allowed = result["tolerance"]
    assert (name, {key: value for key, value in differences.items() if not value <= allowed}) == (name, {})
    check_report(name, result["report"])


def check_report(name: str, report: dict[str, Any]) -> None:
    assert (name, report["failures"]) == (name, [])
    assert report["agreement"] == "agreed"
    counts, found = report["counts"], report["collectives"]["captured"]
    assert counts["malformed"] == counts["dropped"] == counts["inferred"] == counts["not_captured"] == 0
    assert counts["explicit"] == sum(n for phases in found.values() for n in phases.values()) > 0
    for role, phases in report["collectives"]["expected"].items():
        for phase, count in phases.items():
            assert (name, role, phase, count) in [
                (name, role, phase, None),
                (name, role, phase, found.get(role, {}).get(phase, 0)),
            ]


@pytest.mark.parametrize("names", [NAMES[:9], NAMES[9:]], ids=["first", "second"])
def test_two_ranks_train_bit_for_bit_as_their_reference(names: list[str]) -> None:
    """Compiled and not compiled, every loss and parameter of ten AdamW steps."""
    results = launch(runs.compare, 2, "TWO_RANKS", tuple(names), {}, timeout=500)[0]
    for name, result in results.items():
        check(name, result)
        roles = {role for role, phases in result["report"]["collectives"]["captured"].items() if any(phases.values())}
        shards = {PARAM_UNSHARD, GRAD_REDUCE_SHARD}
        assert (name, roles) == (name, {GRAD_REPLICATE_REDUCE} if name.startswith("replicated") else shards)


def test_four_ranks_train_bit_for_bit_as_their_reference() -> None:
    results = launch(runs.compare, 4, "FOUR_RANKS", tuple(runs.FOUR_RANKS), {}, timeout=500)[0]
    for name, result in results.items():
        check(name, result)
    after = results["hybrid"]["report"]["collectives"]["after_bucketing"]
    assert after[GRAD_REPLICATE_REDUCE] == 3, "one for each unit: two blocks and the rest"


def test_expert_parallel_experts_with_a_mesh_of_their_own() -> None:
    for found in launch(runs.expert_parallel, 4, timeout=300):
        assert found["loss"] <= 1e-5 and found["param"] <= 1e-5
        assert found["after undo"] == {"DTensor"}
        check_report("experts", found["report"])


@pytest.mark.long
def test_inductor_trains_within_rounding() -> None:
    results = launch(runs.compare, 2, "TWO_RANKS", ("uneven",), {"inner": "inductor"}, timeout=600)[0]
    assert results["uneven"]["loss"] <= 1e-5
    check_report("uneven", results["uneven"]["report"])


def test_state_is_dtensors_and_checkpoints_fit_fsdp2() -> None:
    for found in launch(runs.facts, 2, timeout=200):
        exact = {key: value for key, value in found.items() if isinstance(value, float)}
        assert exact == dict.fromkeys(exact, 0.0) and len(exact) == 5
        assert {key for key, value in found.items() if value is True} == set(found) - set(exact)
