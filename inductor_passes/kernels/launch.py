"""How do a bucket's addresses get to its kernel? Tables, and the launches.

A kernel finds its members through two tables on the device: where they lie in the buffer, which never changes, and at
which addresses they are, which may change with each call. Neither is copied from the host's memory: what is new is
written by a small kernel whose arguments are the words, as torch's own foreach kernels get theirs. So nothing waits for
the host, nothing has to be kept alive for a copy under way, and a CUDA graph records what it needs.

A kernel that `compile_ahead` was told of is compiled by another thread, and waited for here.

On a device's default stream tables are kept: parameters stay where they are, and gradients come back to the same few
places, so that a bucket is one launch. On any other stream (CUDA graphs are recorded on one, and warmed up on one
whose memory has to be given back) every call writes its own.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from types import MappingProxyType, ModuleType
from typing import Any, Final

import torch

from .ahead import Ahead, Variant
from .layout import Layout

_SPARE: Final = 2**20
"""More elements than a tile has: places behind the end of a member are 32-bit numbers too."""

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


def can_move(dtypes: Iterable[torch.dtype], buffer: torch.dtype, layout: Layout) -> bool:
    """Whether the kernels move members of these types into or out of a buffer of that type.

    float32, bfloat16 and float16 turn into each other; any other type of up to 8 bytes only stays what it is.
    """
    return (
        buffer.itemsize in _INTEGERS
        and all(dtype is buffer or (dtype in _FLOATS and buffer in _FLOATS) for dtype in dtypes)
        and layout.widest < 2**31 - _SPARE
    )


@dataclass(frozen=True, slots=True)
class Tuning:
    """How a kernel shares the work out. The values do not depend on it.

    Attributes:
        tile_bytes: bytes of the buffer that one program handles, a power of two.
        warps: 32 threads each, of a program.
        thread_bytes: bytes of its wider side that a thread loads before it stores any, a power of two from 16 on.
    """

    tile_bytes: int = 16384
    warps: int = 8
    thread_bytes: int = 64


TUNING: Final = Tuning()
"""What was fastest on an H200 or as good, whatever the bucket: docs/kernels.md."""


@dataclass(frozen=True, slots=True, eq=False)
class Work:
    """All of a launch but its addresses: the words of the layout, the grid, a tile's elements as a power of two, the
    element type that the kernel takes the buffer for, and the kernel's constants by name."""

    words: tuple[int, ...]
    grid: tuple[int, ...]
    shift: int
    seen: torch.dtype
    options: Mapping[str, int | bool]


