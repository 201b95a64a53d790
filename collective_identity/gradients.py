"""Where does a reduce-scatter's result go? The ``extended`` rule set's additions for gradient reductions.

Torch wants unary operators up to the outputs. Here a gradient may also meet state on its way out: an
accumulator, another gradient, an in-graph optimizer with its clipping. A partial activation that meets a
residual is none: the residual is also used in a computation.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Mapping
from typing import Any, Final

import torch
from torch import fx

from . import compat
from .sources import is_scalar, value_of
from .transports import Launch, Transport, is_wait
from .view import SOURCES, View

_VIEWS: Final = frozenset(
    "view _unsafe_view reshape expand unsqueeze squeeze permute transpose t alias detach clone contiguous "
    "slice split split_with_sizes narrow select constant_pad_nd cat stack _to_copy copy copy_ unbind "
    "as_strided slice_scatter select_scatter diagonal_scatter as_strided_scatter".split()
)
_TO_ONE_ELEMENT: Final = frozenset("sum mean amax max norm linalg_vector_norm any all prod _local_scalar_dense".split())
_CREATORS: Final = frozenset("full full_like zeros zeros_like ones ones_like empty empty_like scalar_tensor".split())
_CAST: Final = "convert_element_type"
# Pointwise operators that optimizers use. A gradient that meets another (gelu, sigmoid, exp) is an activation.
_LINEAR: Final = frozenset("add sub rsub neg lerp addcmul addcdiv where fill nan_to_num".split())
_SCALING: Final = frozenset("mul div".split())  # linear in the gradient if the other operand is one element
_CURVED: Final = frozenset(
    "sqrt rsqrt reciprocal pow square abs sign sgn clamp clamp_min clamp_max maximum minimum copysign isinf isnan "
    "isfinite eq ne lt le gt ge logical_and logical_or logical_not bitwise_and bitwise_or bitwise_not".split()
)
_OPTIMIZERS: Final = ("_foreach_", "_amp_foreach_", "_fused_adam", "_fused_sgd", "_fused_adagrad")


def gradient_scatters(view: View, asked: Mapping[fx.Node, Launch]) -> tuple[set[fx.Node], set[fx.Node]]:
    """The reduce-scatters of ``asked``, of the view, whose result meets nothing but state on its way out; and the
    all-reduces below any that add up measures of what was reduced, a gradient norm's, and no gradients."""
    if not asked:
        return set(), set()
    flow = _Flow(view)
    spoiled, reaches = bytearray(len(view.nodes)), bytearray(len(view.nodes))
    for i in reversed(view.cone):
        met = [above for above in view.inputs[i] if flow.gradient[above]]
        if not met:
            continue
        if flow.leaves[i] or not flow.scalar[i]:
            for above in met:
                reaches[above] |= flow.leaves[i] or flow.writes[i] or reaches[i]
        wrong = not flow.leaves[i] and (spoiled[i] or not flow.meets_state(i))
        for above in met:
            # A coefficient made from gradients, a norm's, may scale anything.
            if not flow.scalar[above] and (wrong or (flow.leaves[i] and flow.curved[above])):
                spoiled[above] = True

    def is_gradient(wait: fx.Node) -> bool:
        number = view.number[wait]
        return bool(wait.users) and bool(flow.gradient[number] and reaches[number]) and not spoiled[number]

    measures = {view.nodes[i] for i, launch in view.launches.items() if launch.transport is Transport.ALL_REDUCE}
    return (
        {start for start in asked if view.waits[start] and all(map(is_gradient, view.waits[start]))},
        {node for node in measures if flow.measured[view.number[node]]},
    )


