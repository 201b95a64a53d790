"""Models that use FSDP beside other parallelism, each with collectives of its own roles on FSDP's group or another."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from collective_identity import role_scope

WIDTH, BATCH, LENGTH = 8, 4, 4
CONTEXT, METRIC = "cp.kv_gather", "user.metric_gather"


class FeedForward(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(F.gelu(self.up(x)))


class Attention(nn.Module):
    """Queries of this rank's part of the sequence over the keys and values of all: gathered on FSDP's group."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key_value = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 2 * WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        query, ours = self.query(x), self.key_value(x)
        with role_scope(CONTEXT, producer="test", group=dist.group.WORLD.group_name):  # type: ignore[union-attr]
            every = funcol.wait_tensor(funcol.all_gather_tensor_autograd(ours, 1, dist.group.WORLD))  # type: ignore[arg-type]
        key, value = every.chunk(2, -1)
        return F.scaled_dot_product_attention(query, key, value)


class Experts(nn.Module):
    """One expert a rank, the same for all here: tokens go out and come back by all-to-all."""

    def __init__(self) -> None:
        super().__init__()
        self.expert = FeedForward()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        shape = x.shape
        sent = exchange(x.reshape(-1, WIDTH))
        return exchange(self.expert(sent)).reshape(shape)


class Watched(FeedForward):
    """Adds what a user gathers of the activations on FSDP's group."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = super().forward(x)
        with role_scope(METRIC, producer="user", group=dist.group.WORLD.group_name):  # type: ignore[union-attr]
            gathered = funcol.all_gather_tensor_autograd(out.mean((0, 1))[None], 0, dist.group.WORLD)  # type: ignore[arg-type]
            means = funcol.wait_tensor(gathered)
        return out + means.mean(0)


class Block(nn.Module):
    def __init__(self, inside: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.norm, self.inside = nn.LayerNorm(WIDTH), inside()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.inside(self.norm(x))


class Model(nn.Module):
    def __init__(self, inside: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.enter = nn.Linear(WIDTH, WIDTH, bias=False)
        self.blocks = nn.ModuleList(Block(inside) for _ in range(2))
        self.leave = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.enter(x)
        for block in self.blocks:
            x = block(x)
        return self.leave(x)


def exchange(tokens: torch.Tensor) -> torch.Tensor:
    return funcol.wait_tensor(funcol.all_to_all_single_autograd(tokens, None, None, dist.group.WORLD))  # type: ignore[arg-type]


def _shard(model: nn.Module, mesh: DeviceMesh) -> None:
    for block in model.get_submodule("blocks").children():
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)


def shard_everywhere(model: nn.Module) -> None:
    _shard(model, init_device_mesh("cpu", (dist.get_world_size(),)))


def shard_over_sequence_parallel(model: nn.Module) -> None:
    """Two by two: each rank holds a part of the sequence, and in products all of it and half of the columns."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    for block in model.get_submodule("blocks").children():
        plan = {
            "norm": SequenceParallel(),
            "inside": PrepareModuleInput(input_layouts=Shard(1), desired_input_layouts=Replicate()),
            "inside.up": ColwiseParallel(),
            "inside.down": RowwiseParallel(output_layouts=Shard(1)),
        }
        parallelize_module(block, mesh["tp"], plan)
    _shard(model, mesh["dp"])


@dataclass(frozen=True)
class Case:
    """A model and its sharding; `others`: roles besides FSDP's that its graphs must show when stamped."""

    inside: Callable[[], nn.Module]
    shard: Callable[[nn.Module], None] = shard_everywhere
    others: tuple[str, ...] = ()

    def build(self) -> nn.Module:
        return Model(self.inside)


CASES = {
    "sequence parallel": Case(FeedForward, shard_over_sequence_parallel),
    "context parallel": Case(Attention, others=(CONTEXT,)),
    "experts": Case(Experts),
    "user gather": Case(Watched, others=(METRIC,)),
}
