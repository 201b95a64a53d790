"""On which device a graph node or a call of an operator is."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import fx
from torch.utils import _pytree as pytree


def node_device(node: fx.Node) -> str | None:
    """The device type of a node's outputs, of its inputs when no output is a tensor; None when it is not one."""
    found = _types(node.meta.get("val"))
    if not found:
        found = {kind for one in node.all_input_nodes for kind in _types(one.meta.get("val"))}
    return found.pop() if len(found) == 1 else None


def call_device(args: Sequence[Any], kwargs: Mapping[str, Any]) -> str | None:
    """The device type of a call: its ``device`` argument, else its tensors', where CPU scalars follow the others."""
    given = kwargs.get("device")
    if given is not None:
        return torch.device(given).type
    tensors = list(_tensors((args, kwargs)))
    found = {one.device.type for one in tensors if one.dim() or one.device.type != "cpu"}
    found = found or {one.device.type for one in tensors}
    return found.pop() if len(found) == 1 else None


def graph_devices(gm: fx.GraphModule, inputs: Sequence[Any]) -> frozenset[str]:
    """Every device type that a captured graph has a tensor on, nested graphs included."""
    found = _types(list(inputs))
    for module in gm.modules():
        if isinstance(module, fx.GraphModule):
            for node in module.graph.nodes:
                found |= _types((node.meta.get("example_value"), node.meta.get("val")))
        found |= _types([*module._parameters.values(), *module._buffers.values()])
    return frozenset(found)


def has_complex(node: fx.Node) -> bool:
    """Whether an output or input is complex: Inductor runs the eager kernel for these, whatever the operator."""
    values = [node.meta.get("val"), *(one.meta.get("val") for one in node.all_input_nodes)]
    return any(one.dtype.is_complex for one in _tensors(values))


def _tensors(tree: Any) -> Iterator[torch.Tensor]:
    return (leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, torch.Tensor))


def _types(tree: Any) -> set[str]:
    return {one.device.type for one in _tensors(tree)}
