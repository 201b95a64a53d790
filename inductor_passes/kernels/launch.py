"""How do a bucket's addresses get to its kernel? Tables, and the launches.

A kernel finds its members through two tables on the device: where they lie in the buffer, which never changes, and at
which addresses they are, which may change with each call. Neither is copied from the host's memory: what is new is
written by a small kernel whose arguments are the words, as torch's own foreach kernels get theirs. So nothing waits for
the host, nothing has to be kept alive for a copy under way, and a CUDA graph records what it needs.

On a device's default stream tables are kept: parameters stay where they are, and gradients come back to the same few
places, so that a bucket is one launch. On any other stream (CUDA graphs are recorded on one, and warmed up on one
whose memory has to be given back) every call writes its own.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from contextlib import nullcontext
from importlib import import_module
from importlib.util import find_spec
from types import ModuleType
from typing import Final

import torch

from .layout import TILE_BYTES, Layout

_FLOATS: Final = {torch.float32: 1, torch.bfloat16: 2, torch.float16: 3}
_INTEGERS: Final = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@functools.cache
def available(device: torch.device) -> bool:
    """Whether the kernels run on this device: a CUDA device that has bfloat16, and triton is installed."""
    return (
        device.type == "cuda"
        and find_spec("triton") is not None
        and torch.cuda.is_available()
        and torch.cuda.get_device_capability(device) >= (8, 0)
    )


def can_move(dtypes: Sequence[torch.dtype], buffer: torch.dtype, layout: Layout) -> bool:
    """Whether the kernels move members of these types into or out of a buffer of that type.

    float32, bfloat16 and float16 turn into each other; any other type of up to 8 bytes only stays what it is.
    """
    return (
        buffer.itemsize in _INTEGERS
        and all(dtype is buffer or (dtype in _FLOATS and buffer in _FLOATS) for dtype in dtypes)
        and max(layout.widths) < 2**31 - TILE_BYTES
    )


def move(
    buffer: torch.Tensor,
    members: Sequence[torch.Tensor],
    layout: Layout,
    *,
    packing: bool,
    kernels: ModuleType | None = None,
    keep: bool | None = None,
    tile_bytes: int = TILE_BYTES,
) -> None:
    """Pack ``members`` into ``buffer``, or unpack them out of it.

    Args:
        buffer: contiguous, ``layout.rows * layout.total`` elements.
        members: contiguous, of the lengths that the layout says.
        layout: where everything lies.
        packing: the direction.
        kernels: the module with the kernels; None: `triton_kernels`.
        keep: whether tables are kept for later calls; None: on the default stream.
        tile_bytes: bytes of the buffer that one program handles, a power of two from 16 on.
    """
    device, types = buffer.device, {m.dtype for m in members}
    plain = buffer if buffer.dtype in _FLOATS else buffer.view(_INTEGERS[buffer.dtype.itemsize])
    tile = tile_bytes // plain.dtype.itemsize
    vector = 16 // min(plain.dtype.itemsize, *(dtype.itemsize for dtype in types))
    if kernels is None:
        kernels = import_module(f"{__package__}.triton_kernels")
    if keep is None:
        keep = device.type != "cuda" or torch.cuda.current_stream(device) == torch.cuda.default_stream(device)
    words: list[int] = []
    for member in members:
        words += (member.data_ptr(), 0 if member.dtype is buffer.dtype else _FLOATS[member.dtype])
    tiles = _tiles(layout, tile, vector)[1]
    if not tiles:
        return
    with torch.cuda.device(device) if device.type == "cuda" else nullcontext():
        where = (_layout_table if keep else _layout_table.__wrapped__)(layout, tile, vector, device, kernels)
        addresses = (_table if keep else _table.__wrapped__)(tuple(words), device, kernels)
        kernels.move_members[(tiles,)](
            plain, addresses, where, layout.rows, layout.total, len(members),
            SAME=buffer.dtype in types, FLOAT32=_other(torch.float32, buffer, types),
            BFLOAT16=_other(torch.bfloat16, buffer, types), FLOAT16=_other(torch.float16, buffer, types),
            TILE=tile, VECTOR=vector, PACKING=packing, num_warps=4,
        )  # fmt: skip


def _other(dtype: torch.dtype, buffer: torch.Tensor, types: set[torch.dtype]) -> bool:
    return dtype in types and dtype is not buffer.dtype


@functools.lru_cache(maxsize=1024)
def _tiles(layout: Layout, tile: int, vector: int) -> tuple[tuple[int, ...], int]:
    return layout.table(tile, vector)


@functools.lru_cache(maxsize=1024)
def _layout_table(
    layout: Layout, tile: int, vector: int, device: torch.device, kernels: ModuleType
) -> torch.Tensor:
    return _table.__wrapped__(_tiles(layout, tile, vector)[0], device, kernels)


@functools.lru_cache(maxsize=4096)
def _table(words: tuple[int, ...], device: torch.device, kernels: ModuleType) -> torch.Tensor:
    """The words on the device, int64, written on the current stream."""
    table = torch.empty(len(words), dtype=torch.int64, device=device)
    for start in range(0, len(words), kernels.WORDS):
        some = words[start:start + kernels.WORDS]
        kernels.write_words[(1,)](table, start, len(some), *some, *(0,) * (kernels.WORDS - len(some)), num_warps=1)
    return table
