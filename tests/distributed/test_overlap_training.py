"""Overlap trains as eager FSDP2 does, bit for bit, where units are taken apart and the ends are cut.

Real units are large; here the sizes below which nothing is cut are set to nothing. Shards are uneven on purpose: one
rank pads what the other does not, and both have to cut and order alike.
"""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import collective_identity as ci
import fsdp_hooks
from inductor_passes.bucketing import apart
from tests.distributed.launch import launch

pytestmark = pytest.mark.distributed

WIDTH, HIDDEN, WORDS, STEPS = 15, 45, 37, 3
MESHES = {"fsdp": (2,), "hsdp": (2, 1)}
WAYS: dict[str, dict[str, Any]] = {
    "bucketed": {},
    "packed": {"overlap": 1, "kernels": "triton"},
    "coalesced": {"overlap": 2, "coalesced": ("all_gather", "reduce_scatter")},
}


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.RMSNorm(WIDTH), nn.RMSNorm(WIDTH)
        self.query, self.key, self.value, self.out = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))
        self.up, self.down = nn.Linear(WIDTH, HIDDEN), nn.Linear(HIDDEN, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.first(x)
        q, k, v = (layer(y).unsqueeze(1) for layer in (self.query, self.key, self.value))
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).squeeze(1))
        return x + self.down(F.silu(self.up(self.second(x))))


class Words(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.norm, self.head = nn.RMSNorm(WIDTH), nn.Linear(WIDTH, WORDS, bias=False)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        x = self.embed(words)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def trained(rank: int, mesh: tuple[int, ...], options: dict[str, Any] | None) -> tuple[list[Any], dict[str, int]]:
    """Losses and parameters of a few steps, eager without options; and the collectives of a step."""
    torch.manual_seed(0)
    torch._dynamo.reset()
    model = Words()
    names = ("replicate", "shard")[-len(mesh) :]
    given = {"mesh": init_device_mesh("cpu", mesh, mesh_dim_names=names), "mp_policy": MixedPrecisionPolicy()}
    for block in model.blocks:
        fully_shard(block, **given)
    fully_shard(model, **given)
    call, left = model, {}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    data = torch.Generator().manual_seed(rank)
    found: list[Any] = []
    with ci.enable() as handle:
        if options is not None:
            fsdp_hooks.install(model)
            call = torch.compile(
                model, backend="collective_identity", fullgraph=True, options={"inner": "aot_eager", **options}
            )
        for _ in range(STEPS):
            words = torch.randint(0, WORDS, (2, 9), generator=data)
            loss = F.cross_entropy(call(words).flatten(0, 1), words.roll(-1, 1).flatten())
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            found.append(loss.item())
        if options is not None:
            report = handle.report().to_dict()
            assert report["ok"], report["failures"]
            left = report["collectives"]["after_bucketing"]
    return [*found, *(p.to_local().detach().tolist() for p in model.parameters())], left


def compared(rank: int, ranks: int) -> dict[str, dict[str, Any]]:
    with patch.object(apart, "SMALL", 0), patch.object(apart, "LIGHT", 4 * WIDTH + 1):
        return {mesh: _compared(rank, MESHES[mesh]) for mesh in MESHES}


def _compared(rank: int, mesh: tuple[int, ...]) -> dict[str, Any]:
    eager, _ = trained(rank, mesh, None)
    made = {way: trained(rank, mesh, options) for way, options in WAYS.items()}
    return {way: {"equal": values == eager, "left": left} for way, (values, left) in made.items()}


@pytest.fixture(scope="module")
def results() -> list[dict[str, dict[str, Any]]]:
    return launch(compared, 2, timeout=300)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("mesh", MESHES)
def test_as_eager_bit_for_bit(results: list[dict[str, dict[str, Any]]], mesh: str, way: str) -> None:
    assert [rank[mesh][way]["equal"] for rank in results] == [True, True]


def test_the_ends_are_cut_alike_on_all_ranks(results: list[dict[str, dict[str, Any]]]) -> None:
    for mesh, role in (("fsdp", "fsdp.grad_reduce_shard"), ("hsdp", "fsdp.grad_replicate_reduce")):
        bucketed, cut = ({str(rank[mesh][way]["left"]) for rank in results} for way in ("bucketed", "packed"))
        assert len(bucketed) == len(cut) == 1
        assert results[0][mesh]["bucketed"]["left"][role] == 3
        assert results[0][mesh]["packed"]["left"][role] == 5, "head apart from embedding, and an end cut"
