"""Packing and unpacking buckets: our kernels against torch's operators and the device's copy bandwidth, in one run.

``python -m benchmarks kernels [--json] [--sizes MB ...] [--no-launches]``. On CUDA each row is one bucket: milliseconds
of ours and of each of torch's ways (medians over repetitions of many calls that wait behind a sleeping stream, so that
no host time is in them), the share of the copy bandwidth that was measured for as many bytes, and microseconds that
the host spends on a call. Values are compared bit for bit. Then kernels per bucket of a model of many small tensors,
compiled with ours and with torch's own bucketing. The exit status is 1 where ours is slower than torch's fastest by
more than the noise, where pack and unpack of 64 MB or more reach less than 80 % of the copy bandwidth, or where torch's
bucketing needs less than three times our kernels.

On a CPU: small buckets, values and counts only.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from inductor_passes.kernels import Layout, available, layout_of, pack, unpack

from . import kernels_launches
from .measure import parser, show

MB = 1024 * 1024
RANKS = 8
SHARE = 0.8
NOISE = 1.02
FEWER = 3
LARGE = 64


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
    """One thing to do, ours and torch's ways of it; each returns what it made. `nbytes` are read and written."""

    ours: Callable[[], list[torch.Tensor]]
    torchs: dict[str, Callable[[], list[torch.Tensor]]]
    nbytes: int


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
    return Work(lambda: [_pack(members, layout, dtype)], {"cat": joined, "foreach_copy": foreach}, moved)


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
    return Work(lambda: [_pack(members, layout, dtype)], {"chunk_cat": chunk_cat, "cat": joined}, moved)


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

    moved = 2 * sum(layout.lengths) * dtype.itemsize
    return Work(ours, {"split_with_sizes_copy": split_copy, "copies": one_by_one}, moved)


WORKS = {"gather_input": gather_input, "scatter_input": scatter_input, "gather_output": gather_output}


def _members(bucket: Bucket, shapes: Sequence[tuple[int, int]], device: str) -> list[torch.Tensor]:
    generator = torch.Generator(device).manual_seed(0)
    return [torch.randn(s, device=device, generator=generator).to(bucket.member_dtype) for s in shapes]


def _scattered(members: Sequence[torch.Tensor]) -> Layout:
    widths = tuple(-(-m.shape[0] // RANKS) * m.shape[1] for m in members)
    return layout_of(widths, (1,) * len(members), tuple(m.numel() for m in members), RANKS)


def _pack(members: Sequence[torch.Tensor], layout: Layout, dtype: torch.dtype) -> torch.Tensor:
    return pack(members, layout.widths, layout.outers, layout.rows, dtype)


def _moved(bucket: Bucket, lengths: Sequence[int]) -> int:
    return sum(lengths) * (bucket.member_dtype.itemsize + bucket.buffer_dtype.itemsize)


def milliseconds(run: Callable[[], object], *, calls: int, repetitions: int) -> list[float]:
    """Device time of one call in each repetition. The stream sleeps while the host queues the calls."""
    for _ in range(3):
        run()
    torch.cuda.synchronize()
    found = []
    for _ in range(repetitions):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda._sleep(20_000_000)  # cycles: about 10 ms
        start.record()
        for _ in range(calls):
            run()
        end.record()
        torch.cuda.synchronize()
        found.append(start.elapsed_time(end) / calls)
    return found


def host_microseconds(run: Callable[[], object], calls: int = 50) -> float:
    """What the host spends on one call, behind a stream that sleeps."""
    torch.cuda._sleep(100_000_000)
    start = time.perf_counter()
    for _ in range(calls):
        run()
    spent = time.perf_counter() - start
    torch.cuda.synchronize()
    return 1e6 * spent / calls


def same_bits(found: Sequence[torch.Tensor], expected: Sequence[torch.Tensor]) -> bool:
    """Whether two results hold the same bytes."""
    return len(found) == len(expected) and all(
        a.dtype is b.dtype and torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))
        for a, b in zip(found, expected, strict=True)
    )


