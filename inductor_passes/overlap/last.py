"""Which of the last two reductions goes first? What comes last is hidden behind nothing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import fx

from ..sizes import hinted_numel, unhinted
from ..uses import multiplies


@dataclass(frozen=True, slots=True)
class Reduction:
    """A reduction that can be moved.

    Attributes:
        ready: position of the last node that it has to wait for.
        start: its start node.
        above: what stands above and only makes what it sends.
    """

    ready: int
    start: fx.Node
    above: Mapping[fx.Node, None]


def larger_first(found: Sequence[Reduction], index: Mapping[fx.Node, int]) -> tuple[list[Reduction], fx.Node | None]:
    """The reductions in order of their gradients, but the last one before products that only the one before it needs.

    That is so where the last one is the larger: an embedding's gradient needs no product, so that its reduction can run
    while the last block's weight gradients are computed, and the block's smaller rest comes last.

    Returns:
        The reductions in order, and the start node of the one that has to have its inputs early, if one has.
    """
    if len(found) < 2:
        return list(found), None
    *others, one, last = found
    since = others[-1].ready if others else -1
    if _bytes(last.start) <= _bytes(one.start):
        return list(found), None
    needed = _needed(last.start, index, since)
    if one.start in needed:
        return list(found), None
    apart = [index[node] for node in _needed(one.start, index, since) if node not in needed and multiplies(node)]
    if not apart or min(apart) > last.ready:
        return list(found), None
    return [*others, replace(last, ready=min(apart) - 1), one], last.start


def _bytes(start: fx.Node) -> int:
    """What is sent; 0 where nothing says how much."""
    values = [node.meta.get("val") for node in start.all_input_nodes]
    known = [one for one in values if isinstance(one, torch.Tensor) and not unhinted(one)]
    return sum(hinted_numel(one) * one.element_size() for one in known)


def _needed(start: fx.Node, index: Mapping[fx.Node, int], since: int) -> set[fx.Node]:
    """Everything after a position that a node depends on, and the node."""
    needed, todo = {start}, [start]
    while todo:
        for node in todo.pop().all_input_nodes:
            if node not in needed and index[node] > since:
                needed.add(node)
                todo.append(node)
    return needed
