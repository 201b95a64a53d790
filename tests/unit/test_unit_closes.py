"""An exception in a captured forward leaves nothing behind: outside it, reading gives the shard again."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import DTensor

import fsdp_hooks
from tests.unit.sharded import sharded

pytestmark = pytest.mark.usefixtures("fake_world")


class Bad(ValueError):
    """A batch that the model refuses."""


class Block(nn.Module):
    """Refuses the batch between two graphs, or in one that is traced whole."""

    def __init__(self, breaks: str) -> None:
        super().__init__()
        self.linear, self.breaks, self.bad = nn.Linear(8, 8), breaks, False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.linear(x)
        if self.breaks == "graph_break":
            torch._dynamo.graph_break()
        if self.breaks == "item" and x.sum().item() > float("inf"):
            return x
        if self.bad:
            raise Bad
        return x


class Model(nn.Module):
    """Two blocks and a head; ``careful`` catches the refusal of ``forward``."""

    def __init__(self, breaks: str) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block(breaks), Block(breaks)])
        self.head = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x)

    def careful(self, x: torch.Tensor) -> torch.Tensor:
        try:
            return self(x)
        except Bad:
            return self.head(x)


def installed(breaks: str) -> Model:
    model, mesh = Model(breaks), init_device_mesh("cpu", (4,))
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    register_fsdp_forward_method(model, "careful")
    return fsdp_hooks.install(model)


def plain(breaks: str) -> Model:
    return fsdp_hooks.data_parallel(Model(breaks), init_device_mesh("cpu", (4,)))


def is_closed(model: Model) -> bool:
    parts = *(block.linear for block in model.blocks), model.head
    return all(isinstance(part.weight, DTensor) for part in parts)


def test_an_exception_closes_the_unit() -> None:
    model = fsdp_hooks.install(sharded())
    with pytest.raises(RuntimeError):
        model(torch.ones(2, 5))  # eight features are needed
    assert isinstance(model.head.weight, DTensor)
    assert isinstance(model.blocks[0][0].weight, DTensor)
    assert model(torch.ones(2, 8)).shape == (2, 8)


@pytest.mark.parametrize("make", [installed, plain])
@pytest.mark.parametrize("breaks", ["graph_break", "item"])
def test_a_refused_batch_does_not_leave_old_parameters(breaks: str, make: Callable[[str], Model]) -> None:
    """Compiled: the step after the refused one reads the parameters as they are then."""
    torch._dynamo.reset()
    model = make(breaks)
    compiled = torch.compile(model, backend="eager")
    x = torch.ones(2, 8)
    before = compiled(x)
    model.blocks[0].bad = True
    with pytest.raises(Bad):
        compiled(x)
    model.blocks[0].bad = False
    assert is_closed(model)
    with torch.no_grad():
        for param in model.parameters():
            param.zero_()
    after = compiled(x)
    assert before.abs().sum() > 0
    assert torch.equal(after, torch.zeros(2, 8))
    assert is_closed(model)


@pytest.mark.parametrize("compiles", [False, True])
def test_a_call_around_the_one_that_failed_keeps_its_unit_open(compiles: bool) -> None:
    torch._dynamo.reset()
    model = installed("no break")
    careful: Any = model.careful
    if compiles:
        careful = torch.compile(model.careful, backend="eager")
    model.blocks[0].bad = True
    assert careful(torch.ones(2, 8)).shape == (2, 8)
    assert is_closed(model)
    model.blocks[0].bad = False
    assert careful(torch.ones(2, 8)).shape == (2, 8)
    assert is_closed(model)


def test_a_whole_graph_is_captured_after_a_model_that_broke() -> None:
    torch._dynamo.reset()
    torch.compile(installed("graph_break"), backend="eager")(torch.ones(2, 8))
    whole = torch.compile(installed("no break"), backend="eager", fullgraph=True)
    assert whole(torch.ones(2, 8)).shape == (2, 8)
