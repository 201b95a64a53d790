"""Which additions form one sum? Trees of plain additions of equal tensors, each found once."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import fx

from ..sizes import surely_same

ADD = torch.ops.aten.add.Tensor


@dataclass(frozen=True, slots=True)
class Sum:
    """A tree of additions.

    Attributes:
        root: the addition that yields the sum.
        adds: every addition of the tree in graph order, the root last.
        addends: what is added up, in tree order from left to right; none of it is an addition of the tree.
    """

    root: fx.Node
    adds: tuple[fx.Node, ...]
    addends: tuple[fx.Node, ...]


def is_plain_addition(node: fx.Node) -> bool:
    """Whether the node adds two tensors of one shape, element type and device, neither scaled nor in place."""
    return node.op == "call_function" and node.target is ADD and not is_scaled(node) and adds_equals(node)


def is_scaled(node: fx.Node) -> bool:
    """Whether an addition multiplies its second operand."""
    alpha = node.kwargs.get("alpha", 1)
    return not (isinstance(alpha, (int, float)) and alpha == 1)


def adds_equals(node: fx.Node) -> bool:
    """Whether both operands of an addition are tensors like its result: nothing is broadcast or promoted."""
    if len(node.args) != 2 or not all(isinstance(a, fx.Node) for a in node.args):
        return False
    result = node.meta.get("val")
    return isinstance(result, torch.Tensor) and all(
        alike(a.meta.get("val"), result) for a in node.args if isinstance(a, fx.Node)
    )


def alike(a: object, b: object) -> bool:
    """Whether two example values are strided tensors of one shape, element type and device."""
    return (
        isinstance(a, torch.Tensor)
        and isinstance(b, torch.Tensor)
        and a.layout is b.layout is torch.strided
        and a.dtype is b.dtype
        and a.device == b.device
        and surely_same(a.shape, b.shape)
    )


def sums_of(nodes: Iterable[fx.Node]) -> list[Sum]:
    """Every sum of a graph, in graph order of their roots; linear in the additions.

    An addition with one user, another plain addition that takes it once, belongs to that one's tree.
    """
    additions = [node for node in nodes if is_plain_addition(node)]
    known = set(additions)
    inner = {node for node in additions if _is_inner(node, known)}
    found = []
    for root in additions:
        if root in inner:
            continue
        adds, addends, stack = [], [], [root]
        while stack:
            node = stack.pop()
            if node is not root and node not in inner:
                addends.append(node)
                continue
            adds.append(node)
            stack += [operand for operand in reversed(node.args) if isinstance(operand, fx.Node)]
        adds.sort()
        found.append(Sum(root, tuple(adds), tuple(addends)))
    return found


def _is_inner(node: fx.Node, additions: set[fx.Node]) -> bool:
    if len(node.users) != 1:
        return False
    (user,) = node.users
    return user in additions and user.args[0] is not user.args[1]
