"""A captured model, compiled with overlap, trains in replays as in plain steps, bit for bit, on a schedule."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import fsdp_hooks
import inductor_passes  # noqa: F401  (makes the backend known)
from benchmarks.models import Dense, Shape
from fsdp_hooks import RecordedStep

from .replayer import Replayer

STEPS, WARMUP = 6, 2


pytestmark = pytest.mark.usefixtures("one_rank")


def train(recorded: bool) -> tuple[list[float], int]:
    """Losses, and how many steps were replays."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    model, mesh = Dense(Shape(100, 32, 4, 2)), init_device_mesh("cpu", (1,))
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    for block in model.blocks:
        fully_shard(block, mesh=mesh, mp_policy=policy)
    fsdp_hooks.install(fully_shard(model, mesh=mesh, mp_policy=policy))
    options = {"overlap": 1, "inner": "aot_eager"}
    compiled = torch.compile(model, backend="collective_identity", fullgraph=True, options=options)
    optimizer = torch.optim.AdamW(model.parameters(), lr=torch.tensor(1e-3), fused=True)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 10)

    def step(tokens: torch.Tensor) -> torch.Tensor:
        loss = F.cross_entropy(compiled(tokens).float().flatten(0, 1), tokens.roll(-1, 1).flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    run: Callable[..., Any] = step
    if recorded:
        run = RecordedStep(step, model, (optimizer,), WARMUP, Replayer())
    batches, losses = torch.Generator().manual_seed(1), []
    for _ in range(STEPS):
        losses.append(float(run(torch.randint(0, 100, (2, 16), generator=batches))))
        schedule.step()
    return losses, getattr(run, "replays", 0)


def test_replays_train_as_plain_steps() -> None:
    losses, replays = train(recorded=True)
    assert replays == STEPS - WARMUP
    assert losses == train(recorded=False)[0]
