"""What hostile graphs are made of: FSDP's collectives, out= gathers, and operators that run behind others."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from collective_identity.subgraphs import CONTROL_DEPS
from tests.graphs import Builder, Collective, aten

C = torch.ops._c10d_functional
UNSHARD, REDUCE, REPLICATE = "fsdp.param_unshard", "fsdp.grad_reduce_shard", "fsdp.grad_replicate_reduce"
TP = "tp.activation"
Made = tuple[Builder, list[fx.Node]]


def gather(b: Builder, x: fx.Node, **given: Any) -> fx.Node:
    return b.all_gather(x, **{"role": UNSHARD, **given}).wait


def scatter(b: Builder, x: fx.Node, **given: Any) -> fx.Node:
    return b.reduce_scatter(x, **{"role": REDUCE, "op": "sum", **given}).wait


def reduce(b: Builder, x: fx.Node, **given: Any) -> fx.Node:
    return b.all_reduce(x, **{"role": REPLICATE, **given}).wait


def late(made: Collective) -> fx.Node:
    """The wait of a collective, moved to the end of the graph so far."""
    last = list(made.start.graph.nodes)[-1]
    if last is not made.wait:
        last.append(made.wait)
    return made.wait


def inputs(b: Builder, count: int, shape: tuple[int, ...] = (4, 8), **given: Any) -> list[fx.Node]:
    return [b.placeholder(f"x{i}", shape, **given) for i in range(count)]


def add(b: Builder, *values: fx.Node, **given: Any) -> fx.Node:
    return b.call(aten.add.Tensor, *values, **given)


def out_gather(b: Builder, x: fx.Node, buffer: fx.Node) -> fx.Node:
    start = b.graph.call_function(C.all_gather_into_tensor_out.default, (x, 2, "dp"), {"out": buffer})
    start.meta["val"] = buffer.meta["val"]
    return start


def control(b: Builder, behind: list[fx.Node], target: Any, *args: Any) -> fx.Node:
    """The operator in a ``control_deps`` that makes it run behind others, as torch's overlap scheduler wraps it."""
    graph = fx.Graph()
    given = [a for a in args if isinstance(a, fx.Node)]
    inner = {}
    for i, node in enumerate(given):
        inner[node] = graph.placeholder(f"a{i}")
        inner[node].meta["val"] = node.meta["val"]
    made = graph.call_function(target, tuple(inner.get(a, a) if isinstance(a, fx.Node) else a for a in args))
    if target is C.all_gather_into_tensor.default:
        shape = given[0].meta["val"].shape
        made.meta["val"] = b.empty((shape[0] * 2, *shape[1:]))
    else:
        with b.fake:
            made.meta["val"] = target(*(a.meta["val"] if isinstance(a, fx.Node) else a for a in args))
    graph.output(made)
    name = f"behind_{len(b.graph.nodes)}"
    setattr(b.root, name, fx.GraphModule(torch.nn.Module(), graph))
    body = b.graph.get_attr(name)
    node = b.graph.call_function(getattr(torch.ops.higher_order, CONTROL_DEPS), (tuple(behind), body, *given))
    node.meta["val"] = made.meta["val"]
    return node
