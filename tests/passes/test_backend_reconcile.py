"""When does the backend watch torch's own passes? Where one of their switches is on, and never otherwise."""

from __future__ import annotations

from typing import Any

import pytest
import torch._inductor.config as inductor_config
from torch import fx

import collective_identity as ci
from collective_identity import GRAD_REDUCE_SHARD, PARAM_UNSHARD, compat
from inductor_passes import backend
from inductor_passes.contract import PassContext
from inductor_passes.lite_mode import LiteState
from inductor_passes.options import BackendOptions
from inductor_passes.upstream import inductor_option_exists
from inductor_passes.upstream_passes import REGIONS, all_switches, rewrites_collectives, upstream_passes
from tests.graphs import Builder
from tests.passes.upstream_graphs import SIZE, as_on_gpus, world

pytestmark = pytest.mark.usefixtures("fake_world")

ALONE = sorted(
    name for name in all_switches()
    if not any(part in name for part in ("estimat", "min_bytes", "skip_overlap", "insert_overlap", "ive_bucketing"))
)


def graph() -> fx.GraphModule:
    b = Builder()
    shards = [b.placeholder(f"p{i}", (8, 8)) for i in range(3)]
    roles = (PARAM_UNSHARD, "cp.kv_gather", PARAM_UNSHARD)
    made = [b.all_gather(p, group=world(), size=SIZE, role=r) for p, r in zip(shards, roles, strict=True)]
    scattered = b.reduce_scatter(b.placeholder("g", (8, 8)), group=world(), size=SIZE, role=GRAD_REDUCE_SHARD)
    b.output(*(one.wait for one in made), scattered.wait)
    return b.module()


def compiled(gm: fx.GraphModule, inside: Any, *, observe: bool = False) -> dict[str, Any]:
    """One graph through the backend's two stages, ``inside`` in the place of torch's passes; its part of the report."""
    with ci.enable(mode="observe" if observe else "optimize", agreement_timeout=0) as handle:
        log = handle.session.begin_graph("forward", "0/0", "test")
        options = BackendOptions(bucketing=False)
        one = backend._Graph(gm, PassContext("forward", LiteState.OFF, observe, options, log), log)
        with one.upstreams():
            one.transform(gm)
            inside(gm)
        one.finish(0.0, None)
        (graph,) = handle.report().to_dict()["graphs"]
        return graph  # type: ignore[no-any-return]


def hooks(gm: fx.GraphModule) -> int:
    return sum(map(len, (gm._create_node_hooks, gm._erase_node_hooks, gm._replace_hooks, gm._deepcopy_hooks)))


def test_no_switch_no_hook() -> None:
    seen: list[int] = []
    assert not rewrites_collectives()
    found = compiled(graph(), lambda gm: seen.append(hooks(gm)))
    assert seen == [0] and [one["name"] for one in found["passes"]] == ["normalize"]


@pytest.mark.parametrize("name", ALONE)
def test_each_switch(name: str) -> None:
    seen: list[int] = []
    gm = graph()
    regions = {REGIONS: False} if inductor_option_exists(REGIONS) else {}
    with inductor_config.patch({name: all_switches()[name], **regions}):  # type: ignore[attr-defined]
        assert rewrites_collectives()
        compiled(gm, lambda gm: seen.append(hooks(gm)))
        compiled(graph(), lambda gm: seen.append(hooks(gm)), observe=True)
    assert seen == [4, 0], "an observe session writes nothing"
    assert hooks(gm) == 0


def test_a_scheduler_that_hooks_would_break_is_left_alone(caplog: pytest.LogCaptureFixture) -> None:
    seen: list[int] = []
    switch = "aten_distributed_optimizations.enable_overlap_scheduling"
    with inductor_config.patch({switch: True}):  # type: ignore[attr-defined]
        compiled(graph(), lambda gm: seen.append(hooks(gm)))
    old = compat.torch_version() < (2, 13)
    assert seen == [0 if old else 4] and ("is not watched" in caplog.text) == old


def test_the_report_is_of_the_graph_after_torchs_passes() -> None:
    gm = graph()
    switches = {"bucket_all_gathers_fx": "all"}
    with as_on_gpus(), inductor_config.patch(switches):  # type: ignore[attr-defined]
        found = compiled(gm, upstream_passes()["bucket_all_gathers"])
    ran = found["passes"][-1]
    assert found["captured"] == {PARAM_UNSHARD: 2, "cp.kv_gather": 1, GRAD_REDUCE_SHARD: 1}
    assert (ran["name"], ran["before"], ran["after"]) == (
        "reconcile",
        {PARAM_UNSHARD: 2, "cp.kv_gather": 1, GRAD_REDUCE_SHARD: 1},
        {"": 1, GRAD_REDUCE_SHARD: 1},
    )
    lost = sorted(one["role"] for one in ran["summary"]["lost"])
    assert ran["summary"]["merged"] == 1 and lost == ["cp.kv_gather", PARAM_UNSHARD] and ran["seconds"] > 0
    assert found["after"][GRAD_REDUCE_SHARD] == 1 and PARAM_UNSHARD not in found["after"]


def test_a_compile_that_fails_leaves_no_hook() -> None:
    def fails(gm: fx.GraphModule) -> None:
        raise ZeroDivisionError

    gm = graph()
    with inductor_config.patch({"bucket_all_gathers_fx": "all"}):  # type: ignore[attr-defined]
        with pytest.raises(ZeroDivisionError):
            compiled(gm, fails)
    assert hooks(gm) == 0
