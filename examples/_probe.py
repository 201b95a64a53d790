"""Which parameters backward needs, found out without FSDP2, without a compiler and without memory for weights."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only


def parameters_saved_for_backward(model: nn.Module, *args: Any) -> frozenset[str]:
    """Return the names of the parameters that autograd keeps for the backward pass of ``model(*args)``.

    Under FSDP2 these are the parameters a resharded group must gather again in backward. ``model`` is the plain
    model, before ``fully_shard`` and tensor parallelism; its own tensors are left alone. A forward pass runs on
    copies on the meta device (shapes and dtypes only), and every tensor that autograd saves is matched with a
    parameter by the storage they share, so that views (a transposed weight) count. Frozen parameters are kept
    frozen: one that only frozen layers stand before is not needed, and not named.

    Returns
    -------
    Fully qualified names as in ``model.named_parameters(remove_duplicate=False)``: a tied parameter that is
    saved appears under each of its names.
    """
    twins: dict[Tensor, nn.Parameter] = {}
    names: dict[int, set[str]] = {}
    state: dict[str, Tensor] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if parameter not in twins:
            empty = torch.empty_like(parameter, device="meta")
            twins[parameter] = nn.Parameter(empty, requires_grad=parameter.requires_grad)
        state[name] = twins[parameter]
        names.setdefault(state[name].untyped_storage()._cdata, set()).add(name)
    for name, buffer in model.named_buffers(remove_duplicate=False):
        state[name] = buffer.to("meta")

    saved: set[str] = set()

    def keep(tensor: Tensor) -> Tensor:
        saved.update(names.get(tensor.untyped_storage()._cdata, ()))
        return tensor

    inputs = tree_map_only(Tensor, lambda tensor: tensor.to("meta"), args)
    with torch.enable_grad(), torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        torch.func.functional_call(model, state, inputs)
    return frozenset(saved)
