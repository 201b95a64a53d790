"""How does a fused optimizer pass through a compiler?

``aten::_fused_adamw_`` updates lists of tensors in place. Functionalization refuses one that is empty (without
``amsgrad`` one is), and for a learning rate that is a tensor there is no fake implementation: seen on torch 2.11.0,
2.13.0 and 2.14.1, docs/upstream/fused-adam-functionalize.md. The same kernel under a name of our own is functionalized
as any custom operator (torch/_higher_order_ops/auto_functionalize.py, which takes no built-in one).
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
