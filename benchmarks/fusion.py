"""Tensor-parallel fusion on GPUs: values and time of a block fused and unfused.

``torchrun --nproc-per-node 2 -m benchmarks fusion [--json] [--rows N] [--width N]``. Runs with NVLink multicast off
(``TORCH_SYMM_MEM_DISABLE_MULTICAST=1``, which it sets if nothing does).
"""

from __future__ import annotations

import copy
import os
import time
from typing import Any

import torch
import torch.distributed as dist
from torch import fx
from torch.fx.experimental.proxy_tensor import make_fx

from collective_identity import Identity, Source, absence_of, members_of, stamp, start_nodes
from inductor_passes import fuse_tensor_parallel

from .measure import parser, show


def block(x: torch.Tensor, up: torch.Tensor, down: torch.Tensor, group: str, ranks: int) -> torch.Tensor:
    """Sequence-parallel in and out: gather, product, product, reduce-scatter."""
    c10d = torch.ops._c10d_functional
    full = c10d.wait_tensor(c10d.all_gather_into_tensor(x, ranks, group))
    return c10d.wait_tensor(c10d.reduce_scatter_tensor(torch.mm(torch.mm(full, up).relu(), down), "sum", ranks, group))


def milliseconds(gm: fx.GraphModule, given: tuple[torch.Tensor, ...], times: int = 20) -> float:
    """Wall-clock milliseconds of one call, after three to warm up."""
    for _ in range(3):
        gm(*given)
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(times):
        gm(*given)
    torch.cuda.synchronize()
    return 1e3 * (time.perf_counter() - start) / times


def main() -> int:
    """Run the benchmark; every rank checks, rank 0 prints."""
    options = parser("tensor-parallel fusion on GPUs")
    options.add_argument("--rows", type=int, default=4096, help="rows of each rank's activation (default 4096)")
    options.add_argument("--width", type=int, default=4096)
    given = options.parse_args()
    os.environ.setdefault("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1")
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl")
    from torch.distributed._symmetric_memory import enable_symm_mem_for_group

    rank, ranks = dist.get_rank(), dist.get_world_size()
    group: str = dist.group.WORLD.group_name  # type: ignore[union-attr]
    enable_symm_mem_for_group(group)
    torch.manual_seed(rank)
    for dtype, tolerance in ((torch.float32, 1e-4), (torch.bfloat16, 2e-2)):
        scale = given.width**-0.5
        tensors = (
            torch.randn(given.rows, given.width, device="cuda", dtype=dtype),
            torch.randn(given.width, given.width, device="cuda", dtype=dtype) * scale,
            torch.randn(given.width, given.width, device="cuda", dtype=dtype) * scale,
        )
        plain = make_fx(lambda *t: block(*t, group, ranks), tracing_mode="fake")(*tensors)
        for node, role in zip(start_nodes(plain), ("tp.activation_gather", "tp.output_reduce_scatter"), strict=True):
            stamp(node, Identity(1, role, Source.EXPLICIT, "benchmark"))
        fused = copy.deepcopy(plain)
        plan = fuse_tensor_parallel(fused)
        assert len(plan.fusions) == 2 and start_nodes(fused) == [], plan.describe()
        recorded = [node for node in fused.graph.nodes if members_of(node) is not None]
        assert all((a := absence_of(node)) is not None and a.kind == "dropped" for node in recorded)
        expected, found = plain(*tensors), fused(*tensors)
        error = ((expected - found).abs().max() / expected.abs().max()).item()
        assert error <= tolerance, f"rank {rank}, {dtype}: relative error {error}"
        row: dict[str, Any] = {
            "benchmark": "fusion", "torch": torch.__version__, "dtype": str(dtype), "ranks": ranks,
            "relative_error": error, "plain_ms": milliseconds(plain, tensors), "fused_ms": milliseconds(fused, tensors),
        }
        if rank == 0:
            show({**row, "ratio": row["plain_ms"] / row["fused_ms"]}, as_json=given.json)
    dist.destroy_process_group()
    return 0
