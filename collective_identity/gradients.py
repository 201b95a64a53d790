"""Where does a reduce-scatter's result go? The ``extended`` rule set's additions for gradient reductions.

Torch wants unary operators up to the outputs. Here a gradient may also meet state on its way out: an
accumulator, another gradient, an in-graph optimizer with its clipping. A partial activation that meets a
residual is none: the residual is also used in a computation.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from typing import Any, Final

import torch
from torch import fx

from . import compat
from .sources import is_single, is_source, value_of
from .transports import Launch, Transport, is_wait, launch_of

_VIEWS: Final = frozenset(
    "view _unsafe_view reshape expand unsqueeze squeeze permute transpose t alias detach clone contiguous "
    "slice split split_with_sizes narrow select constant_pad_nd cat stack _to_copy copy copy_ unbind "
    "as_strided".split()
)
_TO_ONE_ELEMENT: Final = frozenset("sum mean amax max norm linalg_vector_norm any all prod _local_scalar_dense".split())
_CREATORS: Final = frozenset("full full_like zeros zeros_like ones ones_like empty empty_like scalar_tensor".split())
_OPTIMIZERS: Final = ("_foreach_", "_amp_foreach_", "_fused_adam", "_fused_sgd", "_fused_adagrad")


def gradient_scatters(
    order: Sequence[fx.Node],
    asked: Sequence[tuple[fx.Node, Launch]],
    waits: Mapping[fx.Node, Sequence[fx.Node]],
) -> set[fx.Node]:
    """The reduce-scatters of ``asked`` whose result meets nothing but state on its way out.

    Args:
        order: the descendants of their waits, and of every source those meet, in topological order.
        asked: reduce-scatters.
        waits: of each.
    """
    if not asked:
        return set()
    gradients, activations = _sort_out(order)
    spoiled: set[fx.Node] = set()
    for node in reversed(order):
        if node in gradients and any(
            user in spoiled or not _meets_state(user, activations) for user in node.users if not _leaves(user)
        ):
            spoiled.add(node)
    return {
        start
        for start, _ in asked
        if waits[start] and all(w.users and w in gradients and w not in spoiled for w in waits[start])
    }


def _sort_out(order: Sequence[fx.Node]) -> tuple[set[fx.Node], set[fx.Node]]:
    """The nodes that hold reduced gradients alone or with state, and those that hold any activation."""
    computed_with: set[fx.Node] = set()  # its value reaches a contraction, a norm, or something unknown
    for node in reversed(order):
        if not _is_update(node) or any(u in computed_with for u in node.users if not _leaves(u)):
            computed_with.add(node)
    gradients: set[fx.Node] = set()
    activations: set[fx.Node] = set()
    for node in order:
        if _transport(node) is Transport.REDUCE_SCATTER:
            gradients.add(node)
        elif is_source(node):
            if node in computed_with and not _is_scalar(node):
                activations.add(node)
        elif not _is_update(node) or any(i in activations for i in node.all_input_nodes):
            if not _is_scalar(node):
                activations.add(node)
        elif any(i in gradients for i in node.all_input_nodes):
            gradients.add(node)
    return gradients, activations


def _transport(node: fx.Node) -> Transport | None:
    launch = launch_of(node)
    return None if launch is None else launch.transport


def _leaves(node: fx.Node) -> bool:
    """Whether a value is done here: returned, or an updated parameter gathered for the next use."""
    return node.op == "output" or _transport(node) is Transport.ALL_GATHER


def _meets_state(node: fx.Node, activations: set[fx.Node]) -> bool:
    """Whether a node below a gradient is an update whose operands are state of the gradient's own shape."""
    if not _is_update(node):
        return False
    shape = _shape(node)
    for operand in node.all_input_nodes:
        if operand in activations:
            return False
        if shape is not None and _is_pointwise(node) and not _is_scalar(operand) and _shape(operand) != shape:
            return False
    return True


def _is_update(node: fx.Node) -> bool:
    """Whether gradients may pass: pointwise, views, reductions to one element, optimizers, all-reduces."""
    if node.op == "output" or is_source(node) or node.target is operator.getitem or is_wait(node):
        return True
    transport = _transport(node)
    if transport is not None:
        return transport in (Transport.ALL_REDUCE, Transport.REDUCE_SCATTER)
    name = (compat.op_name(node.target) or "").partition("::")[2]
    if name in _TO_ONE_ELEMENT:
        return _is_scalar(node)
    if name in _VIEWS or name in _CREATORS or name.startswith(_OPTIMIZERS) or name == "convert_element_type":
        return True
    return _is_pointwise(node)


def _is_pointwise(node: fx.Node) -> bool:
    overload = compat.op_overload_of(node.target)
    return overload is not None and torch.Tag.pointwise in overload.tags


def _is_scalar(node: fx.Node) -> bool:
    """Whether the node holds one element, or no tensor at all (a size, a Python number)."""
    value = value_of(node)
    if isinstance(value, (list, tuple)):
        return False
    return not isinstance(value, torch.Tensor) or is_single(value)


def _shape(node: fx.Node) -> tuple[Any, ...] | None:
    value = value_of(node)
    return tuple(value.shape) if isinstance(value, torch.Tensor) else None
