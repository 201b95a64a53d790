"""Does `watch` say at which rank and collective a job stands that was hung on purpose, within ten seconds?"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.distributed.hang_runs import SKIPPED_CALL, train_until_it_hangs
from tests.distributed.launch import launch, run_hosts

HOSTS = ("127.0.0.2", "127.0.0.3")


def hang(rank: int, ranks: int, folder: str) -> None:
    train_until_it_hangs(rank, ranks, folder, rank == 0)


def named(outcome: dict[str, Any], ranks: int) -> None:
    """The rank that skipped, what the others wait in, and where each of them stands."""
    assert outcome["codes"] == [1, 1], outcome
    last, others = ranks - 1, list(range(ranks - 1))
    found = outcome["json"]
    assert (found["ranks"], found["stands"], found["unheard"]) == (ranks, True, [])
    skipped = found["findings"][0]
    assert (skipped["kind"], skipped["ranks"], skipped["group"]) == ("skipped", [last], "0"), found["findings"]
    behind = next(f for f in found["findings"] if f["kind"] == "behind" and f["group"] == "0")
    assert (behind["ranks"], behind["waiting"]) == ([last], others)
    at = behind["collective"]
    assert (at["call"], at["position"], at["of"]) == (SKIPPED_CALL, 2, 3), at
    assert (at["row"]["transport"], at["row"]["reduce_op"]) == ("all_reduce", "sum")
    assert at["graph"].startswith("inference graph ")
    assert f"rank {last} has skipped" in outcome["text"] and "2 of 3 issued" in outcome["text"]
    assert f"collective 3 of 3 in {at['graph']}, call {SKIPPED_CALL}" in outcome["text"]
    where = {one["rank"]: one["where"] for one in found["by_rank"]}
    assert all("hang_runs.py" in where[rank] for rank in range(ranks)), where
    assert "step(torch.ones(4), name, ranks)" in where[0] and "wait_tensor" in where[0], where
    assert "barrier" in where[last] and "is outside every graph" in where[last], where
    assert all(f"is in {at['graph']}, call {SKIPPED_CALL}" in where[rank] for rank in others), where


@pytest.mark.distributed
def test_a_rank_that_skips_a_collective_is_named_within_ten_seconds(tmp_path: Path) -> None:
    launch(hang, 2, str(tmp_path), timeout=90, store="tcp")
    outcome = json.loads((tmp_path / "seen").read_text())
    named(outcome, 2)
    assert outcome["seconds"] < 10, outcome  # about 6 where the processors are free


@pytest.mark.distributed
@pytest.mark.long
def test_two_hosts_that_began_again_are_watched_alike(tmp_path: Path) -> None:
    """torchrun counts a restart only on the host where a rank failed; the ranks meet all the same, and nothing that
    the first start left is read."""
    script = Path(__file__).with_name("hang_runs.py")
    run_hosts(script, HOSTS, 1, [str(tmp_path)], timeout=150, restarts=1)
    assert (tmp_path / "failed").exists()
    outcome = json.loads((tmp_path / "seen").read_text())
    named(outcome, 2)
    assert outcome["seconds"] < 10, outcome
    assert json.loads((tmp_path / "store.json").read_text())["store"].startswith(f"tcp://{HOSTS[0]}:")