def row_of(name: str, bucket: Bucket, device: str, *, calls: int, repetitions: int) -> dict[str, Any]:
    """Check one bucket's values and, on CUDA, time it."""
    work = WORKS[name](bucket, device)
    equal = all(same_bits(work.ours(), way()) for way in work.torchs.values())
    row: dict[str, Any] = {
        "what": name, "mb": bucket.megabytes, "members": bucket.members,
        "from": str(bucket.member_dtype).removeprefix("torch."),
        "to": str(bucket.buffer_dtype).removeprefix("torch."), "equal": equal,
    }  # fmt: skip
    if device == "cpu":
        return row
    source = torch.empty(max(work.nbytes // 2, 1), dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    times = {"ours": work.ours, **work.torchs, "copy": lambda: target.copy_(source)}
    measured = {key: milliseconds(run, calls=calls, repetitions=repetitions) for key, run in times.items()}
    medians = {key: statistics.median(found) for key, found in measured.items()}
    fastest = min(medians[key] for key in work.torchs)
    ours = measured["ours"]
    return row | {
        **{f"{key}_ms": value for key, value in medians.items()},
        "spread": (max(ours) - min(ours)) / medians["ours"],
        "copy_gb_per_s": work.nbytes / medians["copy"] / 1e6,
        "share_of_copy": medians["copy"] / medians["ours"],
        "host_us": host_microseconds(work.ours),
        "torch_host_us": min(host_microseconds(way) for way in work.torchs.values()),
        "ratio": fastest / medians["ours"],
    }


def failures_of(rows: Sequence[dict[str, Any]]) -> list[str]:
    """What is not as it should be, in words. Rows without times are only held to their values."""
    found = [f"{_name(row)}: other values than torch's" for row in rows if not row["equal"]]
    for row in (row for row in rows if "ratio" in row):
        if row["ratio"] * NOISE < 1:
            found.append(f"{_name(row)}: {row['ratio']:.2f} of the speed of torch's fastest way")
    for pair in zip(*([r for r in rows if r["what"] == what and "ratio" in r] for what in
                      ("gather_input", "gather_output")), strict=True):
        share = sum(row["copy_ms"] for row in pair) / sum(row["ours_ms"] for row in pair)
        if pair[0]["mb"] >= LARGE and share < SHARE:
            found.append(f"pack and unpack, {_name(pair[0])}: {share:.2f} of the copy bandwidth")
    return found


def _name(row: dict[str, Any]) -> str:
    return f"{row['what']} of {row['mb']} MB in {row['members']}, {row['from']} to {row['to']}"


def main() -> int:
    """Run the benchmark."""
    options = parser("packing and unpacking buckets")
    options.add_argument("--sizes", type=float, nargs="+", help="MB of the buckets (1 16 64 256; CPU: 0.01)")
    options.add_argument("--calls", type=int, default=10, help="calls in a repetition")
    options.add_argument("--repetitions", type=int, default=9)
    options.add_argument("--tensors", type=int, default=200, help="of the model of many small ones (default 200)")
    options.add_argument("--no-launches", action="store_true", help="leave out kernels per bucket")
    given = options.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    head = {"benchmark": "kernels", "torch": torch.__version__, "device": device}
    if device == "cuda":
        head |= {"gpu": torch.cuda.get_device_name(), "kernels": available(torch.device(device, 0))}
    show(head if device == "cuda" else {**head, "timed": "nothing: a CPU runs torch's operators"}, as_json=given.json)
    rows = []
    half, single = torch.bfloat16, torch.float32
    for megabytes in given.sizes or ([1, 16, 64, 256] if device == "cuda" else [0.01]):
        for members in (8, 128):
            for before, after in ((single, half), (half, half)):
                for name in WORKS:
                    kinds = (after, before) if name == "scatter_input" else (before, after)
                    rows.append(row_of(
                        name, Bucket(megabytes, members, *kinds), device, calls=given.calls,
                        repetitions=given.repetitions,
                    ))  # fmt: skip
                    show(rows[-1], as_json=given.json)
    failures = failures_of(rows)
    if not given.no_launches:
        counted = kernels_launches.count(given.tensors, device)
        show(counted, as_json=given.json)
        if counted["ratio"] < FEWER:
            failures.append(f"torch's bucketing needs {counted['ratio']:.1f} times our kernels, expected {FEWER}")
    if device == "cuda" and not head["kernels"]:
        failures.append("the kernels do not run on this GPU or without triton: torch's operators were measured twice")
    last: dict[str, Any] = {"what": "verdict", "failures": failures}
    if ratios := [row["ratio"] for row in rows if "ratio" in row]:
        last["ratio"] = statistics.median(ratios)
    show(last, as_json=given.json)
    return 1 if failures else 0
