"""How is the model laid out over the ranks? FSDP alone, HSDP, and FSDP with tensor parallelism."""

from __future__ import annotations

import os
from argparse import Namespace
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import fx
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

import collective_identity as ci
from benchmarks.models import Dense, Routed

LAYOUTS = ("fsdp", "hsdp", "fsdp_tp")
TP = "tp."
"""Namespace of the roles of tensor parallelism: ``tp.all_gather``, ``tp.reduce_scatter``, ``tp.all_reduce``."""


class LayoutError(ValueError):
    """The ranks, or the model, do not fit the layout."""


@dataclass(frozen=True, slots=True)
class Layout:
    """Where a model lives.

    Attributes:
        device: of this rank.
        data: the mesh that ``fully_shard`` is given: one dimension, or (replicate, shard).
        tensor: the mesh of tensor parallelism; None without.
        batch: which of the batches this rank is fed. Ranks of one tensor-parallel group are fed the same.
    """

    device: torch.device
    data: DeviceMesh
    tensor: DeviceMesh | None
    batch: int

    @property
    def ranks_a_batch(self) -> int:
        """How many ranks work on one batch."""
        return 1 if self.tensor is None else self.tensor.size()

    def shard(self, model: Dense, policy: MixedPrecisionPolicy, *, blocks: str | None, expert_units: bool) -> None:
        """Split the model over the ranks, in place: each block a unit, and the rest one.

        Args:
            model: a whole model.
            policy: FSDP2's mixed precision.
            blocks: the backend that compiles each block, if one does.
            expert_units: a block's experts are a unit of their own; a compiled block's graph breaks at FSDP2's hooks.
        """
        if self.tensor is not None:
            _parallelize(model, self.tensor)
            if blocks is not None:  # else the embedding gets no gradient: docs/upstream/async-collective-input.md
                model.embed.register_forward_hook(lambda _module, _given, out: out.clone())
        for block in model.blocks:
            apart = expert_units and isinstance(block.feed_forward, Routed)
            if blocks is not None:
                block.compile(fullgraph=not apart, backend=blocks)
            if apart:
                fully_shard(block.feed_forward.experts, mesh=self.data, mp_policy=policy)
            fully_shard(block, mesh=self.data, mp_policy=policy)
        fully_shard(model, mesh=self.data, mp_policy=policy)

    @property
    def pre_passes(self) -> tuple[NameTensorParallel, ...]:
        """What gives tensor parallelism's collectives their roles; nothing without any."""
        return () if self.tensor is None else (NameTensorParallel(self.tensor.get_group().group_name),)


@dataclass(frozen=True, slots=True)
class NameTensorParallel:
    """A pre-pass: torch's tensor parallelism names no collective, so all on its group are given a role by transport."""

    group: str

    def __call__(self, gm: fx.GraphModule) -> None:
        """Name them in a graph as it was captured."""
        for node in ci.start_nodes(gm):
            launch = ci.launch_of(node)
            if launch is not None and launch.group == self.group:
                role = f"{TP}{launch.transport.value}"
                ci.stamp(node, ci.Identity(1, role, ci.Source.EXPLICIT, "benchmark", self.group))

    def uuid(self) -> str:
        """For the keys of the compile caches and for the agreement between ranks; graphs name the group themselves."""
        return type(self).__qualname__


def start() -> torch.device:
    """Join the world that torchrun started, on a GPU of its own if there is one; NVLink multicast stays off."""
    if torch.cuda.is_available():
        os.environ.setdefault("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1")
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
        dist.init_process_group("nccl", device_id=device)
        return device
    dist.init_process_group("gloo")
    return torch.device("cpu")


def layout_of(args: Namespace, device: torch.device) -> Layout:
    """The layout that the arguments ask for; its process groups are made here, once for all variants.

    Raises:
        LayoutError: the ranks cannot be split as asked.
    """
    ranks = dist.get_world_size()
    if args.layout == "fsdp":
        return Layout(device, init_device_mesh(device.type, (ranks,)), None, dist.get_rank())
    size, option = (args.replicas, "--replicas") if args.layout == "hsdp" else (args.tp, "--tp")
    if size < 1 or ranks % size:
        raise LayoutError(
            f"--layout {args.layout} expects {option} to divide the number of ranks, found {size} and {ranks} ranks"
        )
    if args.layout == "hsdp":
        mesh = init_device_mesh(device.type, (size, ranks // size), mesh_dim_names=("replicate", "shard"))
        return Layout(device, mesh, None, dist.get_rank())
    mesh = init_device_mesh(device.type, (ranks // size, size), mesh_dim_names=("dp", "tp"))
    layout = Layout(device, mesh["dp"], mesh["tp"], mesh.get_local_rank("dp"))
    if device.type == "cuda" and size > 1:
        from torch.distributed._symmetric_memory import enable_symm_mem_for_group

        enable_symm_mem_for_group(mesh["tp"].get_group().group_name)
    return layout


def _parallelize(model: Dense, mesh: DeviceMesh) -> None:
    """Sequence parallel: between products each rank holds a part of the window, in them a part of the columns."""
    parallelize_module(
        model,
        mesh,
        {
            "embed": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
            "norm": SequenceParallel(),
            "head": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
        },
    )
    whole = PrepareModuleInput(input_layouts=Shard(1), desired_input_layouts=Replicate())
    for block in model.blocks:
        parallelize_module(
            block,
            mesh,
            {
                "first_norm": SequenceParallel(),
                "attention": whole,
                "attention.query": ColwiseParallel(),
                "attention.key": ColwiseParallel(),
                "attention.value": ColwiseParallel(),
                "attention.out": RowwiseParallel(output_layouts=Shard(1)),
                "second_norm": SequenceParallel(),
                "feed_forward": whole,
                "feed_forward.gate": ColwiseParallel(),
                "feed_forward.up": ColwiseParallel(),
                "feed_forward.down": RowwiseParallel(output_layouts=Shard(1)),
            },
        )
