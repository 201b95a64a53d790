"""What does FSDP2 do to the tensors in a module's inputs and outputs? Dynamo traces all of it."""

from __future__ import annotations

import dataclasses
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import torch
from torch.nn.utils.rnn import PackedSequence


def cast(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """A floating-point tensor in another type; any other as it is."""
    return x.to(dtype) if x.is_floating_point() and x.dtype != dtype else x


def mapped(change: Callable[[torch.Tensor], torch.Tensor], value: Any) -> Any:
    """Apply ``change`` to every tensor in nested containers, those that FSDP2 looks into.

    Cases and results are those of ``_apply_to_tensors`` in torch/distributed/utils.py (read in 2.11.0 to 2.15.0).
    """
    if isinstance(value, torch.Tensor):
        return change(value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        changes = {f.name: mapped(change, getattr(value, f.name)) for f in dataclasses.fields(value) if f.init}
        return dataclasses.replace(value, **changes)
    if isinstance(value, dict):
        items = {key: mapped(change, item) for key, item in value.items()}
        return type(value)(items) if isinstance(value, OrderedDict) else items
    if isinstance(value, PackedSequence):
        return value
    if isinstance(value, (tuple, list, set)):
        changed = [mapped(change, item) for item in value]
        return type(value)(*changed) if hasattr(value, "_fields") else type(value)(changed)
    return value
