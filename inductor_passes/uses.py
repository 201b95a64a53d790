"""What stands around a collective: what only rearranges what it sends, what is computed from its result alone?"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Final

import torch
from torch import fx
from torch.utils.flop_counter import flop_registry

from collective_identity.transports import is_start, is_wait

_REARRANGING: Final = frozenset(
    ("_to_copy", "convert_element_type", "clone", "slice", "cat", "constant_pad_nd", "_unsafe_view")
)
_PACKING: Final = frozenset(("_chunk_cat", "pack"))
_SCALING: Final = frozenset(("div", "mul"))
_BOTH_WAYS: Final = frozenset(((True, False), (False, True)))


def packing(start: fx.Node) -> dict[fx.Node, None]:
    """What stands above a reduction and only makes what it sends of the gradients: casts, views, pads, a buffer."""
    above: dict[fx.Node, None] = {}
    todo = [start]
    while todo:
        for node in todo.pop().all_input_nodes:
            if node not in above and _packs(node) and all(u is start or u in above for u in node.users):
                above[node] = None
                todo.append(node)
    return above


def ready(start: fx.Node, above: Collection[fx.Node], index: Mapping[fx.Node, int]) -> int:
    """Position of the last node that a reduction has to wait for; -1 if it needs only the graph's inputs."""
    return max(
        (
            index[one]
            for node in (start, *above)
            for one in node.all_input_nodes
            if one not in above and one.op not in ("placeholder", "get_attr")
        ),
        default=-1,
    )


def rearranges(node: fx.Node) -> bool:
    """Whether a node only views, casts, copies, cuts, joins or pads."""
    target = node.target
    if node.op != "call_function" or not isinstance(target, torch._ops.OpOverload):
        return False
    return target.is_view or target._opname in _REARRANGING


def multiplies(node: fx.Node) -> bool:
    """Whether a node is a product or an attention: torch counts its floating-point operations, or its name says so.

    So is an outer product that Inductor wrote as a multiplication: a rank with one row has it where others have ``mm``.
    """
    target = node.target
    if not isinstance(target, torch._ops.OpOverload):
        return False
    return target.overloadpacket in flop_registry or "attention" in target._opname or _is_outer(node)


def _is_outer(node: fx.Node) -> bool:
    if node.target is not torch.ops.aten.mul.Tensor or len(node.all_input_nodes) != 2:
        return False
    one, other = (getattr(given.meta.get("val"), "shape", ()) for given in node.all_input_nodes)
    return len(one) == len(other) > 1 and {(a == 1, b == 1) for a, b in zip(one, other, strict=True)} >= _BOTH_WAYS


def _packs(node: fx.Node) -> bool:
    """Whether it may stand between a gradient and what is sent of it."""
    name = getattr(node.target, "_opname", None)
    return rearranges(node) or name in _PACKING or (name in _SCALING and len(node.all_input_nodes) == 1)


def behind(sent: fx.Node) -> fx.Node:
    """The tensor that what is sent rearranges: where a shard is uneven, only some ranks pad theirs."""
    while _packs(sent) and len(sent.all_input_nodes) == 1:
        (sent,) = sent.all_input_nodes
    return sent


class Inputs(dict[fx.Node, list[fx.Node]]):
    """The inputs of each node, asked for once: a node of many collectives has a long list, made at each question."""

    def __missing__(self, node: fx.Node) -> list[fx.Node]:
        found = self[node] = node.all_input_nodes
        return found


def unpacking(*waits: fx.Node, inputs: Inputs) -> dict[fx.Node, None]:
    """The waits and everything computed from them alone, in order: splits, views, copies, divisions."""
    below = dict.fromkeys(waits)
    todo = [*waits]
    while todo:
        for user in todo.pop().users:
            if user not in below and user.op == "call_function" and not is_start(user) and not is_wait(user):
                if all(node in below for node in inputs[user]):
                    below[user] = None
                    todo.append(user)
    return below


def first_use(below: Collection[fx.Node], index: Mapping[fx.Node, int], *, default: int) -> int:
    """Position of the first node that computes with any of these, not counting the graph's output."""
    return min(
        (index[u] for node in below for u in node.users if u not in below and u.op != "output"), default=default
    )
