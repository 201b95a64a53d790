"""How does a fused optimizer pass through a compiler?

``aten::_fused_adamw_`` and its like update lists of tensors in place. As operators of aten they are neither
functionalized (``can_auto_functionalize``, torch/_higher_order_ops/auto_functionalize.py, takes no built-in operator)
nor have they a fake implementation for a learning rate that is a tensor (torch/_meta_registrations.py); read in torch
2.11.0 to 2.15.0. The same kernels under names of our own are functionalized as any custom operator.
"""

from __future__ import annotations

from typing import Any

import torch

from .operator import LIBRARY, NAMESPACE

_FUSED = ("_fused_adam_", "_fused_adamw_")


def functionalizable(target: Any) -> Any:
    """Our name for a fused optimizer's operator; any other target as it is."""
    if not isinstance(target, torch._ops.OpOverload) or target.namespace != "aten":
        return target
    if target._opname not in _FUSED or target._overloadname != "tensor_lr":
        return target
    return getattr(getattr(torch.ops, NAMESPACE), target._opname[1:-1]).default


def _nothing(*args: Any, **kwargs: Any) -> None:
    """All that the operator does is in place."""


def _define(name: str) -> None:
    operator = getattr(torch.ops.aten, name).tensor_lr
    ours = name[1:-1]
    LIBRARY.define(ours + str(operator._schema).partition("(")[1] + str(operator._schema).partition("(")[2])
    LIBRARY.impl(ours, operator, "CompositeExplicitAutograd")
    LIBRARY.impl(ours, _nothing, "Meta")


for _name in _FUSED:
    _define(_name)
