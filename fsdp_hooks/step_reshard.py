"""``reshard_after_forward`` in a whole-step graph: what backward needs is gathered again, not kept."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import fx, nn

from collective_identity import PARAM_UNSHARD, identity_of, stamp, start_nodes
from collective_identity.transports import is_start, is_wait

from . import compat_checkpoint
from .reshard import RESHARD_KEY
from .runtime import UNIT, Unit
from .spec import ParamSpec


@contextmanager
def recomputed_from_forward(model: nn.Module) -> Iterator[None]:
    """While a step is traced, have activation checkpoints recompute with what the forward gathered.

    So it is one gather a parameter until :func:`gather_again` decides, however often a checkpoint reads it.
    """
    units = {id(held[0]): held[0] for module in model.modules() if (held := module.__dict__.get(UNIT)) is not None}
    try:
        for unit in units.values():
            unit.__dict__["gather"] = _remembering(unit)
        yield
    finally:
        for unit in units.values():
            del unit.__dict__["gather"]


def _remembering(unit: Unit) -> Callable[[Any, ParamSpec], torch.Tensor]:
    full: dict[str, torch.Tensor] = {}

    def gather(sharded: Any, spec: ParamSpec) -> torch.Tensor:
        if not (compat_checkpoint.recomputing() and spec.fqn in full):
            full[spec.fqn] = Unit.gather(unit, sharded, spec)
        return full[spec.fqn]

    return gather


def gather_again(gm: fx.GraphModule, forward_ends: str) -> frozenset[str]:
    """Give backward gathers of its own, where their producer resharded.

    Args:
        gm: a whole-step graph, normalised.
        forward_ends: name of the last node of the forward.

    Returns:
        The names of the forward's start nodes; the others belong to backward.
    """
    nodes = list(gm.graph.nodes)
    index = {node: i for i, node in enumerate(nodes)}
    end = next(i for i, node in enumerate(nodes) if node.name == forward_ends)
    for node in nodes[end + 1 :]:
        if node.op == "call_function":
            node.meta["partitioner_tag"] = "is_backward"
    starts = start_nodes(gm)
    again = False
    for start in starts:
        identity = identity_of(start)
        marked = start.meta.get("custom", {}).get(RESHARD_KEY) is True
        if identity is None or identity.role != PARAM_UNSHARD or not marked or index[start] > end:
            continue
        chain = [node for node in _chain(start) if index[node] <= end]
        full = chain[chain.index(start) :]
        late = {u for node in full for u in node.users if index.get(u, 0) > end and u.op != "output"}
        if not late:
            continue
        first = min(late, key=lambda node: index[node])
        copies = _copied(gm.graph, chain, first)
        stamp(copies[start], identity)
        for user in late:
            for node in full:
                if node in user.all_input_nodes:
                    user.replace_input_with(node, copies[node])
        again = True
    if again:
        gm.graph.lint()
        gm.recompile()
    return frozenset(start.name for start in starts if index[start] <= end)


def _copied(graph: fx.Graph, chain: list[fx.Node], before: fx.Node) -> dict[fx.Node, fx.Node]:
    copies: dict[fx.Node, fx.Node] = {}
    with graph.inserting_before(before):
        for node in chain:
            copies[node] = copy = graph.node_copy(node, lambda n: copies.get(n, n))
            copy.meta = {**node.meta, "partitioner_tag": "is_forward"}
    return copies


def _chain(start: fx.Node) -> list[fx.Node]:
    """From the shard to the full parameter: what the gather alone is made from, it, and what is made from it alone."""
    chain = [start]
    while len(chain[0].all_input_nodes) == 1 and chain[0].all_input_nodes[0].op == "call_function":
        above = chain[0].all_input_nodes[0]
        if is_start(above) or is_wait(above):
            break
        chain.insert(0, above)
    members = {start}
    after = [start]
    for node in after:  # grows while it is read
        for user in node.users:
            inside = user.op == "call_function" and not is_start(user) and user not in members
            if inside and all(n in members for n in user.all_input_nodes) and _moves_only(user):
                members.add(user)
                after.append(user)
    chain += sorted(after[1:])  # nodes compare by their place
    return chain


def _moves_only(node: fx.Node) -> bool:
    """A wait, view, slice, cast or joining of pieces: nothing that computes."""
    name = getattr(node.target, "_opname", getattr(node.target, "__name__", ""))
    return name in _MOVING


_MOVING = frozenset(
    {"wait_tensor", "cat", "getitem", "split", "split_with_sizes", "_to_copy", "clone", "_unsafe_view", "view",
     "reshape", "slice", "t", "transpose", "permute", "detach", "alias", "as_strided", "unsqueeze", "squeeze", "expand"}
)