class _Flow:
    """What flows where, by number.

    Attributes:
        leaves: a value is done here: returned, or an updated parameter gathered for the next use.
        update: gradients may pass: pointwise, views, reductions to one element, optimizers, all-reduces.
        gradient: holds reduced gradients, alone or with state.
        activation: holds any activation.
        scalar: one element, or no tensor.
        curved: a gradient that is no longer linear in what was reduced, and has not been added to state since.
        measured: made of gradients only by way of their norms, sums, or what else is curved.
        state: an input or attribute itself, by views and updates in place.
        writes: state is updated in place.
    """

    def __init__(self, view: View) -> None:
        self._view = view
        self._kinds: dict[int, tuple[str, bool, str]] = {}  # by id of the target
        size = len(view.nodes)
        self.leaves, self.update = bytearray(size), bytearray(size)
        self.gradient, self.activation = bytearray(size), bytearray(size)
        self.scalar, self.curved, self.measured = bytearray(size), bytearray(size), bytearray(size)
        self.state, self.writes = bytearray(size), bytearray(size)
        for i in view.cone:
            self._look_at(i)
        self._sort_out()

    def _look_at(self, number: int) -> None:
        op = self._view.ops[number]
        if op != "call_function":
            self.state[number] = op in SOURCES
            self.leaves[number] = op == "output"
            self.update[number] = op == "output" or op in SOURCES
            return
        launch = self._view.launches.get(number)
        if launch is not None:
            self.leaves[number] = launch.transport is Transport.ALL_GATHER
            self.update[number] = launch.transport in (Transport.ALL_REDUCE, Transport.REDUCE_SCATTER)
            self.gradient[number] = launch.transport is Transport.REDUCE_SCATTER
            return
        kind, _, name = self._kind(number)
        in_place = name.endswith("_") and not name.endswith("__")
        if in_place or name in _VIEWS:
            self.state[number] = self._is_state(self._view.nodes[number])
            self.writes[number] = in_place and self.state[number]
        if kind == "passes":
            self.update[number] = True
        elif kind == "to_one_element":
            self.update[number] = is_scalar(self._view.nodes[number])
        else:
            self.update[number] = is_wait(self._view.nodes[number])

    def _sort_out(self) -> None:
        """Tell nodes that hold gradients, alone or with state, from those that hold any activation."""
        nodes, ops, inputs = self._view.nodes, self._view.ops, self._view.inputs
        computed_with = bytearray(len(nodes))  # its value reaches a contraction, a norm, or something unknown
        for i in reversed(self._view.cone):
            if not self.update[i]:
                computed_with[i] = True
            if computed_with[i] and not self.leaves[i]:
                for above in inputs[i]:
                    computed_with[above] = True
        for i in self._view.cone:
            self.scalar[i] = is_scalar(nodes[i])
            if self.gradient[i]:
                continue
            if ops[i] in SOURCES:
                self.activation[i] = computed_with[i] and not is_scalar(nodes[i])
            elif not self.update[i] or (_any(self.activation, inputs[i]) and not self._is_list_update(i)):
                self.activation[i] = not self.scalar[i]
            elif _any(self.gradient, inputs[i]):
                self.gradient[i] = True
                self.curved[i] = self._curves(i)
                met = [above for above in inputs[i] if self.gradient[above]]
                self.measured[i] = self._measures(i) or all(self.measured[one] or self.curved[one] for one in met)

    def _measures(self, number: int) -> bool:
        kind, _, name = self._kind(number)
        return kind == "to_one_element" or name == "_foreach_norm"

    def _is_state(self, node: fx.Node) -> bool:
        """Whether what an operator looks at, or updates in place, is state; of a list its first tensor tells."""
        first = node.args[0] if node.args else None
        if isinstance(first, (list, tuple)):
            first = first[0] if first else None
        return isinstance(first, fx.Node) and bool(self.state[self._view.number[first]])

    def _is_list_update(self, number: int) -> bool:
        """An operator over a list of gradients and states, some computed here: nothing but optimizers uses these."""
        return bool(self.update[number]) and self._kind(number)[2].startswith(_OPTIMIZERS)

    def _curves(self, number: int) -> bool:
        inputs = [above for above in self._view.inputs[number] if not self.scalar[above]]
        if self.scalar[number]:
            return False
        name = self._kind(number)[2].removesuffix("_")
        if name in _CURVED or (name in _SCALING and len(inputs) > 1):
            return True
        if name in _SCALING and _is_product_with_itself(self._view.nodes[number]):
            return True
        added = name in _LINEAR and not all(self.gradient[above] for above in inputs)
        return not added and _any(self.curved, inputs) and not self._is_list_update(number)

    def meets_state(self, number: int) -> bool:
        """Whether a node below a gradient is an update whose operands are state of the gradient's own shape."""
        if not self.update[number]:
            return False
        if self._is_list_update(number):
            return True
        nodes, node = self._view.nodes, self._view.nodes[number]
        shape = _shape(node) if self._kind(number)[1] else None
        for operand in self._view.inputs[number]:
            if self.activation[operand]:
                return False
            if shape is not None and not is_scalar(nodes[operand]) and not _same(_shape(nodes[operand]), shape):
                return False
        return True

    def _kind(self, number: int) -> tuple[str, bool, str]:
        """What an operator does to a gradient, whether it is pointwise, and its name."""
        target = self._view.targets[number]
        found = self._kinds.get(id(target))
        if found is None:
            found = self._kinds[id(target)] = _kind_of(target)
        return found


def _any(flags: bytearray, numbers: Iterable[int]) -> bool:
    for number in numbers:
        if flags[number]:
            return True
    return False


def _is_product_with_itself(node: fx.Node) -> bool:
    return len(node.args) > 1 and isinstance(node.args[1], fx.Node) and node.args[0] is node.args[1]


def _kind_of(target: object) -> tuple[str, bool, str]:
    if target is operator.getitem:
        return "passes", False, ""
    name = (compat.op_name(target) or "").partition("::")[2]
    overload = compat.op_overload_of(target)
    pointwise = overload is not None and torch.Tag.pointwise in overload.tags
    if name in _TO_ONE_ELEMENT:
        return "to_one_element", pointwise, name
    if pointwise and name.removesuffix("_") not in _LINEAR | _SCALING | _CURVED | _VIEWS | _CREATORS:
        return "asks", False, name
    if pointwise or name in _VIEWS or name in _CREATORS or name.startswith(_OPTIMIZERS) or name == _CAST:
        return "passes", pointwise, name
    return "asks", False, name  # a wait, or the wrapped body of one, else nothing passes


def _same(one: tuple[Any, ...] | None, other: tuple[Any, ...]) -> bool:
    """Whether two shapes are known to be equal; symbols that may differ, or stand for no known size, leave it open."""
    return one is not None and len(one) == len(other) and all(map(compat.surely_equal, one, other))


def _shape(node: fx.Node) -> tuple[Any, ...] | None:
    value = value_of(node)
    return tuple(value.shape) if isinstance(value, torch.Tensor) else None
