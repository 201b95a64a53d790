"""Torch's own bucketing, dedup and overlap on real captured FSDP2: right roles at the end, losses of eager FSDP2."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch

import collective_identity as ci
import fsdp_hooks
from collective_identity import GRAD_REDUCE_SHARD, PARAM_UNSHARD
from tests.distributed import capture_runs
from tests.distributed.capture_cases import Case, Model
from tests.distributed.launch import launch
from tests.passes.upstream_graphs import as_on_gpus

pytestmark = [pytest.mark.distributed, pytest.mark.long]

BUCKETS: Mapping[str, Any] = {
    "bucket_all_gathers_fx": "all",
    "bucket_reduce_scatters_fx": "all",
    "bucket_all_reduces_fx": "all",
    "dedup_reduce_scatters": True,
}
OVERLAP: Mapping[str, Any] = {
    "aten_distributed_optimizations.enable_overlap_scheduling": True,
    "aten_distributed_optimizations.collective_bucketing": True,
    "aten_distributed_optimizations.insert_overlap_deps": True,
    "aten_distributed_optimizations.compute_estimator": "analytical",
    "aten_distributed_optimizations.enable_fusion_regions": False,  # 2.11 and 2.12 cannot be watched with them
}


def estimated(node: torch.fx.Node, *_: Any) -> float:
    """Milliseconds: torch's own estimates need a GPU."""
    return 1.0


class Even(Model):
    """Every shard has one size: torch 2.11's scheduler orders collectives by the sizes that one rank sees."""

    def __init__(self) -> None:
        super().__init__(width=8, blocks=1)
        self.embed = torch.nn.Embedding(8, 8)
        self.head = torch.nn.Linear(8, 8, bias=False)


def trained(rank: int, ranks: int) -> dict[str, dict[str, Any]]:
    """Losses of eager FSDP2 and of the compiled model by set of switches, with the graphs of its report."""
    from inductor_passes.upstream import inductor_option_exists

    case = Case(build=Even, steps=2)
    eager = capture_runs.prepared(case)
    found: dict[str, dict[str, Any]] = {"eager": {"losses": capture_runs.train(eager, eager, case, rank)}}
    time = {"aten_distributed_optimizations.custom_runtime_estimation": estimated}
    for name, switches in (("buckets", BUCKETS), ("overlap", {**OVERLAP, **time})):
        torch._dynamo.reset()
        given = {key: value for key, value in switches.items() if inductor_option_exists(key)}
        with as_on_gpus(), ci.enable():
            model = fsdp_hooks.install(capture_runs.prepared(case))
            call = torch.compile(
                model, backend="collective_identity", fullgraph=True, options={"bucketing": False, **given}
            )
            losses = capture_runs.train(model, call, case, rank)
            report = ci.report().to_dict()
        found[name] = {"losses": losses, "report": report}
    return found


def test_real_fsdp2_with_torchs_switches_on() -> None:
    found = launch(trained, 2, timeout=480)[0]
    for name in ("buckets", "overlap"):
        assert found[name]["losses"] == pytest.approx(found["eager"]["losses"], rel=1e-5), name
        report = found[name]["report"]
        assert report["failures"] == [] and report["counts"]["dropped"] == report["counts"]["malformed"] == 0
        graphs = {graph["phase"]: graph for graph in report["graphs"]}
        for phase, roles in (("forward", {PARAM_UNSHARD}), ("backward", {PARAM_UNSHARD, GRAD_REDUCE_SHARD})):
            graph = graphs[phase]
            (ran,) = (one for one in graph["passes"] if one["name"] == "reconcile")
            assert set(graph["after"]) == set(graph["captured"]) == roles, (name, phase)
            assert ran["summary"]["merged"] > 0 and ran["summary"]["lost"] == [], (name, phase)
            assert sum(graph["after"].values()) < sum(graph["captured"].values()), (name, phase)
