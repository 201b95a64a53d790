"""Where does a step's time on the device go? Sums over the kernels of a trace: exposed communication, packing, gaps."""

from __future__ import annotations

import json
import re
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

LONG = 30.0
_KERNELS = ("kernel", "gpu_memcpy", "gpu_memset")
_KINDS = (
    ("communication", re.compile(r"nccl", re.I)),
    ("attention", re.compile(r"flash|fmha|sdpa|attention", re.I)),
    ("matmul", re.compile(r"gemm|cutlass|nvjet|cublas|xmma|splitk|triton_tem|\bmm\b", re.I)),
    ("optimizer", re.compile(r"adam|multi_tensor", re.I)),
    ("packing", re.compile(r"CatArray|split_with_sizes|chunk_cat|fused_cat|_cat_|_pack_|memcpy", re.I)),
)


@dataclass(frozen=True, slots=True)
class Kernel:
    """One kernel or copy on the device; times in microseconds."""

    name: str
    start: float
    end: float

    @property
    def kind(self) -> str:
        """``communication``, ``attention``, ``matmul``, ``optimizer``, ``packing`` or ``other``."""
        return next((kind for kind, pattern in _KINDS if pattern.search(self.name)), "other")


@dataclass(frozen=True, slots=True)
class StepProfile:
    """Milliseconds a step, and launches a step.

    Attributes:
        span: from the first kernel to the end of the last one.
        busy: something runs.
        exposed: only communication runs.
        idle: nothing runs.
        waiting: nothing runs for more than `LONG` microseconds on end: the host is behind.
        kinds: seconds of every kind added up, overlapping or not.
        launches: kernels and copies.
        largest: the kernels that take longest together, by name.
    """

    span: float
    busy: float
    exposed: float
    idle: float
    waiting: float
    launches: float
    kinds: Mapping[str, float] = field(default_factory=dict)
    largest: Mapping[str, float] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """The profile as JSON values, rounded to microseconds."""
        names = ("span", "busy", "exposed", "idle", "waiting", "launches")
        numbers = {name: round(getattr(self, name), 3) for name in names}
        return numbers | {
            "kinds": {k: round(v, 3) for k, v in sorted(self.kinds.items())},
            "largest": {k: round(v, 3) for k, v in self.largest.items()},
        }


def profile_steps(step: Callable[[], object], steps: int) -> StepProfile:
    """Run ``step`` under ``torch.profiler`` and sum its kernels up."""
    import torch
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as prof:
        for _ in range(steps):
            step()
        torch.cuda.synchronize()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        prof.export_chrome_trace(str(path))
        return summarise(kernels_of(json.loads(path.read_text())), steps)


def kernels_of(trace: Mapping[str, Any]) -> list[Kernel]:
    """The kernels and copies of a Chrome trace that ``torch.profiler`` wrote."""
    found = [e for e in trace["traceEvents"] if e.get("ph") == "X" and e.get("cat") in _KERNELS]
    return [Kernel(str(e["name"]), float(e["ts"]), float(e["ts"]) + float(e["dur"])) for e in found]


def summarise(kernels: Sequence[Kernel], steps: int, *, names: int = 12) -> StepProfile:
    """Add up the kernels of ``steps`` equal steps.

    Raises:
        ValueError: no kernel, or no step.
    """
    if not kernels or steps < 1:
        raise ValueError(f"expected kernels of at least one step, found {len(kernels)} of {steps}")
    span = max(k.end for k in kernels) - min(k.start for k in kernels)
    gaps = list(_gaps((k.start, k.end) for k in kernels))
    busy = span - sum(gaps)
    computing = _covered((k.start, k.end) for k in kernels if k.kind != "communication")
    kinds: Counter[str] = Counter()
    by_name: Counter[str] = Counter()
    for kernel in kernels:
        kinds[kernel.kind] += kernel.end - kernel.start  # type: ignore[assignment]
        by_name[kernel.name[:60]] += kernel.end - kernel.start  # type: ignore[assignment]
    share = 1e-3 / steps
    return StepProfile(
        span=span * share,
        busy=busy * share,
        exposed=(busy - computing) * share,
        idle=(span - busy) * share,
        waiting=sum(gap for gap in gaps if gap > LONG) * share,
        launches=len(kernels) / steps,
        kinds={kind: total * share for kind, total in kinds.items()},
        largest={name: total * share for name, total in by_name.most_common(names)},
    )


def _gaps(intervals: Iterable[tuple[float, float]]) -> Iterator[float]:
    """Lengths of what no interval covers, between the first and the last."""
    reached = None
    for start, end in sorted(intervals):
        if reached is not None and start > reached:
            yield start - reached
        reached = end if reached is None else max(reached, end)


def _covered(intervals: Iterable[tuple[float, float]]) -> float:
    """Length of the union."""
    total, reached = 0.0, float("-inf")
    for start, end in sorted(intervals):
        total += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return total
