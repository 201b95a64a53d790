"""What runs on each rank: captured FSDP2 models in lite mode against ``aot_eager``, bit for bit."""

from __future__ import annotations

import warnings
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

import collective_identity as ci
import fsdp_hooks
import inductor_passes  # noqa: F401  (makes the backend known)
from benchmarks.models import Dense, Shape
from tests.distributed.capture_cases import shard_blocks

CLASSES = 32


class Experts(nn.Module):
    """Four experts, two of which each token goes to."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.router = nn.Linear(width, 4, bias=False)
        self.first = nn.Parameter(torch.randn(4, width, 2 * width) * 0.05)
        self.second = nn.Parameter(torch.randn(4, 2 * width, width) * 0.05)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        tokens = x.flatten(0, 1)
        chances = self.router(tokens).softmax(-1)
        values, chosen = chances.topk(2, -1)
        share = torch.zeros_like(chances).scatter(1, chosen, values / values.sum(-1, keepdim=True))
        hidden = F.gelu(torch.einsum("td,edf->etf", tokens, self.first))
        mixed = torch.einsum("etf,efd->etd", hidden, self.second)
        return (mixed * share.t().unsqueeze(-1)).sum(0).view_as(x)


class Sparse(nn.Module):
    """MoE-like: embedding, experts around residuals, head."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(CLASSES, 16)
        self.blocks = nn.ModuleList(Experts(16) for _ in range(2))
        self.head = nn.Linear(16, CLASSES, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = x + block(x)
        return self.head(x)


def dense() -> nn.Module:
    return Dense(Shape(vocabulary=CLASSES, width=16, heads=2, layers=2))


def step(rank: int, build: Any, **how: Any) -> tuple[list[torch.Tensor], dict[str, Any]]:
    """Loss and gradient shards of two batches, and the report."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = build()
    shard_blocks(model)
    with ci.enable() as handle:
        fsdp_hooks.install(model)
        call = torch.compile(model, backend="collective_identity", fullgraph=True, **how)
        found = []
        for batch in range(2):
            data = torch.Generator().manual_seed(10 * batch + rank)
            tokens = torch.randint(0, CLASSES, (2, 8), generator=data)
            loss = F.cross_entropy(call(tokens).flatten(0, 1), tokens.roll(-1, 1).flatten())
            loss.backward()
            found.append(loss.detach())
        found += [parameter.grad.to_local().clone() for parameter in model.parameters()]
        return found, handle.report().to_dict()


def compare(rank: int, ranks: int) -> dict[str, Any]:
    """`{model: {way: {"equal": bool, "report": dict}}}`"""
    warnings.simplefilter("ignore")
    reference = {"options": {"inner": "aot_eager", "bucketing": False}}
    results: dict[str, Any] = {}
    for name, build in (("llama", dense), ("moe", Sparse)):
        expected, _ = step(rank, build, **reference)
        for way, how in (("lite", {"mode": "lite"}), ("strict", {"options": {"strict_lite": True}})):
            found, report = step(rank, build, **how)
            equal = len(found) == len(expected) and all(map(torch.equal, found, expected))
            results.setdefault(name, {})[way] = {"equal": equal, "report": report}
    return results
