"""Models of the `transformers` library and Lightning Fabric, captured against eager FSDP2. Nothing is downloaded.

The two libraries come with the `test` extra, and `./dev` checks that they import, so continuous integration always
runs this file. On a machine that runs the tests with what it has (`python3 dev here test`) it may be left out.
"""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest

from tests.distributed import hf_runs
from tests.distributed.launch import launch

MISSING = [name for name in ("transformers", "lightning") if importlib.util.find_spec(name) is None]

pytestmark = [
    pytest.mark.distributed,
    pytest.mark.skipif(
        bool(MISSING), reason=f"NOT TESTED: {', '.join(MISSING)} missing; pip install 'collective-identity[test]'"
    ),
]


def check_report(name: str, report: dict[str, Any]) -> None:
    assert (name, report["failures"], report["agreement"]) == (name, [], "agreed")
    counts, found = report["counts"], report["collectives"]["captured"]
    assert found == report["collectives"]["expected"] or None in [
        n for phases in report["collectives"]["expected"].values() for n in phases.values()
    ]
    assert counts["explicit"] == sum(n for phases in found.values() for n in phases.values()) > 0
    assert sum(counts.values()) == counts["explicit"]


def test_a_llama_trains_as_with_eager_fsdp2() -> None:
    """Ten AdamW steps on two ranks, every loss and parameter."""
    for name, result in launch(hf_runs.compare, 2, tuple(hf_runs.CASES), timeout=500)[0].items():
        assert (name, result["loss"] <= result["tolerance"], result["param"] <= result["tolerance"]) == (
            name,
            True,
            True,
        ), result
        check_report(name, result["report"])


def test_lightning_fabric_compiles_what_its_strategy_shards() -> None:
    for found in launch(hf_runs.fabric, 2, timeout=200):
        for name, result in found.items():
            assert (name, result["same"]) == (name, True)
            check_report(name, result["report"])
