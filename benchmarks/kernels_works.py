"""What is packed and unpacked by ours and by torch's ways: a gather's input and output, a scatter's input."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from inductor_passes.kernels import Layout, layout_of, pack, unpack
from inductor_passes.kernels.choice import Way, way_to_pack
from inductor_passes.kernels.launch import Tuning, move

MB = 1024 * 1024
RANKS = 8


@dataclass(frozen=True)
class Bucket:
    """A bucket of `megabytes` MB in `members` tensors; element types of the members and of the buffer."""

    megabytes: float
    members: int
    member_dtype: torch.dtype
    buffer_dtype: torch.dtype

    def shapes(self, rows: int) -> list[tuple[int, int]]:
        """Matrices whose first dimension is chunked by `rows`, the last one unevenly; about the size asked for."""
        each = max(int(self.megabytes * MB) // self.buffer_dtype.itemsize // self.members, 64 * rows)
        height = max(rows, each // 256)
        return [(height, 256)] * (self.members - 1) + [(height - 1 if height > rows else height, 256)]


@dataclass(frozen=True)
class Work:
    """One thing to do, ours and torch's ways of it; each returns what it made. `nbytes` are read and written.

    `way` is what our operator calls, and `kernel` our kernel with a tuning, whether it is that or not.
    """

    ours: Callable[[], list[torch.Tensor]]
    torchs: dict[str, Callable[[], list[torch.Tensor]]]
    nbytes: int
    way: Way
    kernel: Callable[[Tuning], list[torch.Tensor]]


def gather_input(bucket: Bucket, device: str) -> Work:
    """Shards cast into the flat input of an all-gather: ``cat`` of casts, or FSDP2's ``_foreach_copy_``."""
    members = _members(bucket, bucket.shapes(1), device)
    sizes = [m.numel() for m in members]
    dtype = bucket.buffer_dtype

    def joined() -> list[torch.Tensor]:
        return [torch.cat([m.to(dtype).flatten() for m in members])]

    def foreach() -> list[torch.Tensor]:
        buffer = torch.empty(sum(sizes), dtype=dtype, device=device)
        torch._foreach_copy_(buffer.split(sizes), [m.view(-1) for m in members])
        return [buffer]

    layout = layout_of(tuple(sizes), (1,) * len(sizes), tuple(sizes), 1)
    moved = _moved(bucket, sizes)
    return _packing(members, layout, dtype, {"cat": joined, "foreach_copy": foreach}, moved)


def scatter_input(bucket: Bucket, device: str) -> Work:
    """Gradients interleaved by rank into the input of a reduce-scatter: FSDP2's ``_chunk_cat``, or ``cat``."""
    members = _members(bucket, bucket.shapes(RANKS), device)
    dtype, layout = bucket.buffer_dtype, _scattered(members)

    def chunk_cat() -> list[torch.Tensor]:
        buffer = torch.empty(RANKS, layout.total, dtype=dtype, device=device)
        torch._chunk_cat(members, 0, RANKS, out=buffer)
        return [buffer.view(-1)]

    def joined() -> list[torch.Tensor]:
        rows = []
        for m in members:
            padded = torch.nn.functional.pad(m.to(dtype), (0, 0, 0, -m.shape[0] % RANKS))
            rows.append(padded.view(RANKS, -1))
        return [torch.cat(rows, 1).view(-1)]

    moved = _moved(bucket, layout.lengths)
    return _packing(members, layout, dtype, {"chunk_cat": chunk_cat, "cat": joined}, moved)


def gather_output(bucket: Bucket, device: str) -> Work:
    """Full parameters out of a gathered buffer: FSDP2's ``split_with_sizes_copy``, or a copy for each."""
    full = _members(bucket, bucket.shapes(RANKS), device)
    layout, dtype = _scattered(full), bucket.buffer_dtype
    buffer = _pack(full, layout, dtype).clone()
    padded = [RANKS * width for width in layout.widths]

    def split_copy() -> list[torch.Tensor]:
        made = [torch.empty(n, dtype=dtype, device=device) for n in padded]
        torch.split_with_sizes_copy(
            buffer.view(RANKS, -1), list(layout.widths), 1, out=[m.view(RANKS, -1) for m in made]
        )
        return [m[:length] for m, length in zip(made, layout.lengths, strict=True)]

    def one_by_one() -> list[torch.Tensor]:
        pieces = buffer.view(RANKS, -1).split_with_sizes(list(layout.widths), 1)
        return [p.reshape(-1)[:length] for p, length in zip(pieces, layout.lengths, strict=True)]

    def ours() -> list[torch.Tensor]:
        return unpack(buffer, layout.widths, layout.outers, layout.lengths, RANKS)

    def kernel(tuning: Tuning) -> list[torch.Tensor]:
        made = [buffer.new_empty(length) for length in layout.lengths]
        move(buffer, made, layout, packing=False, tuning=tuning)
        return made

    moved = 2 * sum(layout.lengths) * dtype.itemsize
    return Work(ours, {"split_with_sizes_copy": split_copy, "copies": one_by_one}, moved, "kernel", kernel)


WORKS = {"gather_input": gather_input, "scatter_input": scatter_input, "gather_output": gather_output}


def _members(bucket: Bucket, shapes: Sequence[tuple[int, int]], device: str) -> list[torch.Tensor]:
    generator = torch.Generator(device).manual_seed(0)
    return [torch.randn(s, device=device, generator=generator).to(bucket.member_dtype) for s in shapes]


def _scattered(members: Sequence[torch.Tensor]) -> Layout:
    widths = tuple(-(-m.shape[0] // RANKS) * m.shape[1] for m in members)
    return layout_of(widths, (1,) * len(members), tuple(m.numel() for m in members), RANKS)


def _packing(
    members: Sequence[torch.Tensor], layout: Layout, dtype: torch.dtype,
    torchs: dict[str, Callable[[], list[torch.Tensor]]], moved: int,
) -> Work:  # fmt: skip
    def kernel(tuning: Tuning) -> list[torch.Tensor]:
        buffer = torch.empty(layout.rows * layout.total, dtype=dtype, device=members[0].device)
        move(buffer, members, layout, packing=True, tuning=tuning)
        return [buffer]

    way = way_to_pack(layout, {m.dtype for m in members}, dtype, kernels=True)
    return Work(lambda: [_pack(members, layout, dtype)], torchs, moved, way, kernel)


def _pack(members: Sequence[torch.Tensor], layout: Layout, dtype: torch.dtype) -> torch.Tensor:
    return pack(members, layout.widths, layout.outers, layout.rows, dtype)


def _moved(bucket: Bucket, lengths: Sequence[int]) -> int:
    return sum(lengths) * (bucket.member_dtype.itemsize + bucket.buffer_dtype.itemsize)
