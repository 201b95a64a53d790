"""The models and FSDP2 set-ups on which captured training is compared with eager FSDP2."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.utils.checkpoint import checkpoint

WIDTH, CLASSES = 15, 7  # odd on purpose: every shard of them is uneven


class Block(nn.Module):
    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        hidden = 2 * width + width % 2
        self.up = nn.Linear(width, hidden)
        self.down = nn.Linear(hidden, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Model(nn.Module):
    """Embedding, blocks, head; `tied` reads the embedding's weight in the head as well."""

    def __init__(self, *, width: int = WIDTH, blocks: int = 2, tied: bool = False) -> None:
        super().__init__()
        self.embed = nn.Embedding(CLASSES, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(blocks))
        self.head = nn.Linear(width, CLASSES, bias=False)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class CheckpointedBlock(Block):
    """A block whose inside is recomputed in backward."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + checkpoint(self.inside, x, use_reentrant=False)

    def inside(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(F.gelu(self.up(self.norm(x))))


def checkpointed() -> nn.Module:
    model = Model()
    model.blocks = nn.ModuleList(CheckpointedBlock() for _ in range(2))
    return model


@dataclass(frozen=True)
class Case:
    """One set-up: how the model is built and sharded, and how it is trained."""

    build: Callable[[], nn.Module] = Model
    shard: Callable[[nn.Module], None] = field(default=lambda model: shard_blocks(model))
    micro_batches: int = 1
    clip: float | None = None
    options: dict[str, Any] = field(default_factory=dict)
    steps: int = 4


def shard_blocks(model: nn.Module, mesh: DeviceMesh | None = None, **options: Any) -> None:
    mesh = mesh or init_device_mesh("cpu", (torch.distributed.get_world_size(),))
    for block in model.blocks:
        fully_shard(block, mesh=mesh, **options)
    fully_shard(model, mesh=mesh, **options)


def shard_nested(model: nn.Module) -> None:
    mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),))
    for block in model.blocks:
        fully_shard(block.up, mesh=mesh)
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)


def shard_hybrid(model: nn.Module) -> None:
    shard_blocks(model, init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard")))


def shard_tensor_parallel(model: nn.Module) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    for block in model.blocks:
        parallelize_module(block, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    shard_blocks(model, mesh["dp"])


def shard_columns(model: nn.Module) -> None:
    shard_blocks(model, shard_placement_fn=lambda p: Shard(1) if p.ndim == 2 and p.shape[1] % 2 == 0 else None)


def mixed(output_dtype: torch.dtype | None = None, **policy: Any) -> Callable[[nn.Module], None]:
    """Mixed precision everywhere; `output_dtype` for the root alone."""

    def shard(model: nn.Module) -> None:
        mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),))
        for block in model.blocks:
            fully_shard(block, mesh=mesh, mp_policy=MixedPrecisionPolicy(**policy))
        fully_shard(model, mesh=mesh, mp_policy=MixedPrecisionPolicy(output_dtype=output_dtype, **policy))

    return shard


def frozen() -> nn.Module:
    model = Model()
    model.embed.weight.requires_grad_(False)
    for parameter in model.blocks[0].parameters():
        parameter.requires_grad_(False)
    return model


def even() -> nn.Module:
    return Model(width=16)


KERNELS = {"kernels": "triton"}
BF16 = {"param_dtype": torch.bfloat16, "reduce_dtype": torch.float32}

TWO_RANKS = {
    "uneven": Case(),
    "nested": Case(shard=shard_nested),
    "keep_after_forward": Case(shard=lambda m: shard_blocks(m, reshard_after_forward=False)),
    "frozen": Case(build=frozen),
    "tied": Case(build=lambda: Model(tied=True)),
    "checkpointed": Case(build=checkpointed),
    "accumulate_and_clip": Case(micro_batches=2, clip=0.1),
    "columns": Case(build=even, shard=shard_columns),
    "columns_in_kernels": Case(build=even, shard=shard_columns, options=KERNELS),
    "bf16": Case(shard=mixed(**BF16)),
    "bf16_in_kernels": Case(shard=mixed(**BF16), options=KERNELS),
    "bf16_output_fp32": Case(shard=mixed(**BF16, output_dtype=torch.float32)),
    "bf16_reduce_in_bf16": Case(build=even, shard=mixed(param_dtype=torch.bfloat16, cast_forward_inputs=False)),
    "fp16_reduce": Case(shard=mixed(param_dtype=torch.float32, reduce_dtype=torch.float16)),
}

FOUR_RANKS = {
    "hybrid": Case(shard=shard_hybrid),
    "tensor_parallel": Case(build=even, shard=shard_tensor_parallel),
}
