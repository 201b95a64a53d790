"""What collectives cost on these ranks, whether the fitted line says so, and the bucket sizes that follow.

``torchrun --nproc-per-node N -m benchmarks comm [--json] [--largest MIB]``: NCCL where there are GPUs, gloo on the CPU
elsewhere. Latency and bandwidth of each kind are fitted to one row of sizes; the seconds they predict are compared with
seconds measured at the sizes halfway between those, which the fit never saw. ``ratio`` is predicted over measured. The
last line has the range of all ratios and ``cap_mb`` for three efficiencies.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.measure import show
from benchmarks.train_layouts import start
from inductor_passes import measure_comm_costs
from inductor_passes.comm_timing import SIZES, time_collectives
from inductor_passes.options import KINDS

EFFICIENCIES = (0.8, 0.9, 0.95)


def main() -> int:
    """Measure on every rank; rank 0 prints."""
    parser = argparse.ArgumentParser(prog="torchrun -m benchmarks comm", description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true", help="JSON lines")
    parser.add_argument("--largest", type=float, default=SIZES[-1] / 2**20, help="largest size in MiB (default 256)")
    parser.add_argument("--repeats", type=int, default=10, help="timed runs of each collective at each size")
    args = parser.parse_args()
    if not dist.is_torchelastic_launched():
        parser.error("start it with torchrun: torchrun --nproc-per-node 2 -m benchmarks comm")
    device = start()
    sizes = [one for one in SIZES if one <= args.largest * 2**20]
    if len(sizes) < 2:
        parser.error(f"--largest expects {SIZES[1] / 2**20} MiB or more, found {args.largest}")
    for row in rows(device, sizes, args.repeats):
        if dist.get_rank() == 0:
            show(row, as_json=args.json)
    dist.destroy_process_group()
    return 0


def rows(device: torch.device, sizes: Sequence[int], repeats: int) -> Iterator[dict[str, Any]]:
    """The lines of the benchmark, alike on all ranks of the default group, which run this together."""
    costs = measure_comm_costs(device=device, sizes=sizes, repeats=repeats)
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
    yield {"benchmark": "comm", "torch": torch.__version__, "device": name, "ranks": costs.group_size}
    for kind in KINDS:
        of = costs.of(kind)
        yield {"kind": kind, "latency_us": of.latency_us, "gb_per_s": of.bandwidth / 1e9}
    world = dist.group.WORLD
    assert world is not None
    ratios = []
    for kind, points in time_collectives(world, device, [2 * one for one in sizes[:-1]], repeats).items():
        for nbytes, measured in points:
            predicted = costs.seconds(kind, nbytes)
            ratios.append(predicted / measured)
            row = {"kind": kind, "mib": nbytes / 2**20, "predicted_ms": 1e3 * predicted, "measured_ms": 1e3 * measured}
            yield {**row, "ratio": ratios[-1]}
    caps = {f"cap_mb_{efficiency}": costs.cap_mb(efficiency) for efficiency in EFFICIENCIES}
    yield {**caps, "ratio_min": min(ratios), "ratio_max": max(ratios)}
