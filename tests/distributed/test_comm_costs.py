"""Collectives timed on real processes: one value on all ranks, caps that the backend follows, misuse told by name."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import collective_identity as ci
import fsdp_hooks
from benchmarks import comm
from collective_identity import GRAD_REDUCE_SHARD, PARAM_UNSHARD
from inductor_passes import CommCosts, KindCosts, measure_comm_costs
from inductor_passes.options import KINDS
from tests.distributed import capture_cases
from tests.distributed.capture_runs import compiled, prepared, train
from tests.distributed.launch import launch

pytestmark = pytest.mark.distributed

SMALL: dict[str, Any] = {"sizes": (1 << 10, 1 << 14, 10**5 + 1), "repeats": 3}
LAUNCHING_IS_FREE = CommCosts(**dict.fromkeys(KINDS, KindCosts(1e-6, 1e9)), group_size=2, device="cpu")
NOTHING_ELSE_COSTS = CommCosts(**dict.fromkeys(KINDS, KindCosts(1e4, 1e12)), group_size=2, device="cpu")


def refused(call: Callable[[], Any]) -> str:
    try:
        call()
    except ValueError as error:
        return str(error)
    return ""


def measured(rank: int, ranks: int) -> dict[str, Any]:
    """What each way to name the group gives, as JSON."""
    mesh = init_device_mesh("cpu", (ranks, 1), mesh_dim_names=("shard", "other"))
    alone = dist.new_group([rank], use_local_synchronization=True)
    first = dist.new_group([0])  # on rank 1 this is no process group
    found = {
        "default": measure_comm_costs(**SMALL),
        "mesh": measure_comm_costs(mesh["shard"], **SMALL),
        "device": measure_comm_costs(dist.group.WORLD, device=torch.device("cpu"), **SMALL),
    }
    return {
        "costs": {name: costs.to_json() for name, costs in found.items()},
        "lines": list(comm.rows(torch.device("cpu"), SMALL["sizes"], 2)),
        "refused": {
            "alone": refused(lambda: measure_comm_costs(alone)),
            "no member": refused(lambda: measure_comm_costs(first)),
            "two dimensions": refused(lambda: measure_comm_costs(mesh)),
            "no backend": refused(lambda: measure_comm_costs(device="meta")),
            "one size": refused(lambda: measure_comm_costs(sizes=(8, 8))),
            "no bytes": refused(lambda: measure_comm_costs(sizes=(0, 8))),
            "no repeat": refused(lambda: measure_comm_costs(repeats=0)),
            "sizes differ": refused(lambda: measure_comm_costs(sizes=(8, 4096 << rank))),
        },
    }


def test_all_ranks_have_one_value_and_misuse_is_told() -> None:
    zero, one = launch(measured, 2, timeout=120)
    assert zero["costs"] == one["costs"] and zero["lines"] == one["lines"]
    for text in zero["costs"].values():
        costs = CommCosts.from_json(text)
        assert (costs.group_size, costs.device) == (2, "cpu")
        assert costs.cap_mb(0.8) <= costs.cap_mb(0.9) <= costs.cap_mb(0.95)
    for rank, results in enumerate((zero, one)):
        said = results["refused"]
        assert "two ranks or more, found one: it sends nothing" in said["alone"]
        no_member = "found one: it sends nothing" if rank == 0 else "a process group that this rank is in"
        assert no_member in said["no member"]
        assert "a mesh of one dimension" in said["two dimensions"] and 'mesh["shard"]' in said["two dimensions"]
        assert "a device with a backend in the group" in said["no backend"] and "'meta'" in said["no backend"]
        assert said["one size"].endswith("found (8, 8)") and said["no bytes"].endswith("found (0, 8)")
        assert said["no repeat"].endswith("found 0")
        assert "equal sizes, repeats and device on all ranks" in said["sizes differ"]
        assert "4096" in said["sizes differ"] and "8192" in said["sizes differ"]

    first, *lines, last = zero["lines"]
    assert (first["benchmark"], first["ranks"], first["device"]) == ("comm", 2, "cpu")
    assert [line["kind"] for line in lines[: len(KINDS)]] == list(KINDS)
    assert [line["mib"] * 2**20 for line in lines[len(KINDS) :]] == [2 << 10, 2 << 14] * len(KINDS)
    assert not {2 << 10, 2 << 14} & set(SMALL["sizes"]), "the fit has not seen them"
    ratios = [line["ratio"] for line in lines[len(KINDS) :]]
    assert (last["ratio_min"], last["ratio_max"]) == (min(ratios), max(ratios)) and min(ratios) > 0


def trained(rank: int, ranks: int) -> dict[str, Any]:
    """Collectives after bucketing under the cap that each of three costs asks for, and the losses."""
    case = dataclasses.replace(capture_cases.TWO_RANKS["uneven"], steps=2)
    eager = prepared(case)
    found: dict[str, Any] = {"eager": {"losses": train(eager, eager, case, rank)}}
    for name, costs in (
        ("measured", measure_comm_costs(**SMALL)),
        ("launching is free", LAUNCHING_IS_FREE),
        ("nothing else costs", NOTHING_ELSE_COSTS),
    ):
        torch._dynamo.reset()
        with ci.enable(agreement_timeout=30):
            model = fsdp_hooks.install(prepared(case))
            losses = train(model, compiled(model, order="graph", cap_mb=costs.cap_mb()), case, rank)
            report = ci.report().to_dict()
        found[name] = {
            "losses": losses,
            "captured": report["collectives"]["captured"],
            "left": report["collectives"]["after_bucketing"],
            "agreement": report["agreement"],
            "ok": report["ok"],
        }
    return found


def test_the_cap_of_the_costs_decides_what_becomes_one() -> None:
    for found in launch(trained, 2, timeout=180):
        expected = found.pop("eager")["losses"]
        for name, one in found.items():
            assert (one["losses"], one["agreement"], one["ok"]) == (expected, "agreed", True), name
        free, dear = found["launching is free"], found["nothing else costs"]
        for role in (PARAM_UNSHARD, GRAD_REDUCE_SHARD):
            captured = sum(free["captured"][role].values())
            assert free["left"][role] == captured > dear["left"][role], "no two fit under such a cap"
        assert dear["left"][GRAD_REDUCE_SHARD] == 1
