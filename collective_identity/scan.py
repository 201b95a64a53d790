"""Where in a graph are the collectives, and where the payloads? One look at each node, for every question."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import fx

from . import store
from .subgraphs import graph_modules, wrapped_bodies
from .transports import Launch, launches


@dataclass(frozen=True, slots=True)
class GraphScan:
    """One graph or sub-graph.

    Attributes:
        module: the module that owns the graph.
        launches: start node → what it launches, in graph order.
        strays: nodes with a payload that launch no collective, in graph order; last, nodes in the bodies of
            ``control_deps``, whose collective is the node that runs them.
        runners: node in such a body → the nodes of this graph that run it.
    """

    module: fx.GraphModule
    launches: Mapping[fx.Node, Launch]
    strays: tuple[fx.Node, ...]
    runners: Mapping[fx.Node, tuple[fx.Node, ...]]


def scan_graphs(gm: fx.GraphModule) -> tuple[GraphScan, ...]:
    """The graph, then its sub-graphs, outer before inner. Reads only; linear in nodes."""
    found = []
    for module in graph_modules(gm):
        starts = launches(module)
        strays = tuple(n for n in store.payload_nodes(module.graph) if n not in starts)
        runners = {
            node: owners for body, owners in wrapped_bodies(module) for node in store.payload_nodes(body.graph)
        }
        found.append(GraphScan(module, starts, (*strays, *runners), runners))
    return tuple(found)
