"""Eager FSDP2 around compiled blocks: what never entered a graph is "not captured", which is not "unlabelled"."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch

import collective_identity as ci
import fsdp_hooks
import inductor_passes  # noqa: F401  (makes the backend known)
from tests.distributed.capture_cases import Model, shard_blocks
from tests.distributed.launch import launch


def blocks_compiled(rank: int, ranks: int, installed: bool, blocks: int) -> dict[str, Any]:
    """A step of a model of two blocks of which some are compiled, each by itself; what is reported."""
    warnings.simplefilter("ignore")
    torch.manual_seed(0)
    torch._dynamo.reset()
    model = Model()
    shard_blocks(model)
    with ci.enable():
        if installed:
            fsdp_hooks.install(model)
        for block in list(model.blocks)[:blocks]:
            block.compile(backend="collective_identity", options={"inner": "aot_eager"})
        model(torch.zeros(4, 5, dtype=torch.long)).sum().backward()
        report = ci.report().to_dict()
    changed = [p["name"] for graph in report["graphs"] for p in graph["passes"] if p["changed"]]
    said = [e["detail"] for w in report["warnings"] if w["code"] == "CI040" for e in w["examples"]]
    return {
        "counts": report["counts"],
        "graphs": len(report["graphs"]),
        "changed": changed,
        "said": said,
        "failures": report["failures"],
    }


def both(rank: int, ranks: int) -> dict[str, dict[str, Any]]:
    return {
        "not installed": blocks_compiled(rank, ranks, installed=False, blocks=2),
        "one of two blocks": blocks_compiled(rank, ranks, installed=True, blocks=1),
    }


@pytest.mark.distributed
def test_not_captured_is_not_unlabelled() -> None:
    for found in launch(both, 2, timeout=150):
        eager, half = found["not installed"], found["one of two blocks"]
        assert eager["graphs"] > 0 and eager["changed"] == []
        assert not any(eager["counts"].values()), "FSDP2's own collectives are in no graph, and nobody expects them"
        assert half["counts"]["inferred"] == half["counts"]["malformed"] == half["counts"]["dropped"] == 0
        assert half["counts"]["explicit"] > 0 and half["counts"]["not_captured"] > 0
        (said,) = eager["said"]
        assert "blocks.0" in said and "blocks.1" in said, "eager FSDP2 modules are named"
        assert half["said"] == []
        assert any("blocks.1" in text for text in half["failures"]), "the block left out is named"
