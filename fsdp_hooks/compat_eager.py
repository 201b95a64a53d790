"""Private names of FSDP2 that the eager communication objects need, in one place.

Read in torch 2.11.0, 2.12.0, 2.13.0, 2.14.1 and 2.15.0, torch/distributed/fsdp/_fully_shard/: ``foreach_reduce``
(_fsdp_collectives.py) allocates the reduce-scatter's input and then its output through the reduce-scatter object,
and all-reduces that very output with ``dist.all_reduce(reduce_output, group=..., op=...)``; there is no custom
all-reduce. Each name is checked when it is used. Nothing here changes torch.
"""

from __future__ import annotations

import inspect
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist

from .errors import InstallError

_COLLECTIVES = "torch.distributed.fsdp._fully_shard._fsdp_collectives"
_ALLOCATED_OUTPUT = "reduce_output = reduce_scatter_comm.allocate("
_ALL_REDUCED = "dist.all_reduce("


def comms_of(group: Any, name: str) -> tuple[Any, Any]:
    """The all-gather and the reduce-scatter object of an ``FSDPParamGroup`` (there are setters but no getters)."""
    missing = [key for key in ("_all_gather_comm", "_reduce_scatter_comm") if not hasattr(group, key)]
    if missing:
        raise InstallError(
            f"module {name!r}: expected FSDP2's {type(group).__name__} to have {', '.join(missing)} (seen in torch "
            f"2.11 to 2.15), found none in torch {torch.__version__}: use a released torch in that range"
        )
    return group._all_gather_comm, group._reduce_scatter_comm


def collectives_module() -> ModuleType:
    """The module whose ``dist.all_reduce`` is HSDP's all-reduce, checked to be what was read.

    Raises:
        InstallError: ``foreach_reduce`` no longer all-reduces the output it allocated through the reduce-scatter
            object, by a module-level ``dist``.
    """
    from torch.distributed.fsdp._fully_shard import _fsdp_collectives

    source = inspect.getsource(_fsdp_collectives.foreach_reduce)
    after = source.partition(_ALLOCATED_OUTPUT)[2].partition(_ALL_REDUCED)[2]
    if not after.lstrip().startswith("reduce_output,") or source.count(_ALL_REDUCED) != 1:
        raise InstallError(
            f"fsdp_hooks expects {_COLLECTIVES}.foreach_reduce to allocate reduce_output through the reduce-scatter "
            f"object and then to call dist.all_reduce(reduce_output, ...) once, found otherwise in torch "
            f"{torch.__version__}: use a released torch in 2.11 to 2.15, or one-dimensional FSDP"
        )
    if not hasattr(_fsdp_collectives, "dist"):
        raise InstallError(
            f"fsdp_hooks expects {_COLLECTIVES} to have dist (torch.distributed), found none in torch "
            f"{torch.__version__}: use a released torch in 2.11 to 2.15, or one-dimensional FSDP"
        )
    return _fsdp_collectives


def replace_dist(module: ModuleType, found: Any, wanted: Any) -> None:
    """Set ``module.dist``; ``found`` is what must be there now.

    Raises:
        InstallError: something else is there.
    """
    there = module.dist
    if there is not found:
        kind = type(there)
        raise InstallError(
            f"expected {module.__name__}.dist to be {'torch.distributed' if found is dist else 'the one we put there'}"
            f", found {kind.__module__}.{kind.__qualname__}: another package replaced it; undo that first"
        )
    module.dist = wanted  # type: ignore[attr-defined]
