"""Policies on a real second device: numbers, isolation, threads; in a process of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.policy_device import compiler
from tests.policy_device.runs import CASES


def test_second_device(tmp_path: Path) -> None:
    if compiler() is None:
        text = "NO C++ COMPILER (g++ or clang++): the operator policies were NOT tested on a second device"
        if os.environ.get("CI"):
            pytest.fail(text)
        pytest.skip(text)
    done = subprocess.run(
        [sys.executable, "-m", "tests.policy_device.runs", *(case.__name__ for case in CASES)],
        env={**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(tmp_path)}, capture_output=True, text=True, timeout=600,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert set(found) == {case.__name__ for case in CASES}
    assert {name: result["bad"] for name, result in found.items() if result["bad"]} == {}
