"""Is there an optimizer that still holds the parameters a model had before it was sharded?

``fully_shard`` and ``data_parallel`` replace parameters. An optimizer built before steps tensors that nobody reads:
training goes on and nothing is learned, and neither torch nor the optimizer says so.
"""

from __future__ import annotations

import gc
import warnings
import weakref
from typing import Any

import torch
from torch import nn


def warn_of_stale_optimizers(model: nn.Module) -> None:
    """Warn of every optimizer whose parameters no module has any more and that are shaped as the model's.

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
                "so its steps change nothing: build the optimizer after fully_shard (or data_parallel), from "
                "model.parameters()",
                stacklevel=3,
            )


def _stale(model: nn.Module) -> list[torch.optim.Optimizer]:
    shapes = {param.shape for param in model.parameters()}
    suspects = [one for one in _instances(torch.optim.Optimizer) if all(p.shape in shapes for p in _params(one))]
    if not any(_params(one) for one in suspects):
        return []
    held = {id(p) for module in _instances(nn.Module) for p in module.__dict__.get("_parameters", {}).values()}
    return [one for one in suspects if _params(one) and not any(id(p) in held for p in _params(one))]


def _params(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    return [param for group in optimizer.__dict__.get("param_groups", ()) for param in group["params"]]


def _instances(base: type[Any]) -> list[Any]:
    """Every live object of ``base``: what refers to it, or to a class below it, as its type."""
    kinds = [base]
    for kind in kinds:  # grows while it is read
        kinds += [below for below in type.__subclasses__(kind) if below not in kinds]
    return [one for one in gc.get_referrers(*kinds) if type(one) in kinds]
