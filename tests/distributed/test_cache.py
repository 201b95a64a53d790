"""Compile caches across processes: the same program hits both, whatever could change the output misses both.

Every program runs on two fresh gloo ranks that share one cache folder, as on any machine, and trains one step. Its
parameters are sharded unevenly: torch keys a DTensor by its global size, so only ours tells the ranks apart. Torch
2.11 keeps such graphs out of AOTAutogradCache; there only the compiled graphs are taken from FxGraphCache.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch

import collective_identity as ci
import fsdp_hooks
import inductor_passes  # noqa: F401  (makes the backend known)
from collective_identity import GRAD_REDUCE_SHARD, PARAM_UNSHARD
from tests.distributed.launch import launch

pytestmark = pytest.mark.distributed

CACHES_ON = {
    "TORCHINDUCTOR_FX_GRAPH_CACHE": "1",
    "TORCHINDUCTOR_FX_GRAPH_CACHE_DEFAULT": "1",
    "TORCHINDUCTOR_AUTOGRAD_CACHE": "1",
}
JOINT = tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 13)
CHANGED = ("cap_mb", "bucketing", "observe", "param_group")


def program(rank: int, ranks: int, folder: str, variants: tuple[str, ...]) -> dict[str, dict[str, Any]]:
    """One training step for each variant; what the caches and the report say."""
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = folder
    return {variant: step(variant) for variant in variants}


def step(variant: str) -> dict[str, Any]:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 3))
    mesh = init_device_mesh("cpu", (2,))
    # "param_group": the same collectives under the name of another unit, which is in the payload alone
    fully_shard(model[0] if variant == "param_group" else model, mesh=mesh, reshard_after_forward=False)
    options = {"cap_mb": {"cap_mb": 1.0}, "bucketing": {"bucketing": False}}
    with ci.enable(mode="observe" if variant == "observe" else "optimize") as handle:
        fsdp_hooks.install(model)
        call = torch.compile(model, backend="collective_identity", fullgraph=True, options=options.get(variant, {}))
        loss = call(torch.ones(2, 4)).sum()
        loss.backward()
        report = handle.report().to_dict()
    counters = torch._dynamo.utils.counters
    return {
        "loss": loss.item(),
        "gradient": model[0].weight.grad.to_local().tolist(),
        "graph": {key: counters["inductor"][f"fxgraph_cache_{key}"] for key in ("hit", "miss")},
        "joint": {key: counters["aot_autograd"][f"autograd_cache_{key}"] for key in ("hit", "miss")},
        "report": report,
    }


def test_the_same_program_hits_and_any_change_misses(tmp_path: Path) -> None:
    first, second = (
        launch(program, 2, str(tmp_path), variants, env=CACHES_ON, timeout=400)
        for variants in (("same",), ("same", *CHANGED))
    )
    for cold, warm in zip(first, second, strict=True):
        assert cold["same"]["graph"] == {"hit": 0, "miss": 2}
        assert cold["same"]["joint"] == {"hit": 0, "miss": int(JOINT)}
        assert warm["same"]["graph"] == {"hit": 2, "miss": 0}
        assert warm["same"]["joint"] == {"hit": int(JOINT), "miss": 0}
        for name in CHANGED:
            assert (name, warm[name]["graph"]) == (name, {"hit": 0, "miss": 2})
            assert (name, warm[name]["joint"]) == (name, {"hit": 0, "miss": int(JOINT)})
        for name, run in warm.items():
            assert (name, run["loss"], run["gradient"]) == (name, cold["same"]["loss"], cold["same"]["gradient"])

        before, after = cold["same"]["report"], warm["same"]["report"]
        graphs = [graph for graph in after["graphs"] if graph["phase"] != "joint"]
        assert [graph["phase"] for graph in graphs] == ["forward", "backward"]
        assert [graph["cached"] for graph in graphs] == [True, True]
        assert after["ok"] is True and after["failures"] == []
        assert after["coverage"] == before["coverage"] and len(after["coverage"]) == 2
        assert after["collectives"] == before["collectives"]
        assert after["counts"] == before["counts"] and after["counts"]["explicit"] == 4
        assert after["agreement"] == "agreed"
        assert after["collectives"]["after_bucketing"] == {PARAM_UNSHARD: 1, GRAD_REDUCE_SHARD: 1}

        changed = {name: warm[name]["report"]["collectives"]["after_bucketing"] for name in CHANGED}
        one, two = {PARAM_UNSHARD: 1, GRAD_REDUCE_SHARD: 1}, {PARAM_UNSHARD: 2, GRAD_REDUCE_SHARD: 2}
        assert changed == {"cap_mb": one, "bucketing": two, "observe": two, "param_group": one}
