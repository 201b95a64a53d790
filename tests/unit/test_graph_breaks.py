"""Graph breaks in user code: every piece is captured, and what ran outside all graphs is named by its unit."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import collective_identity as ci
import fsdp_hooks
import inductor_passes  # noqa: F401  (makes the backend known)
from collective_identity import GRAD_REDUCE_SHARD, PARAM_UNSHARD

pytestmark = pytest.mark.usefixtures("fake_world")


class Block(nn.Module):
    def __init__(self, breaks: str) -> None:
        super().__init__()
        self.up, self.down, self.breaks = nn.Linear(8, 8), nn.Linear(8, 8), breaks

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.up(x)
        if self.breaks == "inside a module":
            torch._dynamo.graph_break()
        return self.down(x.relu())


class Breaking(nn.Module):
    """Two blocks and a head, and a way to break the graph."""

    def __init__(self, breaks: str) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block(breaks), Block("")])
        self.head = nn.Linear(8, 8, bias=False)
        self.breaks = breaks

    @torch.compiler.disable(recursive=False)
    def helper(self, x: torch.Tensor) -> torch.Tensor:
        return x + 1

    @torch.compiler.disable
    def second(self, x: torch.Tensor) -> torch.Tensor:
        return self.blocks[1](x)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.blocks[0](x)
        if self.breaks == "between modules":
            x = self.helper(x)
        x = self.second(x) if self.breaks == "around a module" else self.blocks[1](x)
        return self.head(x)


def report_of(breaks: str) -> dict[str, Any]:
    torch._dynamo.reset()
    model = Breaking(breaks)
    mesh = init_device_mesh("cpu", (4,))
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    with ci.enable():
        fsdp_hooks.install(model)
        call = torch.compile(model, backend="collective_identity", options={"inner": "aot_eager"})
        call(torch.ones(2, 8)).sum().backward()
        assert all(parameter.grad is not None for parameter in model.parameters())
        return ci.report().to_dict()


@pytest.mark.parametrize("breaks", ["between modules", "inside a module"])
def test_every_piece_is_captured(breaks: str) -> None:
    report = report_of(breaks)
    assert len([graph for graph in report["graphs"] if graph["phase"] == "forward"]) > 1
    assert report["failures"] == [] and report["counts"]["not_captured"] == 0
    captured = report["collectives"]["captured"]
    assert captured[PARAM_UNSHARD]["forward"] == captured[GRAD_REDUCE_SHARD]["backward"] == 9


def test_what_ran_outside_every_graph_is_named() -> None:
    """User code keeps the compiler out of the second block: its eager collectives are missed, the others are not."""
    report = report_of("around a module")
    captured = report["collectives"]["captured"]
    assert captured[PARAM_UNSHARD]["forward"] == captured[GRAD_REDUCE_SHARD]["backward"] == 5
    assert report["counts"]["not_captured"] == 8 and report["counts"]["inferred"] == 0
    assert len(report["failures"]) == 2
    for role, text in zip((GRAD_REDUCE_SHARD, PARAM_UNSHARD), report["failures"], strict=True):
        assert f"{role}, " in text and "expected 9 explicit, found 5 captured" in text
        assert "by parameter group: blocks.1: 4 expected, 0 captured;" in text and "blocks.0" not in text
