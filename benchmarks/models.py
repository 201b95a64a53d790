"""The models that are measured: llama-like, dense or with a mixture of experts in every block."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True, slots=True)
class Mixture:
    """A mixture of experts.

    Attributes:
        experts: how many there are in a block.
        chosen: how many each token goes to.
        hidden: inner width of an expert.
        group: tokens that compete for places with each other; it divides the tokens of a batch.
        factor: places of an expert, over what an even split would give it. A token without a place is passed by.
    """

    experts: int
    chosen: int
    hidden: int
    group: int
    factor: float = 1.25

    @property
    def places(self) -> int:
        """Places of one expert for the tokens of one group."""
        return int(self.factor * self.chosen * self.group / self.experts)


@dataclass(frozen=True, slots=True)
class Shape:
    """Sizes of a model; dense where `mixture` is None."""

    vocabulary: int
    width: int
    heads: int
    layers: int
    mixture: Mixture | None = None


SHAPES: Mapping[str, Shape] = MappingProxyType(
    {
        "tiny": Shape(vocabulary=300, width=64, heads=4, layers=2),
        "1b": Shape(vocabulary=32000, width=2048, heads=16, layers=12),
        "moe": Shape(vocabulary=300, width=64, heads=4, layers=2, mixture=Mixture(4, 2, hidden=64, group=16)),
        "moe_1b": Shape(
            vocabulary=32000, width=2048, heads=16, layers=8, mixture=Mixture(8, 2, hidden=2048, group=512)
        ),
    }
)


class Attention(nn.Module):
    """Causal multi-head attention; of some of the heads, where its projections are split by columns."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.head_width = shape.width // shape.heads
        self.query, self.key, self.value, self.out = (
            nn.Linear(shape.width, shape.width, bias=False) for _ in range(4)
        )

    def forward(self, x: Tensor) -> Tensor:
        """``[batch, window, width]`` to the same."""
        query, key, value = (
            part(x).unflatten(-1, (-1, self.head_width)).transpose(1, 2) for part in (self.query, self.key, self.value)
        )
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        return self.out(mixed.transpose(1, 2).flatten(2))


class FeedForward(nn.Module):
    """SwiGLU."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.gate, self.up = (nn.Linear(shape.width, 4 * shape.width, bias=False) for _ in range(2))
        self.down = nn.Linear(4 * shape.width, shape.width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """``[batch, window, width]`` to the same."""
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Experts(nn.Module):
    """Every expert's SwiGLU, as products of batches: one batch an expert."""

    def __init__(self, width: int, mixture: Mixture) -> None:
        super().__init__()
        count, hidden = mixture.experts, mixture.hidden
        self.gate, self.up = (nn.Parameter(torch.randn(count, width, hidden) * width**-0.5) for _ in range(2))
        self.down = nn.Parameter(torch.randn(count, hidden, width) * hidden**-0.5)

    def forward(self, x: Tensor) -> Tensor:
        """``[experts, tokens, width]`` to the same."""
        return torch.bmm(F.silu(torch.bmm(x, self.gate)) * torch.bmm(x, self.up), self.down)


class Routed(nn.Module):
    """Each token through the experts that its router likes best, as far as they have a place for it.

    Tokens are put into their places and taken out again by products with one-hot matrices, so that every shape is
    static and no sum depends on an order.
    """

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        assert shape.mixture is not None
        self.mixture = shape.mixture
        self.router = nn.Linear(shape.width, shape.mixture.experts, bias=False)
        self.experts = Experts(shape.width, shape.mixture)

    def forward(self, x: Tensor) -> Tensor:
        """``[batch, window, width]`` to the same."""
        tokens = x.reshape(-1, self.mixture.group, x.shape[-1])
        into, out_of = self.places(tokens)
        given = torch.einsum("gtep,gtw->egpw", into, tokens)
        done = self.experts(given.flatten(1, 2)).view_as(given)
        return torch.einsum("gtep,egpw->gtw", out_of, done).view_as(x)

    def places(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """One-hot, and weighted by the router, ``[groups, group, experts, places]``; a first choice goes before a
        second."""
        chosen, experts = self.mixture.chosen, self.mixture.experts
        likes = F.linear(tokens.float(), self.router.weight.float()).softmax(-1)
        weight, choice = likes.topk(chosen, dim=-1)
        weight = weight / weight.sum(-1, keepdim=True)
        goes = choice[..., None] == torch.arange(experts, device=tokens.device)
        ahead = goes.transpose(1, 2).flatten(1, 2).cumsum(1) - 1
        place = (ahead.unflatten(1, (chosen, -1)).transpose(1, 2) * goes).sum(-1)
        held = (place[..., None] == torch.arange(self.mixture.places, device=tokens.device)).to(tokens.dtype)
        into = torch.einsum("gtce,gtcp->gtep", goes.to(tokens.dtype), held)
        out_of = torch.einsum("gtce,gtcp->gtep", (goes * weight[..., None]).to(tokens.dtype), held)
        return into, out_of


class Block(nn.Module):
    """Attention and what is fed forward, each after a norm and around a residual."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.first_norm, self.second_norm = nn.RMSNorm(shape.width), nn.RMSNorm(shape.width)
        self.attention = Attention(shape)
        self.feed_forward = FeedForward(shape) if shape.mixture is None else Routed(shape)

    def forward(self, x: Tensor) -> Tensor:
        """``[batch, window, width]`` to the same."""
        x = x + self.attention(self.first_norm(x))
        return x + self.feed_forward(self.second_norm(x))


class Dense(nn.Module):
    """Tokens, int64 ``[batch, window]``, to logits ``[batch, window, vocabulary]``."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.embed = nn.Embedding(shape.vocabulary, shape.width)
        self.blocks = nn.ModuleList(Block(shape) for _ in range(shape.layers))
        self.norm = nn.RMSNorm(shape.width)
        self.head = nn.Linear(shape.width, shape.vocabulary, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits of every position."""
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def build(name: str, device: torch.device, seed: int = 0) -> Dense:
    """The named model with weights from ``seed``."""
    torch.manual_seed(seed)
    with device:
        return Dense(SHAPES[name])
