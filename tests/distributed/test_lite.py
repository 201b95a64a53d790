"""Lite mode with captured FSDP2 models on 2 ranks: equal to aot_eager, nothing rewritten, everything reported."""

from __future__ import annotations

from typing import Any

import pytest

from tests.distributed.launch import launch
from tests.distributed.lite_runs import compare


@pytest.fixture(scope="module")
def results() -> list[dict[str, Any]]:
    return launch(compare, 2, timeout=400)


@pytest.mark.parametrize("way", ["lite", "strict"])
@pytest.mark.parametrize("model", ["llama", "moe"])
def test_equal_to_aot_eager_bit_for_bit(results: list[dict[str, Any]], model: str, way: str) -> None:
    assert [rank[model][way]["equal"] for rank in results] == [True, True]


@pytest.mark.parametrize("way", ["lite", "strict"])
@pytest.mark.parametrize("model", ["llama", "moe"])
def test_classified_reported_and_not_rewritten(results: list[dict[str, Any]], model: str, way: str) -> None:
    for rank in results:
        report = rank[model][way]["report"]
        graphs = {graph["phase"]: graph for graph in report["graphs"]}
        assert [one["name"] for one in graphs["joint"]["passes"]] == ["reshard"], "recompute marks are capture"
        assert graphs["joint"]["passes"][0]["summary"]["resharded"] > 0
        for phase in ("forward", "backward"):
            assert graphs[phase]["lite"] == "full"
            assert graphs[phase]["passes"] == []
            assert graphs[phase]["captured"] == graphs[phase]["after"] != {}
            assert set(graphs[phase]["after"]) <= {"fsdp.param_unshard", "fsdp.grad_reduce_shard"}
        assert graphs["backward"]["after"]["fsdp.param_unshard"] > 0, "gathered again"
        assert "CI042" in str(report), "it is said that passes did not run"
