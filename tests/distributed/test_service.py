"""Do compiled graphs that differ between ranks stop every rank, and do ranks in trouble hang nobody? Real gloo."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.distributed import service_runs
from tests.distributed.launch import launch
from tests.distributed.test_cache import CACHES_ON

PLACES = {  # fault -> field and position of the first difference
    "swapped_groups": ("group", 0),
    "other_reduce_op": ("reduce_op", 1),
    "other_role": ("role", 0),
    "other_order": ("transport", 0),
    "missing_collective": ("collective", 1),
    "other_graph": ("transport", 1),
}


@pytest.fixture(scope="module")
def planted() -> list[dict[str, Any]]:
    return launch(service_runs.plant, 4, timeout=200, store="tcp")


@pytest.mark.distributed
@pytest.mark.parametrize("fault", PLACES)
def test_a_planted_fault_is_named_on_every_rank(planted: list[dict[str, Any]], fault: str) -> None:
    for rank, seen in enumerate(planted):
        found = seen[fault]
        assert found is not None, (rank, fault)
        assert (found["fault"], found["field"], found["position"]) == (fault, *PLACES[fault]), (rank, found)
        assert found["seconds"] < 20
        for text in ("CI050", f"({fault})", "inference graph 0/0", found["field"], "on rank 3"):
            assert text in found["text"], found


@pytest.mark.distributed
def test_stages_with_different_graphs_agree(planted: list[dict[str, Any]]) -> None:
    for seen in planted:
        assert [status for status, _ in seen["stages"]] == ["agreed", "agreed"], seen["stages"]


@pytest.mark.distributed
def test_a_graph_that_nobody_else_has_is_a_warning_that_names_who_is_missing(planted: list[dict[str, Any]]) -> None:
    assert "error" not in planted[3], planted[3]
    for rank, seen in enumerate(planted):
        assert seen["alone"][0][0] == "agreed"
        if rank == 3:
            assert seen["alone"][1] == ["timeout", "ranks [0, 1, 2] did not publish this graph in time"]
        else:
            assert len(seen["alone"]) == 1


@pytest.mark.distributed
@pytest.mark.long
def test_eight_ranks_one_killed_one_late_one_warm(tmp_path: Path) -> None:
    """Nobody hangs; the killed rank alone is missing at the bound; the late one and the warm one are compared."""
    outcomes = launch(
        service_runs.in_trouble, 8, str(tmp_path), timeout=400, store="tcp", check=False, env=CACHES_ON
    )
    for outcome in outcomes:
        if outcome.rank == service_runs.KILLED:
            assert outcome.exit_code == -9
            continue
        assert outcome.ok, outcome.log
        seen = outcome.value
        assert [status for status, _ in seen["first"]] == ["agreed"], (outcome.rank, seen)
        missing = [service_runs.KILLED]
        verdict = ["timeout", f"ranks {missing} did not publish this graph in time"]
        assert seen["second"] == [verdict], (outcome.rank, seen)
        assert seen["cached"] == [outcome.rank == service_runs.WARM], (outcome.rank, seen)
        assert "CI051 agreement_timeout" in outcome.log and f"ranks {missing}" in outcome.log
        late = service_runs.DELAY if outcome.rank == service_runs.DELAYED else 0.0
        assert service_runs.BOUND <= seen["seconds"] < service_runs.BOUND + late + 45, (outcome.rank, seen)
