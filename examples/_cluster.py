"""The processes of one run: the process group, the mesh, and this rank's place in both."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import TypeVar

import torch
import torch.distributed as dist
from _options import Options, Unusable
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Cluster:
    """One rank's view. ``data`` is the mesh FSDP2 shards over, ``tensor`` that of tensor parallelism."""

    rank: int
    size: int
    device: torch.device
    data: DeviceMesh
    tensor: DeviceMesh | None
    part: int
    parts: int

    def everywhere(self, value: T) -> list[T]:
        """Return every rank's ``value``, by rank."""
        values: list[T | None] = [None] * self.size
        dist.all_gather_object(values, value)
        return values  # type: ignore[return-value]

    def from_first(self, value: T) -> T:
        """Return rank 0's ``value`` on every rank."""
        box = [value]
        dist.broadcast_object_list(box, src=0)
        return box[0]


@contextmanager
def cluster(options: Options) -> Iterator[Cluster]:
    """Open the default process group for the length of the block (gloo on a CPU, nccl on GPUs)."""
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    device = torch.device("cpu")
    if options.device == "cuda":
        if not torch.cuda.is_available():
            raise Unusable("--device cuda: this torch sees no GPU; run with --device cpu")
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
        dist.init_process_group("nccl", timeout=timedelta(minutes=5), device_id=device)
    else:
        dist.init_process_group("gloo", timeout=timedelta(minutes=5))
    try:
        mesh = init_device_mesh(device.type, options.mesh, mesh_dim_names=options.mesh_names)
        if options.tp and options.clip is not None:
            mesh._flatten("all")  # the gradient norm is summed over both dimensions: one all-reduce, not two
        data = mesh["dp"] if options.tp else mesh
        parts = data.size()
        part = data.get_local_rank() if options.tp else rank
        yield Cluster(rank, size, device, data, mesh["tp"] if options.tp else None, part, parts)
        dist.barrier()  # leave together: torchrun stops every rank as soon as one has left with a failure
    finally:
        dist.destroy_process_group()
