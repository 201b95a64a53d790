"""How are buckets packed and unpacked with torch's own operators? What the kernels are compared with."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F

from .layout import Layout


def pack(members: Sequence[torch.Tensor], layout: Layout, dtype: torch.dtype) -> torch.Tensor:
    """The flat buffer, see `ops.pack`."""
    rows, parts = layout.rows, []
    for member, width, outer in zip(members, layout.widths, layout.outers, strict=True):
        inner, span = width // outer, member.numel() // outer
        runs = _as_bytes(member.to(dtype).resolve_conj().resolve_neg()).reshape(outer, -1 if span else 0)
        size = _bytes_of(dtype)
        runs = F.pad(runs, (0, (rows * inner - span) * size))
        parts.append(runs.view(outer, rows, inner * size).transpose(0, 1).reshape(rows, width * size))
    return torch.cat(parts, 1).view(dtype).flatten() if layout.total else members[0].new_empty(0, dtype=dtype)


def unpack(buffer: torch.Tensor, layout: Layout, dtype: torch.dtype) -> list[torch.Tensor]:
    """The members, see `ops.unpack`."""
    rows, results = layout.rows, []
    pieces = buffer.reshape(rows, layout.total).split_with_sizes(list(layout.widths), 1)
    for piece, width, outer, length in zip(pieces, layout.widths, layout.outers, layout.lengths, strict=True):
        inner, span = width // outer, length // outer
        runs = piece.reshape(rows, outer, inner).transpose(0, 1).reshape(outer, rows * inner)[:, :span]
        results.append(runs.to(dtype, copy=True, memory_format=torch.contiguous_format).reshape(length))
    return results


def _bytes_of(dtype: torch.dtype) -> int:
    """How many elements `_as_bytes` makes of one."""
    return dtype.itemsize if _goes_as_bytes(dtype) else 1


def _as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """A contiguous tensor, as bytes where torch cannot pad its element type."""
    tensor = tensor.contiguous().flatten()
    return tensor.view(torch.uint8) if _goes_as_bytes(tensor.dtype) else tensor


def _goes_as_bytes(dtype: torch.dtype) -> bool:
    return dtype.is_floating_point and dtype.itemsize == 1
