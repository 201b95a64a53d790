"""The benchmarks of bucketing and dedup run on small graphs, and already there ours is the faster."""

from __future__ import annotations

import pytest

from benchmarks import bucketing, dedup
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
