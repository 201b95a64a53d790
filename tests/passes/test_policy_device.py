"""Policies on a real second device: numbers, isolation, threads, caches; in processes of their own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.policy_device import compiler
from tests.policy_device.runs import CASES


@pytest.fixture(autouse=True)
def a_compiler() -> None:
    if compiler() is None:
        text = "NO C++ COMPILER (g++ or clang++): the operator policies were NOT tested on a second device"
        if os.environ.get("CI"):
            pytest.fail(text)
        pytest.skip(text)


def printed(folder: Path, *arguments: str, seconds: int = 600) -> list[Any]:
    """The JSON lines that ``python -m ...`` prints."""
    done = subprocess.run(
        [sys.executable, "-m", *arguments], env={**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(folder)},
        capture_output=True, text=True, timeout=seconds,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("inductor")


def test_second_device(folder: Path) -> None:
    found = printed(folder, "tests.policy_device.runs")[-1]
    assert set(found) == {case.__name__ for case in CASES}
    assert {name: result["bad"] for name, result in found.items() if result["bad"]} == {}


def threads(folder: Path, rounds: int) -> None:
    (found,) = printed(folder, "tests.policy_device.threads", str(rounds), seconds=1800)
    assert found["bad"] == []
    assert (found["rounds"], found["graphs"], found["backward"]) == (rounds, 6 * rounds, 3 * rounds)
    assert found["threads"] == 4, "three that compile forwards, and autograd's for the device"
    assert found["begun_before_anothers_backward"] >= rounds, "or the policies were never in flight together"


def test_threads(folder: Path) -> None:
    threads(folder, 3)


@pytest.mark.long
def test_fifty_rounds_of_threads(folder: Path) -> None:
    threads(folder, 50)


@pytest.mark.long
def test_the_proof(folder: Path) -> None:
    *rows, last = printed(folder, "benchmarks", "policy", "--prove", "--json", seconds=1800)
    assert all(row["holds"] for row in [*rows, last]) and len(rows) > 12


@pytest.mark.long
def test_the_cost(folder: Path) -> None:
    """The policy's own processor time in a compile, measured inside it: what other processes do hardly moves it."""
    (found,) = printed(folder, "benchmarks", "policy", "--json", "--rounds", "6")
    assert found["same_kernels"] and found["tables_changed"] == [] and found["own_percent"] <= 2
