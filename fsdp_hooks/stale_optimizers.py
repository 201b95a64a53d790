"""Is there an optimizer that still holds the parameters a model had before it was sharded?

``fully_shard`` and ``data_parallel`` replace parameters. An optimizer built before steps tensors that nobody reads:
training goes on and nothing is learned, and neither torch nor the optimizer says so.
"""

from __future__ import annotations

import gc
import warnings
import weakref

import torch
from torch import nn

from .live_objects import instances


def warn_of_stale_optimizers(model: nn.Module) -> None:
    """Warn of every optimizer with parameters that no module has any more and that are shaped as the model's.

    All of them, or, where it holds others of the model, any: it was built between two calls of ``fully_shard``.

    Args:
        model: after its parameters were replaced.
    """
    suspects = [weakref.ref(one) for one in _stale(model)]
    if suspects:
        gc.collect()  # one that nobody can reach any more steps nothing
    for suspect in suspects:
        optimizer = suspect()
        if optimizer is not None:
            warnings.warn(
                f"{type(optimizer).__name__} holds parameters that {type(model).__name__} had before it was sharded, "
                "so its steps change nothing there: build the optimizer after fully_shard (or data_parallel), from "
                "model.parameters()",
                stacklevel=3,
            )


def _stale(model: nn.Module) -> list[torch.optim.Optimizer]:
    mine = {id(param): param.shape for param in model.parameters()}
    suspects = []
    for optimizer in instances(torch.optim.Optimizer):
        stepped = _params(optimizer)
        held_here = {id(param) for param in stepped}
        missing = {shape for key, shape in mine.items() if key not in held_here}
        strangers = [param for param in stepped if id(param) not in mine and param.shape in missing]
        in_part = any(id(param) in mine for param in stepped)
        if strangers and (in_part or len(strangers) == len(stepped)):
            suspects.append((optimizer, strangers, in_part))
    if not suspects:
        return []
    held = {id(p) for module in instances(nn.Module) for p in module.__dict__.get("_parameters", {}).values()}
    return [
        optimizer
        for optimizer, strangers, in_part in suspects
        if (any if in_part else all)(id(param) not in held for param in strangers)
    ]


def _params(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    return [param for group in optimizer.__dict__.get("param_groups", ()) for param in group["params"]]
