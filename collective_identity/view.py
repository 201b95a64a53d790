"""Which part of a graph can decide about its collectives? The networkx view that structure is read from.

Nodes are numbered in topological order, and every table is a list over these numbers: on a million nodes that is
what keeps the cost linear, where dicts keyed by nodes miss the cache. Above a gather, a node with one input says
nothing that the input does not say (but for one that asks it for its size alone), so the networkx graph holds the
*junctions* alone, sources and nodes with several inputs; every other node hangs below one of them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Final, Literal, TypeAlias

import networkx as nx
from torch import fx

from . import compat
from .subgraphs import CONTROL_DEPS
from .transports import Launch, Transport, waits_of

Rules = Literal["extended", "compatible"]
RULES: Final[tuple[Rules, ...]] = ("extended", "compatible")

_Numbered: TypeAlias = "tuple[list[fx.Node], dict[fx.Node, int], list[str], list[object], list[tuple[int, ...]]]"


@dataclass(frozen=True, slots=True)
class View:
    """The cones of one graph that can decide about its collectives.

    Attributes:
        nodes: every node of the graph in topological order; a node's number is its place here.
        number: node → its number.
        ops: by number, `fx.Node.op`.
        targets: by number, `fx.Node.target`.
        inputs: by number, the numbers of its inputs.
        sent: of a node whose inputs are more than what flows into it as data, the numbers of those that do.
        cone: the numbers in the cones, ascending.
        homes: by number, the junction that the node is or hangs below; -1 where no gather is below the node.
        dag: the junctions above gathers as a ``networkx.DiGraph`` of numbers, input → user.
        junctions: its nodes, each after those above it.
        starts: every collective of the graph, in graph order.
        launches: the same by number.
        waits: of each reduce-scatter.
    """

    nodes: Sequence[fx.Node]
    number: Mapping[fx.Node, int]
    ops: Sequence[str]
    targets: Sequence[object]
    inputs: Sequence[tuple[int, ...]]
    sent: Mapping[int, tuple[int, ...]]
    cone: Sequence[int]
    homes: Sequence[int]
    dag: Any
    junctions: Sequence[int]
    starts: Mapping[fx.Node, Launch]
    launches: Mapping[int, Launch]
    waits: Mapping[fx.Node, list[fx.Node]]

    def of(self, transport: Transport) -> dict[fx.Node, Launch]:
        """The collectives of one transport."""
        return {node: launch for node, launch in self.starts.items() if launch.transport is transport}

    def data(self, number: int) -> tuple[int, ...]:
        """What flows into a node as data: not the buffer or group of a collective, an ordering, a tensor's size."""
        return self.sent.get(number, self.inputs[number])


_UNREAD: Final = MappingProxyType(
    dict.fromkeys(
        "sym_size sym_numel sym_stride sym_storage_offset size numel stride storage_offset dim is_contiguous "
        "new_empty new_empty_strided new_full new_ones new_zeros "
        "empty_like full_like ones_like rand_like randint_like randn_like zeros_like".split(),
        "self",
    )
    | dict.fromkeys("expand_as reshape_as type_as view_as".split(), "other")
)
"""Operators that ask an argument for its size, kind or place alone, by name in ``aten``, with that argument.

PyTorch 2.11-2.15 ``aten/src/ATen/native/native_functions.yaml``.
"""

SOURCES: Final = ("placeholder", "get_attr")
"""The ops of nodes where data enters the graph."""


def build_view(starts: Mapping[fx.Node, Launch], rules: Rules) -> View:
    """Collect the ancestors of all-gathers and the descendants of reduce-scatters, and what they lean on.

    Linear in nodes and edges. At least one collective is expected.
    """
    nodes, number, ops, targets, inputs = _numbered(next(iter(starts)).graph)
    waits = {n: waits_of(n) for n, launch in starts.items() if launch.transport is Transport.REDUCE_SCATTER}
    wanted = bytearray(len(nodes))
    for node, launch in starts.items():
        if launch.transport is Transport.ALL_GATHER:
            wanted[number[node]] = True
    _add_ancestors(wanted, inputs)
    launches = {number[node]: launch for node, launch in starts.items()}
    sent = {} if rules == "compatible" else _sent(nodes, targets, inputs, number)
    for i, launch in launches.items():
        data = tuple([number[one] for one in launch.inputs])
        if data != inputs[i]:
            sent[i] = data
    homes, dag = _junctions(wanted, inputs, sent)
    if any(waits.values()):
        below = bytearray(len(nodes))
        for several in waits.values():
            for wait in several:
                below[number[wait]] = True
        _add_descendants(below, inputs)
        if rules == "extended":
            # What a gradient meets later: is it state, or an activation?
            leaned_on = bytearray(map(max, wanted, below))
            _add_ancestors(leaned_on, inputs)
            met = bytearray([flag and op in SOURCES for flag, op in zip(leaned_on, ops, strict=True)])
            _add_descendants(met, inputs)
            below = bytearray(map(max, below, met))
        wanted = bytearray(map(max, wanted, below))
    cone = [i for i, flag in enumerate(wanted) if flag]
    return View(
        nodes=nodes,
        number=number,
        ops=ops,
        targets=targets,
        inputs=inputs,
        sent=sent,
        cone=cone,
        homes=homes,
        dag=dag,
        junctions=tuple(nx.topological_sort(dag)),
        starts=starts,
        launches=launches,
        waits=waits,
    )


