"""Small ``fully_shard`` models in a fake world of 4 ranks, and all of their state that ``install`` could touch."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from fsdp_hooks import compat


class Model(nn.Module):
    """Two blocks and a head; every one has parameters."""

    def __init__(self, device: str = "cpu") -> None:
        super().__init__()
        first = nn.Sequential(nn.Linear(8, 8, device=device), nn.Dropout(0.5))
        self.blocks = nn.Sequential(first, nn.Linear(8, 8))
        self.head = nn.Linear(8, 8, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.blocks(x))


def sharded(*, device: str = "cpu", shape: tuple[int, ...] = (4,), **options: Any) -> Model:
    """``fully_shard`` on each block and on the root; `options` and `device` for ``blocks.0`` alone."""
    model = Model(device)
    names = ("shard",) if len(shape) == 1 else ("replicate", "shard")
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
    fully_shard(model.blocks[0], **{"mesh": mesh, **options})
    fully_shard(model.blocks[1], mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def snapshot(model: nn.Module) -> dict[str, Any]:
    """Everything that install touches, of every module, in a form that compares by identity and order."""
    return {
        name: {
            "class": type(module),
            "keys": list(module.__dict__),
            "managed": module.__dict__.get("_is_fsdp_managed_module"),
            "forward": module.__dict__.get("forward"),
            "parameters": [(key, id(value)) for key, value in module._parameters.items()],
            "pre hooks": [(key, hook) for key, hook in module._forward_pre_hooks.items()],
            "hooks": [(key, hook) for key, hook in module._forward_hooks.items()],
            "with kwargs": list(module._forward_pre_hooks_with_kwargs),
            "state dict hooks": len(module._state_dict_pre_hooks),
        }
        for name, module in model.named_modules()
    }


def lazily_initialised(model: nn.Module) -> bool:
    return any(compat.state_of(module, name)._is_root is not None for name, module in compat.fsdp_modules(model))
