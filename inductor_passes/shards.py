"""Which parameters does a captured graph read only as this rank's shard? AOTAutograd is given those shards.

A ``DTensor`` among the inputs makes AOTAutograd trace the whole model once more, take it apart and put gradients
together again at every call and, on torch 2.11, stay away from its cache. What FSDP2 shards is read by ``to_local()``
alone: that is done before the graph is called, by one autograd function, and gradients reach the parameters as before.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import fx

from . import upstream


def take_shards(gm: fx.GraphModule, inputs: Sequence[Any]) -> tuple[list[Any], tuple[int, ...]]:
    """Let a graph that Dynamo captured, in place, be given this rank's shard where it reads nothing else.

    Args:
        gm: the graph; its placeholders are the inputs, in order.
        inputs: real or fake; a ``DTensor`` holds this rank's shard.

    Returns:
        The inputs to compile with, fake tensors where a shard is given, and the places of those.
    """
    given, places = list(inputs), []
    if upstream.autograd_is_traced():
        return given, ()
    for place, node in enumerate(gm.graph.find_nodes(op="placeholder")):
        users = tuple(node.users)
        if not users or not upstream.has_shard(inputs[place]) or not all(map(upstream.takes_shard, users)):
            continue
        shard = users[0].meta["example_value"].detach().requires_grad_()
        for user in users:
            user.replace_all_uses_with(node)
            gm.graph.erase_node(user)
        node.meta["example_value"] = given[place] = shard
        places.append(place)
    if places:
        gm.recompile()
    return given, tuple(places)


def given_shards(compiled: Callable[..., Any], places: tuple[int, ...]) -> Callable[..., Any]:
    """What Dynamo calls, with whole parameters: ``compiled``, with shards in these places."""
    if not places:
        return compiled

    def run(*args: Any) -> Any:
        given = list(args)
        shards = upstream.shards_of([args[place] for place in places])
        for place, shard in zip(places, shards, strict=True):
            given[place] = shard
        return compiled(*given)

    return run