def _numbered(graph: fx.Graph) -> _Numbered:
    """Everything asked of every node, asked once: each node is a miss of the cache on a large graph."""
    nodes: list[fx.Node] = []
    number: dict[fx.Node, int] = {}
    ops: list[str] = []
    targets: list[object] = []
    inputs: list[tuple[int, ...]] = []
    try:
        for i, node in enumerate(graph.nodes):
            inputs.append(tuple(map(number.__getitem__, node.all_input_nodes)))
            number[node] = i
            nodes.append(node)
            ops.append(node.op)
            targets.append(node.target)
    except KeyError:  # amid a pass that has not sorted the graph yet
        whole: Any = nx.DiGraph()
        whole.add_nodes_from(graph.nodes)
        whole.add_edges_from((above, node) for node in graph.nodes for above in node.all_input_nodes)
        nodes = list(nx.topological_sort(whole))
        number = {node: i for i, node in enumerate(nodes)}
        inputs = [tuple([number[above] for above in node.all_input_nodes]) for node in nodes]
        ops, targets = [node.op for node in nodes], [node.target for node in nodes]
    return nodes, number, ops, targets, inputs


def _add_ancestors(flags: bytearray, inputs: Sequence[tuple[int, ...]]) -> None:
    for i in range(len(flags) - 1, -1, -1):
        if flags[i]:
            for above in inputs[i]:
                flags[above] = True


def _add_descendants(flags: bytearray, inputs: Sequence[tuple[int, ...]]) -> None:
    for i, above in enumerate(inputs):
        if not flags[i]:
            for one in above:
                if flags[one]:
                    flags[i] = True
                    break


def _sent(
    nodes: Sequence[fx.Node],
    targets: Sequence[object],
    inputs: Sequence[tuple[int, ...]],
    number: Mapping[fx.Node, int],
) -> dict[int, tuple[int, ...]]:
    """What flows into the nodes that ask an input for its size alone, or only wait for it."""
    unread: dict[int, str | None] = {}  # by id of the target
    found: dict[int, tuple[int, ...]] = {}
    for i, target in enumerate(targets):
        try:
            name = unread[id(target)]
        except KeyError:
            name = unread[id(target)] = _unread(target)
        if name is not None and inputs[i]:
            found[i] = tuple([number[one] for one in _read(nodes[i], name)])
    return found


def _unread(target: object) -> str | None:
    """The argument of an operator whose values it does not read, if there is one."""
    if compat.higher_order_name(target) == CONTROL_DEPS:
        return CONTROL_DEPS
    namespace, _, name = (compat.op_name(target) or "").partition("::")
    return _UNREAD.get(name) if namespace == "aten" else None


def _read(node: fx.Node, unread: str) -> tuple[fx.Node, ...]:
    """The inputs of a node whose values it reads."""
    if unread == CONTROL_DEPS:
        given: list[Any] = [*node.args[1:], *node.kwargs.values()]
    else:
        given = [value for name, value in compat.arguments(node).items() if name != unread]
    found: dict[fx.Node, None] = {}
    fx.node.map_arg(tuple(given), lambda one: found.setdefault(one))
    return tuple(found)


def _junctions(
    wanted: bytearray, inputs: Sequence[tuple[int, ...]], sent: Mapping[int, tuple[int, ...]]
) -> tuple[list[int], Any]:
    """The junction of each wanted node, and the graph of the junctions; everything above a wanted node is wanted."""
    homes = [-1] * len(inputs)
    heads: list[int] = []
    edges: list[tuple[int, int]] = []
    for i, flag in enumerate(wanted):
        if not flag:
            continue
        above = inputs[i]
        if len(above) == 1 and i not in sent:
            homes[i] = homes[above[0]]
        else:
            homes[i] = i
            heads.append(i)
            edges += [(homes[one], i) for one in above]
    dag: Any = nx.DiGraph()
    dag.add_nodes_from(heads)
    dag.add_edges_from(edges)
    return homes, dag
