"""A thousand random graphs against the installed torch and our own rules; `tests.random_graphs` runs more."""

from __future__ import annotations

import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from collective_identity.compat import torch_version
from tests import random_graphs

CHUNK = 125


@pytest.mark.parametrize("first", range(0, 1000, CHUNK))
def test_random_graphs(first: int) -> None:
    seen: Counter[tuple[str, bool]] = Counter()
    for seed in range(first, first + CHUNK):
        seen += random_graphs.check(seed)
    kinds = [("all_gather", True), ("all_gather", False), ("reduce_scatter", True), ("reduce_scatter", False)]
    kinds += [("all_reduce", True)] if torch_version() >= (2, 13) else []
    assert all(seen[kind] >= 3 for kind in kinds), seen


def test_the_longer_run_is_a_command() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tests.random_graphs", "--graphs", "3", "--seed", "5"],
        capture_output=True,
        text=True,
        timeout=120,
        cwd=Path(__file__).parents[2],
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.startswith("3 graphs from seed 5 hold")
