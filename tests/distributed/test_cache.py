"""Compile caches across processes: the same program hits both, whatever could change the output misses both.

Every program runs on fresh gloo ranks that share one cache folder, as on any machine, and trains one step. Its
parameters are sharded unevenly: torch keys a DTensor by its global size, so only ours tells the ranks apart.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import collective_identity as ci
import fsdp_hooks
import inductor_passes  # noqa: F401  (makes the backend known)
from collective_identity import GRAD_REDUCE_SHARD, GRAD_REPLICATE_REDUCE, PARAM_UNSHARD
from tests.distributed.launch import REPOSITORY, launch
from tests.graphs import payload

pytestmark = pytest.mark.distributed

CACHES_ON = {
    "TORCHINDUCTOR_FX_GRAPH_CACHE": "1",
    "TORCHINDUCTOR_FX_GRAPH_CACHE_DEFAULT": "1",
    "TORCHINDUCTOR_AUTOGRAD_CACHE": "1",
}
HIT = {"graph": {"hit": 2, "miss": 0}, "joint": {"hit": 1, "miss": 0}}
MISS = {"graph": {"hit": 0, "miss": 2}, "joint": {"hit": 0, "miss": 1}}
SAME = ("same", "data_parallel", "replicate")
ROLES = (PARAM_UNSHARD, "user.weights")
CHANGED = ("cap_mb", "bucketing", "observe", "param_group", "dtype", "mesh", "reshard")


def program(rank: int, ranks: int, folder: str, variants: tuple[str, ...]) -> dict[str, dict[str, Any]]:
    """One training step for each variant; what the caches and the report say.

    Replicas have equal graphs: one would take what the other has just stored, so each has a folder of its own.
    """
    found = {}
    for variant in variants:
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(Path(folder, str(rank))) if variant == "replicate" else folder
        found[variant] = step(variant, ranks)
    return found


def program_and_roles(
    rank: int, ranks: int, folder: str, variants: tuple[str, ...], roles: tuple[str, ...]
) -> tuple[dict[str, dict[str, Any]], dict[str, dict[str, dict[str, int]]]]:
    """Both in one process."""
    return program(rank, ranks, folder, variants), by_hand(rank, ranks, folder, roles)


def step(variant: str, ranks: int) -> dict[str, Any]:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    def shard(model: torch.nn.Module) -> None:
        if variant in ("data_parallel", "replicate"):
            mode = {"data_parallel": "fully_shard"}.get(variant, variant)
            fsdp_hooks.data_parallel(model, init_device_mesh("cpu", (ranks,)), mode)
            return
        shape, names = ((1, ranks), ("replicate", "shard")) if variant == "mesh" else ((ranks,), ("shard",))
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
        keep = variant != "reshard"
        # "param_group": the same collectives under the name of another unit, which is in the payload alone
        fully_shard(model[0] if variant == "param_group" else model, mesh=mesh, reshard_after_forward=not keep)
        fsdp_hooks.install(model)

    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    torch.manual_seed(0)
    dtype = torch.float64 if variant == "dtype" else torch.float32
    model = torch.nn.Sequential(torch.nn.Linear(4, 3)).to(dtype)
    options = {"cap_mb": {"cap_mb": 1.0}, "bucketing": {"bucketing": False}}
    with ci.enable(mode="observe" if variant == "observe" else "optimize") as handle:
        shard(model)
        call = torch.compile(model, backend="collective_identity", fullgraph=True, options=options.get(variant, {}))
        loss = call(torch.ones(2, 4, dtype=dtype)).sum()
        loss.backward()
        report = handle.report().to_dict()
    return {
        "loss": loss.item(),
        "gradient": model[0].weight.grad.full_tensor().tolist(),
        "caches": caches(),
        "package": Path(ci.__file__).parents[1].name,
        "report": report,
    }


def caches() -> dict[str, dict[str, int]]:
    counters = torch._dynamo.utils.counters
    return {
        "graph": {key: counters["inductor"][f"fxgraph_cache_{key}"] for key in ("hit", "miss")},
        "joint": {key: counters["aot_autograd"][f"autograd_cache_{key}"] for key in ("hit", "miss")},
    }


def check_a_hit(cold: dict[str, Any], warm: dict[str, Any]) -> None:
    """What the report says of a compile that was taken from the caches."""
    before, after = cold["report"], warm["report"]
    graphs = [graph for graph in after["graphs"] if graph["phase"] != "joint"]
    assert [graph["phase"] for graph in graphs] == ["forward", "backward"]
    assert [graph["cached"] for graph in graphs] == [True, True]
    assert after["ok"] is True and after["failures"] == []
    assert after["coverage"] == before["coverage"] and len(after["coverage"]) > 0
    assert after["collectives"] == before["collectives"]
    assert after["counts"] == before["counts"] and after["counts"]["explicit"] > 0
    assert after["agreement"] == "agreed"


def test_the_same_program_hits_and_any_change_misses(tmp_path: Path) -> None:
    first, second = (
        launch(program_and_roles, 2, str(tmp_path), variants, roles, env=CACHES_ON, timeout=600)
        for variants, roles in ((SAME, ROLES[:1]), (SAME + CHANGED, ROLES))
    )
    hit, miss = (
        {"graph": {"hit": yes, "miss": 1 - yes}, "joint": {"hit": yes, "miss": 1 - yes}} for yes in (1, 0)
    )
    for (cold, cold_roles), (warm, warm_roles) in zip(first, second, strict=True):
        assert cold_roles == {ROLES[0]: miss}
        assert warm_roles == {ROLES[0]: hit, ROLES[1]: miss}, "the code is the same; the role is in the metadata alone"
        for name in SAME:
            assert (name, cold[name]["caches"]) == (name, MISS)
            assert (name, warm[name]["caches"]) == (name, HIT)
            check_a_hit(cold[name], warm[name])
        for name in CHANGED:
            assert (name, warm[name]["caches"]) == (name, MISS)
        for name, run in warm.items():
            if name != "dtype":
                wanted = cold["same"]["loss"], cold["same"]["gradient"]
                assert (name, run["loss"], run["gradient"]) == (name, *wanted)
        assert warm["same"]["report"]["counts"]["explicit"] == 4
        assert warm["same"]["report"]["collectives"]["after_bucketing"] == {PARAM_UNSHARD: 1, GRAD_REDUCE_SHARD: 1}
        assert warm["replicate"]["report"]["collectives"]["after_bucketing"] == {GRAD_REPLICATE_REDUCE: 1}

        changed = {
            name: warm[name]["report"]["collectives"]["after_bucketing"]
            for name in ("cap_mb", "bucketing", "observe", "param_group")
        }
        one, two = {PARAM_UNSHARD: 1, GRAD_REDUCE_SHARD: 1}, {PARAM_UNSHARD: 2, GRAD_REDUCE_SHARD: 2}
        assert changed == {"cap_mb": one, "bucketing": two, "observe": two, "param_group": one}


def by_hand(rank: int, ranks: int, folder: str, roles: tuple[str, ...]) -> dict[str, dict[str, dict[str, int]]]:
    """A producer that writes payloads itself, the same collective under one role after another.

    A cache for each rank: the graphs are the same on both, and one rank could take what the other has just stored.
    """
    import torch.distributed as dist
    from torch.distributed._functional_collectives import all_gather_tensor
    from torch.fx.traceback import annotate

    os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(Path(folder, str(rank)))
    found = {}
    for role in roles:
        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()

        def gathered(x: torch.Tensor, role: str = role) -> torch.Tensor:
            with annotate({"distributed.comm_semantics": payload(role)}):
                full = all_gather_tensor(x, 0, dist.group.WORLD)
            return full * 2

        with ci.enable():
            torch.compile(gathered, backend="collective_identity", fullgraph=True)(torch.ones(2))
        found[role] = caches()
    return found


@pytest.mark.long
def test_another_package_version_or_world_size_misses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The packages copied elsewhere are the same program; with another version they are another."""

    def run(ranks: int, package: str | None = None, version: str | None = None) -> dict[str, Any]:
        with monkeypatch.context() as patch:
            if package is not None:
                patch.setattr(sys, "path", [str(copied(tmp_path / package, version)), *sys.path])
            found = launch(program, ranks, str(tmp_path / "cache"), ("same",), env=CACHES_ON, timeout=300)
        assert {rank["same"]["package"] for rank in found} == {package or REPOSITORY.name}
        (said,) = {str(rank["same"]["caches"]) for rank in found}
        return {"caches": said, "loss": found[0]["same"]["loss"]}

    cold = run(2)
    assert cold == {"caches": str(MISS), "loss": cold["loss"]}
    assert run(2, "unchanged") == {"caches": str(HIT), "loss": cold["loss"]}
    assert run(2, "changed", "9.9.9") == {"caches": str(MISS), "loss": cold["loss"]}
    assert run(3) == {"caches": str(MISS), "loss": cold["loss"]}


def copied(folder: Path, version: str | None) -> Path:
    """The three packages in a folder of their own, with another version if one is given."""
    for name in ("collective_identity", "fsdp_hooks", "inductor_passes"):
        shutil.copytree(REPOSITORY / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    if version is not None:
        (file,) = folder.glob("collective_identity/version.py")
        assert ci.__version__ in file.read_text()
        file.write_text(file.read_text().replace(ci.__version__, version))
    return folder


@pytest.mark.long
def test_the_warm_start_command_prints_both(tmp_path: Path) -> None:
    """The example in one process after the other: the second compiles at least four times as fast."""
    command = [sys.executable, str(REPOSITORY / "examples" / "warm_start.py"), "--layers", "1"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=500, cwd=tmp_path)
    assert done.returncode == 0, done.stderr[-3000:]
    lines = {line.split()[0]: line for line in done.stdout.splitlines() if "FxGraphCache" in line}
    assert "2 miss" in lines["cold"] and "2 hit" in lines["warm"], done.stdout
    assert "1 miss" in lines["cold"] and "1 hit" in lines["warm"], done.stdout
    cold, warm = (float(lines[name].split()[1]) for name in ("cold", "warm"))
    assert cold >= 4 * warm, done.stdout
