"""Packing and unpacking buckets: our kernels against torch's operators and the device's copy bandwidth, in one run.

``python -m benchmarks kernels [--json] [--sizes MB ...] [--no-launches] [--tile-kib N ...] [--warps N ...]
[--thread-bytes N ...]``. On CUDA each row is one bucket: milliseconds
of ours and of each of torch's ways (medians over repetitions of many calls that wait behind a sleeping stream, so that
no host time is in them), the share of the copy bandwidth that was measured for as many bytes, and microseconds that
the host spends on a call. Values are compared bit for bit. Then kernels per bucket of a model of many small tensors,
compiled with ours and with torch's own bucketing. The exit status is 1 where ours is slower than torch's fastest by
more than the noise, where pack and unpack of 64 MB or more reach less than 80 % of the copy bandwidth, or where torch's
bucketing needs less than three times our kernels. Where the operator calls one of torch's own (``way``), the kernel is
timed beside it, and no speed is asked for against the very same operator.

With any of the last three options the kernel is timed with each combination of them too, and the last line says for
each bucket how fast they were against a copy. They decide nothing: what is judged is what the operators do.

On a CPU: small buckets, values and counts only.
"""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch

from inductor_passes.kernels import available
from inductor_passes.kernels.launch import TUNING, Tuning

from . import kernels_launches
from .kernels_works import WORKS, Bucket
from .measure import parser, show

SHARE = 0.8
NOISE = 1.02
FEWER = 3
LARGE = 64


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


def tunings(tile_kib: Sequence[int], warps: Sequence[int], thread_bytes: Sequence[int]) -> dict[str, Tuning]:
    """The combinations by name: KiB of a tile, warps, bytes of a thread before a store."""
    return {
        f"{kib}k.{threads}w.{size}b": Tuning(kib * 1024, threads, size)
        for kib, threads, size in itertools.product(tile_kib, warps, thread_bytes)
    }


def row_of(
    name: str, bucket: Bucket, device: str, *, calls: int, repetitions: int, variants: Mapping[str, Tuning]
) -> dict[str, Any]:
    """Check one bucket's values and, on CUDA, time it."""
    work = WORKS[name](bucket, device)
    expected = work.ours()
    equal = all(same_bits(expected, way()) for way in work.torchs.values())
    kernels: dict[str, Callable[[], list[torch.Tensor]]] = {}
    if device != "cpu":
        asked = ({} if work.way == "kernel" else {"kernel": TUNING}) | dict(variants)
        kernels = {key: partial(work.kernel, tuning) for key, tuning in asked.items()}
        equal = equal and all(same_bits(expected, kernel()) for kernel in kernels.values())
    row: dict[str, Any] = {
        "what": name, "mb": bucket.megabytes, "members": bucket.members,
        "from": str(bucket.member_dtype).removeprefix("torch."),
        "to": str(bucket.buffer_dtype).removeprefix("torch."), "equal": equal,
        "way": work.way,
    }  # fmt: skip
    if device == "cpu":
        return row
    source = torch.empty(max(work.nbytes // 2, 1), dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    times = {"ours": work.ours, **work.torchs, "copy": lambda: target.copy_(source), **kernels}
    measured = {key: milliseconds(run, calls=calls, repetitions=repetitions) for key, run in times.items()}
    medians = {key: statistics.median(found) for key, found in measured.items()}
    fastest = min(medians[key] for key in work.torchs)
    ours = measured["ours"]
    return row | {
        "way": work.way,
        **{f"{key}_ms": value for key, value in medians.items()},
        "spread": (max(ours) - min(ours)) / medians["ours"],
        "copy_gb_per_s": work.nbytes / medians["copy"] / 1e6,
        "share_of_copy": medians["copy"] / medians["ours"],
        "host_us": host_microseconds(work.ours),
        "torch_host_us": min(host_microseconds(way) for way in work.torchs.values()),
        "fastest": min(work.torchs, key=lambda key: medians[key]),
        "ratio": fastest / medians["ours"],
    }


def table_of(rows: Sequence[dict[str, Any]], variants: Sequence[str]) -> dict[str, Any]:
    """Speed against a copy, in per cent: ours, torch's fastest, and each variant. Buckets are named in few letters."""
    short = {"float32": "f", "bfloat16": "b", "gather_input": "in", "scatter_input": "scatter", "gather_output": "out"}
    table = {}
    for row in rows:
        name = f"{row['what']} {row['mb']:g} {row['members']} {row['from']} {row['to']}"
        columns = ("ours", row["fastest"], *variants)
        table[" ".join(short.get(word, word) for word in name.split())] = [
            round(100 * row["copy_ms"] / row[f"{column}_ms"]) for column in columns
        ]
    return {"what": "% of a copy", "columns": ["ours", "torch", *variants], "rows": table}


def failures_of(rows: Sequence[dict[str, Any]]) -> list[str]:
    """What is not as it should be, in words. Rows without times are only held to their values."""
    found = [f"{_name(row)}: other values than torch's" for row in rows if not row["equal"]]
    for row in (row for row in rows if "ratio" in row):
        if row["way"] != row["fastest"] and row["ratio"] * NOISE < 1:
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
    options.add_argument("--members", type=int, nargs="+", default=[8, 128], help="tensors of a bucket (8 128)")
    options.add_argument("--tile-kib", type=int, nargs="+", help="KiB of the buffer that a program handles")
    options.add_argument("--warps", type=int, nargs="+", help="32 threads each, of a program")
    options.add_argument("--thread-bytes", type=int, nargs="+", help="loaded by a thread before it stores")
    options.add_argument("--no-launches", action="store_true", help="leave out kernels per bucket")
    given = options.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    head = {"benchmark": "kernels", "torch": torch.__version__, "device": device}
    if device == "cuda":
        head |= {"gpu": torch.cuda.get_device_name(), "kernels": available(torch.device(device, 0))}
    show(head if device == "cuda" else {**head, "timed": "nothing: a CPU runs torch's operators"}, as_json=given.json)
    variants: dict[str, Tuning] = {}
    if given.tile_kib or given.warps or given.thread_bytes:
        variants = tunings(
            given.tile_kib or [TUNING.tile_bytes // 1024], given.warps or [TUNING.warps],
            given.thread_bytes or [TUNING.thread_bytes],
        )
    rows = []
    half, single = torch.bfloat16, torch.float32
    for megabytes in given.sizes or ([1, 16, 64, 256] if device == "cuda" else [0.01]):
        for members in given.members:
            for before, after in ((single, half), (half, half)):
                for name in WORKS:
                    kinds = (after, before) if name == "scatter_input" else (before, after)
                    rows.append(row_of(
                        name, Bucket(megabytes, members, *kinds), device, calls=given.calls,
                        repetitions=given.repetitions, variants=variants,
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
    if device == "cuda":
        show(table_of(rows, list(variants)), as_json=given.json)
    return 1 if failures else 0
