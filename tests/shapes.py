"""Graphs of every shape that might cost more than its nodes and edges, of any size, with fake values.

gm = built(chain, 100)
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode

from tests.graphs import aten

C = torch.ops._c10d_functional
CAST = torch.ops.prims.convert_element_type.default


@functools.cache
def fake(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    with FakeTensorMode():
        return torch.empty(shape, dtype=dtype)


class Nodes:
    """Calls without computing their values: every node has the same one."""

    def __init__(self) -> None:
        self.value = fake((4, 8), torch.float32)
        self.graph = fx.Graph()
        self.modules: dict[str, torch.nn.Module] = {}

    def placeholder(self, name: str) -> fx.Node:
        return self.noted(self.graph.placeholder(name))

    def call(self, target: Any, *args: Any) -> fx.Node:
        return self.noted(self.graph.call_function(target, args))

    def narrow(self, name: str) -> fx.Node:
        """A parameter of one byte an element."""
        return self.noted(self.graph.placeholder(name), fake((4, 8), torch.uint8))

    def scale(self, name: str) -> fx.Node:
        """A block scale of such a parameter."""
        return self.noted(self.graph.placeholder(name), fake((4, 1), torch.float32))

    def quantised(self, *given: fx.Node) -> fx.Node:
        return self.noted(self.graph.call_function(aten.mul.Tensor, given), fake((4, 8), torch.uint8))

    def gathered(self, node: fx.Node) -> fx.Node:
        return self.call(C.wait_tensor.default, self.call(C.all_gather_into_tensor.default, node, 2, "dp"))

    def scattered(self, node: fx.Node) -> fx.Node:
        start = self.call(C.reduce_scatter_tensor.default, node, "avg", 2, "dp")
        return self.call(C.wait_tensor.default, start)

    def noted(self, node: fx.Node, value: torch.Tensor | None = None) -> fx.Node:
        node.meta["val"] = self.value if value is None else value
        return node

    def module(self, *outputs: fx.Node) -> fx.GraphModule:
        """Without the code, which nothing here runs."""
        self.graph.output(outputs)
        gm = fx.GraphModule(torch.nn.Module(), fx.Graph())
        for name, module in self.modules.items():
            setattr(gm, name, module)
        gm._graph = self.graph
        self.graph.owning_module = gm
        return gm

    def run(self, module: fx.GraphModule, given: fx.Node) -> fx.Node:
        """A higher-order operator that runs a sub-graph."""
        name = f"body{len(self.modules)}"
        self.modules[name] = module
        return self.call(torch.ops.higher_order.invoke_subgraph, self.graph.get_attr(name), name, given)


def chain(g: Nodes, size: int) -> list[fx.Node]:
    """Each gather below all that came before."""
    value, out = g.placeholder("w"), []
    for _ in range(size):
        value = g.call(aten.relu.default, value)
        out.append(g.gathered(value))
    return out


def joins(g: Nodes, size: int) -> list[fx.Node]:
    """Two inputs that meet again and again."""
    value, other, out = g.placeholder("w"), g.placeholder("x"), []
    for _ in range(size):
        value = g.call(aten.add.Tensor, value, other)
        out.append(g.gathered(value))
    return out


def accumulated(g: Nodes, size: int) -> list[fx.Node]:
    """Every gradient into one sum."""
    total = g.placeholder("total")
    for i in range(size):
        total = g.call(aten.add.Tensor, total, g.scattered(g.placeholder(f"g{i}")))
    return [total]


def clipped(g: Nodes, size: int) -> list[fx.Node]:
    """Every gradient into one operator of all, and on."""
    waits = [g.scattered(g.placeholder(f"g{i}")) for i in range(size)]
    norm = g.call(aten.relu.default, g.call(aten.cat.default, waits))
    return [g.call(aten.mul.Tensor, wait, norm) for wait in waits]


def scaled(g: Nodes, size: int) -> list[fx.Node]:
    """One parameter and one block scale, gathered again and again on the way of both."""
    param, scale, out = g.narrow("w"), g.scale("s"), []
    value = param
    for _ in range(size):
        value = g.quantised(value, g.call(aten.expand.default, scale, [4, 8]))
        out.append(g.gathered(value))
    return out


def late(g: Nodes, size: int) -> list[fx.Node]:
    """One block scale that comes to many parameters by a long way."""
    params = [g.narrow(f"w{i}") for i in range(size)]
    way = g.scale("s")
    for _ in range(size):
        way = g.call(aten.clone.default, way)
    return [g.gathered(g.quantised(param, way)) for param in params]


def mixed(g: Nodes, size: int) -> list[fx.Node]:
    """A block scale for each parameter, and all parameters into one line."""
    params, line = [g.narrow(f"w{i}") for i in range(size)], g.narrow("x")
    out = [g.gathered(g.quantised(param, g.scale(f"s{i}"))) for i, param in enumerate(params)]
    for param in params:
        line = g.quantised(line, param)
    return [*out, line]


def pieces(g: Nodes, size: int) -> list[fx.Node]:
    """A block scale in as many pieces, joined again."""
    param, scale = g.narrow("w"), g.scale("s")
    parts = [g.call(aten.slice.Tensor, scale, 0, i, i + 1) for i in range(size)]
    return [g.gathered(g.quantised(param, g.call(aten.cat.default, parts)))]


def alternating(g: Nodes, size: int) -> list[fx.Node]:
    """Gathers and reduce-scatters in one line, each below all before, with a join in between."""
    value, other = g.placeholder("w"), g.placeholder("x")
    for _ in range(size):
        value = g.call(aten.add.Tensor, g.scattered(g.gathered(g.call(CAST, value, torch.float32))), other)
    return [value]


def coalesced(g: Nodes, size: int) -> list[fx.Node]:
    """All parameters in one gather."""
    start = g.call(C.all_gather_into_tensor_coalesced.default, [g.placeholder(f"w{i}") for i in range(size)], 2, "dp")
    return [g.call(C.wait_tensor.default, g.call(operator.getitem, start, i)) for i in range(size)]


def one_of_each(g: Nodes, group: str) -> fx.Node:
    """A gather and an all-reduce on a group, and a reduce-scatter."""
    gathered = g.call(C.wait_tensor.default, g.call(C.all_gather_into_tensor.default, g.placeholder("w"), 2, group))
    return g.scattered(g.call(C.wait_tensor.default, g.call(C.all_reduce.default, gathered, "sum", group)))


def subgraphs(g: Nodes, size: int) -> list[fx.Node]:
    """A sub-graph for each group."""
    given, out = g.placeholder("x"), []
    for i in range(size // 10):
        inner = Nodes()
        out.append(g.run(inner.module(one_of_each(inner, f"group{i}")), given))
    return out


def waited(g: Nodes, size: int) -> list[fx.Node]:
    """Many waits for one reduce-scatter."""
    start = g.call(C.reduce_scatter_tensor.default, g.placeholder("g"), "avg", 2, "dp")
    return [g.call(C.wait_tensor.default, start) for _ in range(size)]


def groups(g: Nodes, size: int) -> list[fx.Node]:
    """As many groups as collectives."""
    return [one_of_each(g, f"group{i}") for i in range(size)]


def users(g: Nodes, size: int) -> list[fx.Node]:
    """Gathers and views of one view."""
    view = g.call(aten.view.default, g.placeholder("w"), [4, 8])
    return [g.gathered(view) if i % 2 else g.call(aten.view.default, view, [8, 4]) for i in range(size)]


def scattered_at_once(g: Nodes, size: int) -> list[fx.Node]:
    """All gradients in one reduce-scatter, and all into one operator over lists."""
    sent = [g.placeholder(f"g{i}") for i in range(size)]
    start = g.call(C.reduce_scatter_tensor_coalesced.default, sent, "avg", 2, "dp")
    waits = [g.call(C.wait_tensor.default, g.call(operator.getitem, start, i)) for i in range(size)]
    updated = g.call(aten._foreach_add.List, [g.placeholder(f"w{i}") for i in range(size)], waits)
    return [g.call(operator.getitem, updated, i) for i in range(size)]


def sizes(g: Nodes, size: int) -> list[fx.Node]:
    """Gathers along a line that is cut to the size of another input again and again."""
    value, other, out = g.placeholder("w"), g.placeholder("x"), []
    for _ in range(size):
        other = g.call(aten.zeros_like.default, other)
        value = g.call(aten.slice.Tensor, value, 0, 0, g.call(aten.sym_size.int, other, 0))
        out.append(g.gathered(value))
    return out


def nested(g: Nodes, size: int) -> list[fx.Node]:
    """Sub-graphs in sub-graphs."""
    inner = Nodes()
    module = inner.module(one_of_each(inner, "dp"))
    for _ in range(size // 10):
        outer = Nodes()
        module = outer.module(outer.run(module, one_of_each(outer, "dp")))
    return [g.run(module, g.placeholder("x"))]


def buffers(g: Nodes, size: int) -> list[fx.Node]:
    """Gathers into views of one buffer, one of the other."""
    buffer, out = g.placeholder("buffer"), []
    for i in range(size):
        buffer = g.call(aten.view.default, buffer, [4, 8])
        given = (g.placeholder(f"w{i}"), 2, "dp")
        start = g.graph.call_function(C.all_gather_into_tensor_out.default, given, {"out": buffer})
        out.append(g.call(C.wait_tensor.default, g.noted(start)))
    return out


SHAPES = (chain, joins, accumulated, clipped, scaled, late, mixed, alternating, coalesced, subgraphs)
MORE_SHAPES = (pieces, waited, groups, users, scattered_at_once, sizes, nested, buffers)


def built(shape: Callable[[Nodes, int], list[fx.Node]], size: int) -> fx.GraphModule:
    g = Nodes()
    return g.module(*shape(g, size))
