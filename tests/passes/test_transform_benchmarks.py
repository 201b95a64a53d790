"""The benchmarks of bucketing, dedup and kernels run on small graphs, and keep what they promise of these."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks import bucketing, dedup, kernels, passes
from benchmarks.measure import lines_of
from collective_identity.compat import torch_version
from tests.unit.test_benchmarks import lines


def test_bucketing(capsys: pytest.CaptureFixture[str]) -> None:
    first, one, *growing, last = lines(bucketing, capsys, "--gathers", "60", "--large", "2000")
    assert first["benchmark"] == "bucketing" and one["buckets"] == 1 and one["extra_mb"] <= 150
    assert [row["buckets"] for row in growing] == [1, 4, 40]
    assert last["ratio"] > 1


def test_dedup(capsys: pytest.CaptureFixture[str]) -> None:
    first, one, *growing, last = lines(dedup, capsys, "--chain", "60", "--large", "2000")
    assert first["benchmark"] == "dedup" and one["left"] == 1
    assert [row["left"] for row in growing] == [5, 50, 500]
    if torch_version() >= (2, 13):  # before, torch had none
        assert last["ratio"] > 1


def test_lines_of_passes_grow_no_faster_than_the_graph(capsys: pytest.CaptureFixture[str]) -> None:
    first, *rows = lines(passes, capsys, "--lines", "--large", "300")
    assert first["benchmark"] == "passes" and len(rows) == 2 * len(passes.PASSES)
    assert all(row["times_the_lines"] <= passes.LINES_GROW for row in rows if row["collectives"] == 300)


def test_lines_count_loops_without_a_call() -> None:
    def square(size: int) -> int:
        total = 0
        for _ in range(size):
            for _ in range(size):
                total += 1
        return total

    assert lines_of(lambda: square(100)) > 50 * lines_of(lambda: square(10))


def test_kernels(capsys: pytest.CaptureFixture[str]) -> None:
    first, *rows, counted, verdict = lines(kernels, capsys, "--tensors", "24")
    assert first["timed"].startswith("nothing") and len(rows) == 12
    assert all(row["equal"] for row in rows) and not any("ratio" in row for row in rows)
    assert counted["ours"] == 2 and counted["torch"] >= 24 and verdict["failures"] == []


def test_kernels_fails_where_a_bound_is_not_kept() -> None:
    def rows(equal: bool = True, **figures: float) -> list[dict[str, Any]]:
        row = {"mb": 64, "members": 8, "from": "a", "to": "b", "equal": equal, "copy_ms": 1.0}
        row |= {"ours_ms": 1.2, "ratio": 1.5, "way": "kernel", "fastest": "cat"}
        return [{"what": what, **row, **figures} for what in ("gather_input", "gather_output")]

    assert kernels.failures_of(rows()) == []
    assert len(kernels.failures_of(rows(equal=False))) == 2
    assert len(kernels.failures_of(rows(ratio=0.9))) == 2 and not kernels.failures_of(rows(ratio=0.99))
    assert not kernels.failures_of([{**row, "way": "cat"} for row in rows(ratio=0.9)]), "the very same operator"
    assert len(kernels.failures_of(rows(ours_ms=1.3))) == 1, "0.77 of the copy bandwidth, both directions together"
    assert not kernels.failures_of(rows(ours_ms=1.3, mb=16))
