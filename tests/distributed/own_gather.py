"""A parameter that gathers itself in eight bits, as float8 training does: FSDP2's all-gather extension, for real."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch.utils import _pytree as pytree

aten = torch.ops.aten
FLOAT8 = torch.float8_e4m3fn
_KEEPS_KIND = {
    aten.empty_like.default,
    aten.new_zeros.default,
    aten.slice.Tensor,
    aten.copy_.default,
    aten.view.default,
    aten.as_strided.default,
    aten._to_copy.default,
    aten._pin_memory.default,
    aten.split.Tensor,
    aten.clone.default,
    aten.detach.default,
}


class Float8Gathered(torch.Tensor):
    """A float32 tensor whose shards are sent as float8 with one scale and arrive as float32 again."""

    @staticmethod
    def __new__(cls, held: torch.Tensor) -> Float8Gathered:
        return torch.Tensor._make_wrapper_subclass(
            cls, held.size(), strides=held.stride(), dtype=held.dtype, device=held.device
        )

    def __init__(self, held: torch.Tensor) -> None:
        self.held = held

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any, kwargs: Any = None) -> Any:
        plain_args, plain_kwargs = pytree.tree_map_only(cls, lambda one: one.held, (args, kwargs or {}))
        out = func(*plain_args, **plain_kwargs)
        return pytree.tree_map_only(torch.Tensor, cls, out) if func in _KEEPS_KIND else out

    def fsdp_pre_all_gather(
        self, mesh: Any, outer_size: Any, outer_stride: Any, module: Any, mp_policy: Any
    ) -> tuple[tuple[torch.Tensor, ...], Any]:
        largest = self.held.abs().max()
        dist.all_reduce(largest, dist.ReduceOp.MAX, group=mesh.get_group())
        scale = torch.finfo(FLOAT8).max / largest
        return ((self.held * scale).to(FLOAT8).view(torch.uint8),), scale

    def fsdp_post_all_gather(
        self, gathered: tuple[torch.Tensor, ...], scale: Any, param_dtype: torch.dtype, *, out: Any = None
    ) -> Any:
        (sent,) = gathered
        full = sent.view(FLOAT8).to(param_dtype) / scale
        if out is not None:
            with torch.no_grad(), torch.autograd._unsafe_preserve_version_counter(out):
                out.copy_(full)
            return None
        return full, (full,)
