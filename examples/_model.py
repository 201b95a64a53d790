"""The example's model: a small decoder-only transformer, and how tensor parallelism splits it.

RMSNorm before each part, causal attention with rotary positions, SwiGLU, and an output head that is its own
matrix unless ``tied``. The default sizes are odd on purpose: 257 tokens and 161 hidden units give uneven shards.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True, slots=True)
class Shape:
    """Sizes of the model. ``width`` must be a multiple of ``2 * heads`` (rotary positions turn pairs)."""

    vocabulary: int
    width: int
    hidden: int
    heads: int
    layers: int
    window: int
    tied: bool = False


def rotary_table(window: int, size: int, base: float = 10000.0) -> tuple[Tensor, Tensor]:
    """Return cosine and sine of the rotary angles, float32 of shape ``[window, size // 2]``."""
    rates = base ** (-torch.arange(0, size, 2, dtype=torch.float32) / size)
    angles = torch.outer(torch.arange(window, dtype=torch.float32), rates)
    return angles.cos(), angles.sin()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn pairs of channels of ``x``, shape ``[batch, heads, window, size]``, by their positions' angles."""
    left, right = x.float().chunk(2, dim=-1)
    return torch.cat([left * cos - right * sin, right * cos + left * sin], dim=-1).to(x.dtype)


class Attention(nn.Module):
    """Causal multi-head attention. Under tensor parallelism each rank holds some of the heads."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.size = shape.width // shape.heads
        self.query = nn.Linear(shape.width, shape.width, bias=False)
        self.key = nn.Linear(shape.width, shape.width, bias=False)
        self.value = nn.Linear(shape.width, shape.width, bias=False)
        self.out = nn.Linear(shape.width, shape.width, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        def heads(y: Tensor) -> Tensor:
            return y.unflatten(-1, (-1, self.size)).transpose(1, 2)

        query, key = (rotate(heads(y), cos, sin) for y in (self.query(x), self.key(x)))
        mixed = F.scaled_dot_product_attention(query, key, heads(self.value(x)), is_causal=True)
        return self.out(mixed.transpose(1, 2).flatten(2))


class FeedForward(nn.Module):
    """SwiGLU."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.gate = nn.Linear(shape.width, shape.hidden, bias=False)
        self.up = nn.Linear(shape.width, shape.hidden, bias=False)
        self.down = nn.Linear(shape.hidden, shape.width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Block(nn.Module):
    """One layer: attention and feed-forward, each after a norm and around a residual."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(shape.width, eps=1e-6)
        self.attention = Attention(shape)
        self.forward_norm = nn.RMSNorm(shape.width, eps=1e-6)
        self.feed_forward = FeedForward(shape)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x), cos, sin)
        return x + self.feed_forward(self.forward_norm(x))


class Transformer(nn.Module):
    """Tokens, int64 ``[batch, window]``, to logits ``[batch, window, vocabulary]``."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.embed = nn.Embedding(shape.vocabulary, shape.width)
        self.layers = nn.ModuleList(Block(shape) for _ in range(shape.layers))
        self.norm = nn.RMSNorm(shape.width, eps=1e-6)
        self.head = nn.Linear(shape.width, shape.vocabulary, bias=False)
        cos, sin = rotary_table(shape.window, shape.width // shape.heads)
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)
        for name, weight in self.named_parameters():
            if not name.endswith("norm.weight"):
                nn.init.normal_(weight, std=0.02)
        if shape.tied:
            self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x, self.cos, self.sin)
        return self.head(self.norm(x))
