"""May the fused operators on symmetric memory run on a group? The only place that asks torch for it.

Read in PyTorch 2.11.0, 2.12.0, 2.13.0, 2.14.1 and 2.15.0 ``torch/distributed/_symmetric_memory/__init__.py``
(``is_symm_mem_enabled_for_group``; up to 2.14 a group has to be enabled, in 2.15 an allocator is enough).
"""

from __future__ import annotations

from types import ModuleType

import torch


def is_enabled(group: str) -> bool:
    """Whether symmetric memory is enabled for a process group; False where this torch has none."""
    module = _module()
    asked = getattr(module, "is_symm_mem_enabled_for_group", None)
    return asked is not None and bool(asked(group))


def gather_matmul() -> torch._ops.OpOverload:
    """``(A, Bs, gather_dim, group, *, return_A) -> (gathered A or None, products)``; its module defines it."""
    _module()
    return torch.ops.symm_mem.fused_all_gather_matmul.default


def matmul_scatter() -> torch._ops.OpOverload:
    """``(A, B, reduce_op, scatter_dim, group) -> scattered product``; its module defines it."""
    _module()
    return torch.ops.symm_mem.fused_matmul_reduce_scatter.default


def _module() -> ModuleType | None:
    """The module that registers the operators when imported; None where torch is built without it."""
    try:
        from torch.distributed import _symmetric_memory
    except ImportError:
        return None
    return _symmetric_memory
