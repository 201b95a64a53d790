"""A model and a training step in one of the ways loops are written, plain or recorded."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import fsdp_hooks
from fsdp_hooks import RecordedStep

from .replayer import Replayer

Step = Callable[..., Any]
STEPS = 9


class Net(nn.Module):
    """Two layers, dropout and a buffer that counts."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 8), nn.Linear(8, 4)
        self.register_buffer("runs", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.runs += 1
        return self.second(F.dropout(self.first(x).relu(), 0.3, self.training))


class Loop:
    """A model, its optimizer and a step in one of the ways loops are written."""

    def __init__(self, zero: str = "after", lr: Any = 0.1, micro: int = 1, decay: float = 0.01) -> None:
        torch.manual_seed(0)
        self.model = Net()
        mesh = init_device_mesh("cpu", (1,))
        fully_shard(self.model.first, mesh=mesh)
        fsdp_hooks.install(fully_shard(self.model, mesh=mesh))
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=lr, momentum=0.9, weight_decay=decay)
        self.zero, self.micro = zero, micro
        self.run: Step = self.step

    def step(self, x: torch.Tensor, y: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
        if self.zero.startswith("before"):
            self.optimizer.zero_grad(set_to_none=self.zero != "before, in place")
        total = x.new_zeros(())
        for one, other in zip(x.chunk(self.micro), y.chunk(self.micro), strict=True):
            loss = F.mse_loss(self.model(one), other) * scale
            loss.backward()
            total += loss.detach()
        self.optimizer.step()
        if self.zero.startswith("after"):
            self.optimizer.zero_grad(set_to_none=self.zero != "after, in place")
        return total

    def recorded(self, warmup: int = 2) -> Loop:
        self.run = RecordedStep(self.step, self.model, (self.optimizer,), warmup, Replayer())
        return self

    def train(
        self, between: Callable[[Loop, int], None] | None = None, rows: Callable[[int], int] | None = None
    ) -> list[torch.Tensor]:
        torch.manual_seed(2)
        data, found = torch.Generator().manual_seed(1), []
        for number in range(STEPS):
            many = rows(number) if rows else 4
            batch = torch.randn(many, 6, generator=data), torch.randn(many, 4, generator=data)
            found.append(self.run(*batch))
            if between:
                between(self, number)
        return [*found, *(p.to_local().detach() for p in self.model.parameters()), self.model.runs, torch.rand(3)]


def warmed(make: Callable[[Loop], Step]) -> Callable[[], Any]:
    """A loop's step that ran once plainly; a call records it."""
    loop, batch = Loop(), (torch.ones(4, 6), torch.ones(4, 4))
    run = RecordedStep(make(loop), loop.model, (loop.optimizer,), 1, Replayer())
    run(*batch)
    return lambda: run(*batch)


def same(a: list[torch.Tensor], b: list[torch.Tensor]) -> bool:
    return len(a) == len(b) and all(torch.equal(x, y) for x, y in zip(a, b, strict=True))
