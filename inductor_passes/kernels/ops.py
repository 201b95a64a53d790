"""The two operators that a bucketed graph calls: ``inductor_passes::pack`` and ``inductor_passes::unpack``.

Triton kernels on CUDA, torch's own operators elsewhere, where the kernels do not know a type and where torch is faster
(`choice`), so that one graph runs everywhere. No output shares memory with an input or with another output. They have
no derivative: they enter a graph after autograd has gone over it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final

import torch

from . import choice, launch, plain
from .layout import Layout, layout_of

_TAGS: Final = (torch.Tag.pt2_compliant_tag, torch.Tag.flexible_layout)

LIBRARY: Final = torch.library.Library("inductor_passes", "DEF")
LIBRARY.define("pack(Tensor[] members, int[] widths, int[] outers, int rows, ScalarType dtype) -> Tensor", tags=_TAGS)
LIBRARY.define(
    "unpack(Tensor buffer, int[] widths, int[] outers, int[] lengths, int rows, ScalarType? dtype=None) -> Tensor[]",
    tags=_TAGS,
)


def pack(
    members: Sequence[torch.Tensor], widths: Sequence[int], outers: Sequence[int], rows: int, dtype: torch.dtype
) -> torch.Tensor:
    """Lay tensors out in one buffer, see `layout.Layout`; padding is zero.

    With one row this is ``cat`` of flat tensors, with several ``torch._chunk_cat``, each with a conversion.

    Args:
        members: one or more, of any shape, strides, alignment and real element type, on one device.
        widths: elements of each in a row of the buffer, padding included.
        outers: runs of each; 1 unless a dimension other than the first is chunked.
        rows: 1, or the number of ranks that the buffer is scattered to.
        dtype: element type of the buffer.

    Returns:
        One dimension, ``rows * sum(widths)`` elements.

    Raises:
        ValueError: a member does not fit.
    """
    return torch.ops.inductor_passes.pack.default(members, widths, outers, rows, dtype)  # type: ignore[no-any-return]


def unpack(
    buffer: torch.Tensor,
    widths: Sequence[int],
    outers: Sequence[int],
    lengths: Sequence[int],
    rows: int,
    dtype: torch.dtype | None = None,
) -> list[torch.Tensor]:
    """Take tensors out of one buffer, without their padding: the other way round than `pack`.

    Like ``torch.split_with_sizes_copy`` on a buffer of ``rows`` rows, with a conversion.

    Args:
        buffer: ``rows * sum(widths)`` elements of a real type, in any shape.
        widths: elements of each member in a row, padding included.
        outers: runs of each member; 1 unless a dimension other than the first was chunked.
        lengths: elements of each member.
        rows: 1, or the number of ranks that the buffer was gathered from.
        dtype: element type of the members; None: the buffer's.

    Returns:
        One tensor a member, of one dimension and with memory of its own.

    Raises:
        ValueError: a member does not fit, or the buffer is of another size.
    """
    return torch.ops.inductor_passes.unpack.default(  # type: ignore[no-any-return]
        buffer, widths, outers, lengths, rows, dtype
    )


def _layout(widths: Iterable[int], outers: Iterable[int], lengths: Iterable[int], rows: int) -> Layout:
    return layout_of(tuple(widths), tuple(outers), tuple(lengths), rows)


@torch.library.impl(LIBRARY, "pack", "CompositeExplicitAutograd")
def _pack(
    members: Sequence[torch.Tensor], widths: Sequence[int], outers: Sequence[int], rows: int, dtype: torch.dtype
) -> torch.Tensor:
    layout, device = _layout(widths, outers, map(torch.Tensor.numel, members), rows), members[0].device
    way = choice.way_to_pack(layout, {m.dtype for m in members}, dtype, kernels=launch.available(device))
    if way == "cat":
        return torch.cat([m.flatten() for m in members])
    if way == "plain":
        return plain.pack(members, layout, dtype)
    buffer = torch.empty(rows * layout.total, dtype=dtype, device=device)
    launch.move(buffer, _contiguous(members), layout, packing=True)
    return buffer


@torch.library.register_fake("inductor_passes::pack", lib=LIBRARY)
def _pack_fake(
    members: Sequence[torch.Tensor], widths: Sequence[int], outers: Sequence[int], rows: int, dtype: torch.dtype
) -> torch.Tensor:
    return members[0].new_empty(rows * sum(widths), dtype=dtype)


@torch.library.impl(LIBRARY, "unpack", "CompositeExplicitAutograd")
def _unpack(
    buffer: torch.Tensor,
    widths: Sequence[int],
    outers: Sequence[int],
    lengths: Sequence[int],
    rows: int,
    dtype: torch.dtype | None = None,
) -> list[torch.Tensor]:
    layout, kind = _layout(widths, outers, lengths, rows), dtype or buffer.dtype
    buffer = _whole(buffer, widths, rows)
    way = choice.way_to_unpack(layout, {kind}, buffer.dtype, kernels=launch.available(buffer.device))
    if way == "plain":
        return plain.unpack(buffer, layout, kind)
    like = buffer if kind is buffer.dtype else buffer.new_empty(0, dtype=kind)
    members = [like.new_empty(length) for length in lengths]
    launch.move(_contiguous([buffer])[0], members, layout, packing=False)
    return members


@torch.library.register_fake("inductor_passes::unpack", lib=LIBRARY)
def _unpack_fake(
    buffer: torch.Tensor,
    widths: Sequence[int],
    outers: Sequence[int],
    lengths: Sequence[int],
    rows: int,
    dtype: torch.dtype | None = None,
) -> list[torch.Tensor]:
    return [buffer.new_empty(length, dtype=dtype or buffer.dtype) for length in lengths]


def _contiguous(tensors: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
    """The tensors, those whose memory does not hold their values in order copied. To ask first costs the host least."""
    if all(map(torch.Tensor.is_contiguous, tensors)) and not any(map(torch.Tensor.is_neg, tensors)):
        if not any(map(torch.Tensor.is_conj, tensors)):
            return tensors
    return [tensor.resolve_conj().resolve_neg().contiguous() for tensor in tensors]


def _whole(buffer: torch.Tensor, widths: Sequence[int], rows: int) -> torch.Tensor:
    if buffer.numel() != rows * sum(widths):
        raise ValueError(f"expected a buffer of {rows} rows of {sum(widths)} elements, found {buffer.numel()} elements")
    return buffer
