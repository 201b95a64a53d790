"""How is this rank's shard of a ``DTensor`` taken outside a graph, and its gradient given back?

Read in 2.11.0 to 2.15.0: ``DTensor(local, spec, requires_grad=)``, ``_local_tensor`` and ``_spec``
(torch/distributed/tensor/_api.py; FSDP2 makes its sharded gradients likewise, ``_from_local_no_grad`` in
torch/distributed/fsdp/_fully_shard/_fsdp_common.py).
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch._dynamo.config as dynamo_config
from torch import fx, nn
from torch.distributed.tensor import DTensor

_PRIM_TO_LOCAL = "prim_to_local"
"""The function into which Dynamo of torch 2.11 wraps ``to_local``, its arguments in the closure."""


class _Shards(torch.autograd.Function):
    """One function for all parameters: their gradients come out of one graph, all at once."""

    @staticmethod
    def forward(ctx: Any, *parameters: Any) -> tuple[torch.Tensor, ...]:
        ctx.specs = [one._spec for one in parameters]
        ctx.set_materialize_grads(False)
        return tuple([one._local_tensor.detach() for one in parameters])  # new objects: autograd writes on them

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> tuple[Any, ...]:  # type: ignore[override]
        make: Any = DTensor
        return tuple([
            None if grad is None else make(own, spec, requires_grad=False)
            for grad, own, spec in zip(grads, _apart(grads), ctx.specs, strict=True)
        ])  # fmt: skip


def _apart(grads: Sequence[torch.Tensor | None]) -> Iterator[torch.Tensor | None]:
    """Each gradient in memory of its own, as autograd sees to where it keeps plain tensors.

    Equal gradients leave a graph as one tensor (common subexpressions); what scales or adds to one parameter's in place
    would write to the other's.
    """
    seen: set[object] = set()
    for grad in grads:
        place = None if grad is None or grad.numel() == 0 else (grad.untyped_storage()._cdata, grad.storage_offset())
        yield grad.clone() if grad is not None and place in seen else grad
        if place is not None:
            seen.add(place)


def shards_of(parameters: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
    """``to_local()`` of each parameter, in one go; each must be what `has_shard` takes."""
    return _Shards.apply(*parameters)  # type: ignore[no-any-return, no-untyped-call]


def has_shard(value: object) -> bool:
    """Whether it is a trained parameter whose shard on this rank is a plain tensor."""
    return (
        isinstance(value, DTensor)
        and isinstance(value, nn.Parameter)
        and value.requires_grad
        and type(value._local_tensor) is torch.Tensor
    )


def takes_shard(node: fx.Node) -> bool:
    """Whether a node of a graph that Dynamo captured is ``to_local()`` as it is, without other placements."""
    if len(node.args) != 1 or node.kwargs:
        return False
    if node.op == "call_method":
        return node.target == "to_local"
    if node.op != "call_function" or getattr(node.target, "__name__", None) != _PRIM_TO_LOCAL:
        return False
    return not any(inspect.getclosurevars(node.target).nonlocals.values())  # type: ignore[arg-type]


def autograd_is_traced() -> bool:
    """Whether Dynamo traces backward as well (compiled autograd)."""
    return bool(getattr(dynamo_config, "compiled_autograd", False))