@functools.lru_cache(maxsize=1024)
def work_of(
    layout: Layout, buffer: torch.dtype, types: frozenset[torch.dtype], packing: bool, looks: tuple[int, ...],
    tuning: Tuning,
) -> Work:  # fmt: skip
    """The launch for a layout, a buffer's type and its members' types, a direction, and what there is to choose from:
    `triton_kernels.LOOKS`, and the tuning."""
    sizes = [buffer.itemsize, *(dtype.itemsize for dtype in types)]
    tile = tuning.tile_bytes // buffer.itemsize
    vector, threads = 16 // min(sizes), 32 * tuning.warps
    words, tiles = layout.table(tile, vector)
    seen = buffer if buffer in _FLOATS else _INTEGERS[buffer.itemsize]
    return Work(words, (tiles,), tile.bit_length() - 1, seen, MappingProxyType({
        "KINDS": sum(1 << _kind(dtype, buffer) for dtype in types),
        "LOOK": next((look for look in looks if look >= len(layout.widths)), looks[-1]),
        "CHUNK": min(tile, max(vector, tuning.thread_bytes // max(sizes)) * threads), "FEW": min(tile, 8 * threads),
        "VECTOR": vector, "PACKING": packing, "num_warps": tuning.warps,
    }))  # fmt: skip


def _kind(dtype: torch.dtype, buffer: torch.dtype) -> int:
    return 0 if dtype is buffer else _FLOATS[dtype]


def move(
    buffer: torch.Tensor,
    members: Sequence[torch.Tensor],
    layout: Layout,
    *,
    packing: bool,
    kernels: ModuleType | None = None,
    keep: bool | None = None,
    tuning: Tuning = TUNING,
) -> None:
    """Pack ``members`` into ``buffer``, or unpack them out of it.

    Args:
        buffer: contiguous, ``layout.rows * layout.total`` elements.
        members: contiguous, of the lengths that the layout says.
        layout: where everything lies.
        packing: the direction.
        kernels: the module with the kernels; None: `triton_kernels`.
        keep: whether tables are kept for later calls; None: on the default stream.
        tuning: how the work is shared out.
    """
    device, dtype = buffer.device, buffer.dtype
    types = frozenset([m.dtype for m in members])
    if kernels is None:
        kernels = _kernels()
    work = work_of(layout, dtype, types, packing, kernels.LOOKS, tuning)
    if not work.grid[0]:
        return
    if len(types) == 1:
        kind = _kind(next(iter(types)), dtype)
        words = tuple([address << 2 | kind for address in map(torch.Tensor.data_ptr, members)])
    else:
        words = tuple([m.data_ptr() << 2 | _kind(m.dtype, dtype) for m in members])
    plain = buffer if dtype is work.seen else buffer.view(work.seen)
    if keep is None:
        keep = device.type != "cuda" or torch.cuda.current_stream(device) == _default_stream(device)
    _compiled_ahead(work, device, kernels)
    with _on(device):
        where = (_layout_table if keep else _layout_table.__wrapped__)(work, device, kernels)
        addresses = (_table if keep else _table.__wrapped__)(words, device, kernels)
        kernels.move_members[work.grid](
            plain, addresses, where, layout.total, len(members), work.shift, **work.options
        )


@dataclass(frozen=True, slots=True)
class Move:
    """What decides about a call of `move`, but for its addresses: known before there are any."""

    layout: Layout
    buffer: torch.dtype
    types: frozenset[torch.dtype]
    packing: bool
    device: torch.device


def compile_ahead(moves: Sequence[Move], *, kernels: ModuleType | None = None) -> None:
    """Start to compile what these calls of `move` will launch, and return at once; see `ahead`."""
    if not moves:
        return
    if kernels is None:
        kernels = _kernels()
    kernels.get_ready()
    variants: dict[Variant, None] = {}
    for one in moves:
        work = work_of(one.layout, one.buffer, one.types, one.packing, kernels.LOOKS, TUNING)
        if work.grid[0]:
            variants.update(dict.fromkeys(_variants(work, one.device, kernels)))
    _ahead(kernels).start(variants)


def _variants(work: Work, device: torch.device, kernels: ModuleType) -> tuple[Variant, Variant]:
    """What a launch needs compiled: its kernel, and the one that writes tables. Of numbers any will do, they make none;
    buffers and tables are what torch allocates, aligned."""
    words = Variant("write_words", (torch.int64, *(0,) * (2 + kernels.WORDS)), (("num_warps", 1),), device)
    arguments = (work.seen, torch.int64, torch.int64, 0, 0, 0)
    return words, Variant("move_members", arguments, tuple(work.options.items()), device)


@functools.lru_cache(maxsize=1024)
def _compiled_ahead(work: Work, device: torch.device, kernels: ModuleType) -> None:
    """Wait for what is being compiled for this launch. Once: what was not under way then, the launch compiles."""
    for variant in _variants(work, device, kernels):
        _ahead(kernels).wait(variant)


@functools.cache
def _ahead(kernels: ModuleType) -> Ahead:
    def compile_one(variant: Variant) -> None:
        with _on(variant.device):
            kernels.compile_only(getattr(kernels, variant.kernel), *variant.arguments, **dict(variant.options))

    return Ahead(compile_one)


def _on(device: torch.device) -> AbstractContextManager[Any]:
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


@functools.cache
def _kernels() -> ModuleType:
    return import_module(f"{__package__}.triton_kernels")


@functools.cache
def _default_stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.default_stream(device)


@functools.lru_cache(maxsize=1024)
def _layout_table(work: Work, device: torch.device, kernels: ModuleType) -> torch.Tensor:
    return _table.__wrapped__(work.words, device, kernels)


@functools.lru_cache(maxsize=4096)
def _table(words: tuple[int, ...], device: torch.device, kernels: ModuleType) -> torch.Tensor:
    """The words on the device, int64, written on the current stream."""
    table = torch.empty(len(words), dtype=torch.int64, device=device)
    for start in range(0, len(words), kernels.WORDS):
        some = words[start:start + kernels.WORDS]
        kernels.write_words[(1,)](table, start, len(some), *some, *(0,) * (kernels.WORDS - len(some)), num_warps=1)
    return table
