"""Do profiles say of each collective why it ran, eager, run as a graph and (long) compiled by Inductor?"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as collectives
from torch.profiler import ProfilerActivity, profile

import collective_identity as ci
import inductor_passes  # noqa: F401  (makes the backend known)
from collective_identity import profiling


def both(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    group = dist.group.WORLD.group_name  # type: ignore[union-attr]
    with ci.role_scope(ci.PARAM_UNSHARD, producer="test", group=group, params=["a.w"], param_group="a"):
        full = collectives.all_gather_tensor(w, 0, group)
    with ci.role_scope("tp.reduce", producer="test", group=group, params=["x", "y"], param_group="b"):
        y = collectives.all_reduce(x * 2, "sum", group)
    return (y @ full.t()).relu()


SAID = {"fsdp.param_unshard a.w": 1, "tp.reduce b (2 parameters)": 1}


def ranges(run: Callable[[], Any], folder: Path) -> tuple[dict[str, int], bool]:
    """The ranges in a profile that name a role, and whether each encloses the collective's own event."""
    with profile(activities=[ProfilerActivity.CPU]) as profiled:
        run()
    path = folder / "trace.json"
    profiled.export_chrome_trace(str(path))
    events = [e for e in json.loads(path.read_text())["traceEvents"] if e.get("ph") == "X"]
    roles = ("fsdp.param_unshard", "tp.reduce")
    found = [e for e in events if e.get("cat") == "user_annotation" and e["name"].split()[0] in roles]
    inside = [
        any(
            "_c10d_functional::" in e["name"] and one["ts"] <= e["ts"] and e["ts"] + e["dur"] <= one["ts"] + one["dur"]
            for e in events
        )
        for one in found
    ]
    return dict(Counter(e["name"] for e in found)), all(inside)


def test_eager_and_graphs_run_as_they_are(fake_world: int, tmp_path: Path) -> None:
    x, w = torch.ones(4, 8), torch.ones(3, 8)
    assert ranges(lambda: both(x, w), tmp_path) == (SAID, True)
    compiled = torch.compile(both, backend="collective_identity", options={"inner": "aot_eager"})
    expected = compiled(x, w)
    assert ranges(lambda: compiled(x, w), tmp_path) == (SAID, True)
    assert torch.equal(compiled(x, w), expected)


def test_a_trace_under_a_profiler_holds_no_range(fake_world: int) -> None:
    from torch.fx.experimental.proxy_tensor import make_fx

    with profile(activities=[ProfilerActivity.CPU]):
        gm = make_fx(both)(torch.ones(4, 8), torch.ones(3, 8))
    assert not [node for node in gm.graph.nodes if "record_function" in str(node.target)]


def test_without_a_profiler_nothing_is_opened(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.autograd.profiler, "record_function", lambda name: pytest.fail("opened"))
    assert profiling.begin("any") is None
    profiling.end(None)


@pytest.mark.long
@pytest.mark.parametrize("lite", [False, True])
def test_inductor(fake_world: int, tmp_path: Path, lite: bool) -> None:
    x, w = torch.ones(4, 8), torch.ones(3, 8)
    torch._dynamo.reset()
    compiled = torch.compile(both, backend="collective_identity", mode="lite" if lite else None)
    compiled(x, w)
    assert ranges(lambda: compiled(x, w), tmp_path) == (SAID, True)
