"""Graphs made by hand, of any size, as post-grad passes see FSDP2 training and its worst cases."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode

from collective_identity import GRAD_REDUCE_SHARD, PARAM_UNSHARD, Identity, Source, stamp
from collective_identity.transports import WAIT, Transport, default_overload

aten = torch.ops.aten
CAST = torch.ops.prims.convert_element_type.default
GROUP = "dp"
PER_UNIT = 17
"""Nodes of one unit of `training`."""


class Nodes:
    """A graph that grows; every input has the same fake value, and so has what no shape rule looks at."""

    def __init__(self, shape: tuple[int, ...] = (4, 4)) -> None:
        with FakeTensorMode():
            self.value = torch.empty(shape)
            self.gathered = torch.empty(shape[0] * 2, *shape[1:])
            self.scattered = torch.empty(shape[0] // 2, *shape[1:])
        self.graph = fx.Graph()

    def placeholder(self, name: str) -> fx.Node:
        return self._with_value(self.graph.placeholder(name), self.value)

    def call(self, target: Any, *args: Any, like: fx.Node | None = None) -> fx.Node:
        """A node with the value of ``like``, or of the inputs."""
        return self._with_value(self.graph.call_function(target, args), like.meta["val"] if like else self.value)

    def all_gather(self, sent: fx.Node, group: str = GROUP) -> fx.Node:
        target = default_overload(Transport.ALL_GATHER)
        return self._with_value(self.graph.call_function(target, (sent, 2, group)), self.gathered)

    def reduce_scatter(self, sent: fx.Node, group: str = GROUP) -> fx.Node:
        target = default_overload(Transport.REDUCE_SCATTER)
        return self._with_value(self.graph.call_function(target, (sent, "avg", 2, group)), self.scattered)

    def module(self, *outputs: fx.Node) -> fx.GraphModule:
        """The module around the graph; no code is generated, which for a million nodes would take minutes."""
        self.graph.output(outputs)
        gm = fx.GraphModule(torch.nn.Module(), fx.Graph())
        gm._graph = self.graph
        self.graph.owning_module = gm
        return gm

    def _with_value(self, node: fx.Node, value: torch.Tensor) -> fx.Node:
        node.meta["val"] = value
        return node


def training(nodes: int, *, explicit: bool) -> fx.GraphModule:
    """Forward and backward of a chain of layers: per unit one parameter gather and one gradient reduce-scatter.

    Args:
        nodes: about how many.
        explicit: stamp every collective as its producer would.
    """
    made = Nodes()
    units = max(1, nodes // PER_UNIT)
    value, saved, gradients = made.placeholder("x"), [], []
    for index in range(units):
        start = made.all_gather(made.call(CAST, made.placeholder(f"p{index}"), torch.bfloat16))
        weight = made.call(aten.slice.Tensor, made.call(WAIT, start), 0, 0, 4)
        saved.append((value, weight))
        product = made.call(aten.mm.default, value, weight)
        value = made.call(aten.add.Tensor, made.call(aten.relu.default, product), value)
        if explicit:
            stamp(start, _identity(PARAM_UNSHARD, index))
    gradient = made.call(aten.relu.default, value)
    for index, (entered, weight) in reversed(list(enumerate(saved))):
        masked = made.call(aten.mul.Tensor, gradient, entered)
        start = made.reduce_scatter(made.call(aten.mm.default, made.call(aten.t.default, entered), masked))
        gradients.append(made.call(CAST, made.call(WAIT, start), torch.float32))
        back = made.call(aten.mm.default, masked, made.call(aten.t.default, weight))
        gradient = made.call(aten.add.Tensor, back, gradient)
        if explicit:
            stamp(start, _identity(GRAD_REDUCE_SHARD, index))
    return made.module(*gradients)


def deep_ancestry(collectives: int) -> fx.GraphModule:
    """Gathers along one chain from one placeholder: the n-th has n ancestors, which torch walks every time."""
    made = Nodes()
    value, gathered = made.placeholder("x"), []
    for _ in range(collectives):
        value = made.call(aten.relu.default, value)
        gathered.append(made.call(WAIT, made.all_gather(value)))
    return made.module(*gathered)


def joins(collectives: int) -> fx.GraphModule:
    """Gathers along a line where at every step another input joins: the most that networkx can get to do."""
    made = Nodes()
    value, gathered = made.placeholder("x"), []
    for index in range(collectives):
        value = made.call(aten.add.Tensor, value, made.placeholder(f"y{index}"))
        gathered.append(made.call(WAIT, made.all_gather(value)))
    return made.module(*gathered)


def _identity(role: str, index: int) -> Identity:
    return Identity(1, role, Source.EXPLICIT, "fsdp2", GROUP, f"layers.{index}", (f"layers.{index}.weight",))
