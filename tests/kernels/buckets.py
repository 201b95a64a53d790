"""Buckets to pack and unpack, and what is right, element by element in Python."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from hypothesis import strategies as st

from inductor_passes.kernels import Layout, layout_of

FLOATS = (torch.float32, torch.bfloat16, torch.float16)


def memory(count: int, dtype: torch.dtype, seed: int, start: int = 0) -> torch.Tensor:
    """`count` elements that 16-bit types hold exactly, `start` elements behind an aligned address."""
    generator = torch.Generator().manual_seed(seed)
    numbers = torch.randint(-96, 97, (start + count,), generator=generator)
    if dtype is torch.bool or not (dtype.is_floating_point or dtype.is_complex):
        return numbers.to(dtype)[start:]
    return (numbers / 16).to(dtype)[start:]


def reference_pack(members: Sequence[torch.Tensor], layout: Layout, dtype: torch.dtype) -> list[object]:
    """The buffer as a list of numbers, written from the words of `Layout`."""
    values = [m.flatten().to(dtype).tolist() for m in members]
    packed = []
    for row in range(layout.rows):
        for value, width, outer in zip(values, layout.widths, layout.outers, strict=True):
            span, inner = len(value) // outer, width // outer
            for run in range(outer):
                for place in range(row * inner, (row + 1) * inner):
                    packed.append(value[run * span + place] if place < span else 0)
    return packed


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.dtype is other.dtype and torch.equal(one.view(torch.uint8), other.view(torch.uint8))


@st.composite
def layouts(draw: st.DrawFn) -> Layout:
    """One to four members on one to four rows: equal and unequal shards, empty ones, several runs."""
    rows = draw(st.sampled_from((1, 2, 3, 4)))
    widths, outers, lengths = [], [], []
    for _ in range(draw(st.integers(1, 4))):
        outer = draw(st.sampled_from((1, 1, 1, 3)))
        span = draw(st.sampled_from((0, 1, 5, 8, 16, 24, 40, 53)))
        spare = draw(st.sampled_from((0, 0, 0, 2)))
        widths.append(outer * (-(-span // rows) + spare))
        outers.append(outer)
        lengths.append(outer * span)
    return layout_of(tuple(widths), tuple(outers), tuple(lengths), rows)
