"""What must stay in order although no value flows between the nodes? Writes, random numbers, effects."""

from __future__ import annotations

import operator
from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from types import MappingProxyType

import torch
from torch import fx

from collective_identity.transports import is_start, is_wait, launch_of

from ..uses import behind
from .effects import Effect, EffectReader


@dataclass(frozen=True, slots=True)
class Hazards:
    """Order that the data flow does not show.

    Attributes:
        before: position of a node → positions of nodes that must stay before it.
        writes: sorted positions of the nodes that write, or may write, a watched tensor.
    """

    before: Mapping[int, Sequence[int]]
    writes: tuple[int, ...]

    def epoch(self, position: int) -> int:
        """How many writes to watched tensors come before a position; equal for two nodes: none in between."""
        return bisect_left(self.writes, position)


def hazards_of(nodes: Sequence[fx.Node], watched: Iterable[fx.Node]) -> Hazards:
    """The hazards of a graph; linear in nodes and edges.

    Memory is told apart by what views declare, and by the storages of ``meta['val']`` where tracing recorded
    that two values share one. A write is ordered against every read of the same memory; a node of unknown
    behaviour against everything. A collective is under way until it is waited for: the wait reads what was sent,
    and writes what an in-place or out= form receives into. Only ranks with a short shard send a padded copy of it: a
    wait also reads what that was made of, so that all ranks order a write to the shard behind the same wait.

    Args:
        nodes: the graph's nodes in order.
        watched: nodes whose tensors a pass wants to read at another time, e.g. the inputs of collectives.
    """
    reader = EffectReader()
    notable = {i: effect for i, node in enumerate(nodes) if (effect := reader.notable(node)) is not None}
    if not any(e.writes or e.opaque for e in notable.values()):  # so memory need not be told apart
        return Hazards(MappingProxyType({i: (earlier,) for earlier, i in pairwise(notable)}), ())
    effects = [reader.of(node) for node in nodes]
    index = {node: i for i, node in enumerate(nodes)}
    memory = _Memory(nodes, effects, index)
    of_interest = {memory.root(index[node]) for node in watched if node in index}
    written = {memory.root(index[w]) for e in effects for w in e.writes}
    received = {
        memory.root(index[w]) for node, e in zip(nodes, effects, strict=True) if e.writes and is_start(node)
        for w in e.writes
    }
    sent: dict[int, list[set[int]]] = {}  # what is under way, by what it yields

    before: dict[int, list[int]] = {}
    readers: dict[int, list[int]] = {}
    writer: dict[int, int] = {}
    touching: list[int] = []
    since_wall: list[int] = []
    wall = last_ordered = -1
    for i, (node, effect) in enumerate(zip(nodes, effects, strict=True)):
        if node.op in ("placeholder", "get_attr", "output"):
            continue
        needs: list[int] = []
        if effect.opaque:
            needs += since_wall
            since_wall, wall, last_ordered = [], i, -1
            readers.clear()
            writer.clear()
            touching.append(i)
        elif wall >= 0:
            needs.append(wall)
        since_wall.append(i)
        if effect.ordered:
            if last_ordered >= 0:
                needs.append(last_ordered)
            last_ordered = i
        targets = {memory.root(index[w]) for w in effect.writes}
        reads = {memory.root(index[read]) for read in node.all_input_nodes} if written else set()
        if written and is_wait(node):  # hands on memory without reading it
            root = memory.root(i)
            targets.update({root} & received)
            one = _place(node)
            reads = set().union(*(sent.pop(root, ()) if one is None else sent.get(root, ())[one : one + 1]))
        elif written and (launch := launch_of(node)) is not None:
            sent.setdefault(memory.root(i), []).extend(
                {memory.root(index[one]), memory.root(index[behind(one)])} for one in launch.inputs
            )
        for root in targets:
            needs += readers.pop(root, ())
            if root in writer:
                needs.append(writer[root])
            writer[root] = i
        if not targets.isdisjoint(of_interest):
            touching.append(i)
        for root in reads & written - targets:
            if root in writer:
                needs.append(writer[root])
            readers.setdefault(root, []).append(i)
        if needs:
            before[i] = needs
    return Hazards(MappingProxyType(before), tuple(touching))


def _place(wait: fx.Node) -> int | None:
    """Which of a coalesced collective's results is waited for; None where there is one."""
    (result,) = wait.all_input_nodes
    place = result.args[1] if result.target is operator.getitem else None
    return place if isinstance(place, int) else None


class _Memory:
    """Which values may share memory: a union-find over node positions."""

    def __init__(
        self, nodes: Sequence[fx.Node], effects: Sequence[Effect], index: Mapping[fx.Node, int]
    ) -> None:
        self._parent = list(range(len(nodes)))
        storages: dict[int, int] = {}
        for i, (node, effect) in enumerate(zip(nodes, effects, strict=True)):
            for other in (*effect.views, *effect.writes):
                self._join(i, index[other])
            for value in _tensors(node.meta.get("val")):
                self._join(i, storages.setdefault(value, i))

    def root(self, i: int) -> int:
        """The position that stands for all values that may share memory with the one at ``i``."""
        parent = self._parent
        while parent[i] != i:
            parent[i] = parent[parent[i]]
            i = parent[i]
        return i

    def _join(self, a: int, b: int) -> None:
        a, b = self.root(a), self.root(b)
        if a != b:
            self._parent[max(a, b)] = min(a, b)


def _tensors(value: object) -> list[int]:
    """The identities of the storages in a ``meta['val']``; sparse and the like have none."""
    found = []
    for item in value if isinstance(value, (list, tuple)) else (value,):
        if isinstance(item, torch.Tensor) and item.layout is torch.strided:
            found.append(item.untyped_storage()._cdata)
    return found
