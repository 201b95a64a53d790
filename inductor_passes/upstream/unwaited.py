"""Which inputs of a graph would get zeros instead of their gradient?

A collective's result that nobody has waited for yet is an ``AsyncCollectiveTensor``; AOTAutograd puts the tensor that
it wraps in its place, which requires no gradient. ``torch/_functorch/_aot_autograd/frontend_utils.py``, run on 2.13.0
and 2.14.1, read in 2.12.0 and 2.15.0; 2.11 is right. See docs/upstream/async-collective-input.md.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import fx
from torch.distributed._functional_collectives import AsyncCollectiveTensor

from collective_identity.compat import torch_version

_WRONG_FROM = (2, 12)


def unwaited_inputs(gm: fx.GraphModule, inputs: Iterable[Any]) -> list[str]:
    """Names of the inputs of a captured graph, with their shapes, that this torch gives no gradient."""
    if torch_version() < _WRONG_FROM:
        return []
    names = (node.name for node in gm.graph.nodes if node.op == "placeholder")
    return [
        f"{name} {list(value.shape)}"
        for name, value in zip(names, inputs, strict=False)
        if isinstance(value, AsyncCollectiveTensor) and value.requires_grad
    ]
