"""The models that are measured: dense, llama-like."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True, slots=True)
class Shape:
    """Sizes of a dense model."""

    vocabulary: int
    width: int
    heads: int
    layers: int


SHAPES = {
    "tiny": Shape(vocabulary=300, width=64, heads=4, layers=2),
    "1b": Shape(vocabulary=32000, width=2048, heads=16, layers=12),
}


class Attention(nn.Module):
    """Causal multi-head attention."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.heads = shape.heads
        self.query, self.key, self.value, self.out = (
            nn.Linear(shape.width, shape.width, bias=False) for _ in range(4)
        )

    def forward(self, x: Tensor) -> Tensor:
        """``[batch, window, width]`` to the same."""
        query, key, value = (
            part(x).unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in (self.query, self.key, self.value)
        )
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        return self.out(mixed.transpose(1, 2).flatten(2))


class Block(nn.Module):
    """Attention and SwiGLU, each after a norm and around a residual."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.first_norm, self.second_norm = nn.RMSNorm(shape.width), nn.RMSNorm(shape.width)
        self.attention = Attention(shape)
        self.gate, self.up = (nn.Linear(shape.width, 4 * shape.width, bias=False) for _ in range(2))
        self.down = nn.Linear(4 * shape.width, shape.width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """``[batch, window, width]`` to the same."""
        x = x + self.attention(self.first_norm(x))
        y = self.second_norm(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


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
