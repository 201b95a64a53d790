"""``reshard_after_forward`` in a whole-step graph: what is read after a reshard is gathered again, not kept."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import fx

from collective_identity import PARAM_UNSHARD, identity_of, stamp, start_nodes
from collective_identity.transports import is_start, is_wait

from .reshard import RESHARD_KEY


def gather_again(gm: fx.GraphModule, forward_ends: str, reopened: Mapping[str, Sequence[str]]) -> frozenset[str]:
    """Give backward, and a forward that opens a unit again, gathers of their own, where their producer resharded.

    Args:
        gm: a whole-step graph, normalised.
        forward_ends: name of the last node of the forward.
        reopened: by parameter, the name of the last node before each time that its unit was opened again.

    Returns:
        The names of the forward's start nodes; the others belong to backward.
    """
    nodes = list(gm.graph.nodes)
    index = {node: i for i, node in enumerate(nodes)}
    place = {node.name: i for i, node in enumerate(nodes)}
    end = place[forward_ends]
    for node in nodes[end + 1 :]:
        if node.op == "call_function":
            node.meta["partitioner_tag"] = "is_backward"
    forward = {start.name for start in start_nodes(gm) if index[start] <= end}
    again = False
    for start in start_nodes(gm):
        identity = identity_of(start)
        marked = start.meta.get("custom", {}).get(RESHARD_KEY) is True
        if identity is None or identity.role != PARAM_UNSHARD or not marked or index[start] > end:
            continue
        chain = _chain(start)
        openings = (place[name] for param in identity.params or () for name in reopened.get(param, ()))
        cuts = sorted({*(at for at in openings if index[start] < at < end), end})
        for first, last in reversed([*zip(cuts, [*cuts[1:], len(nodes)], strict=True)]):
            above = [node for node in chain if index[node] <= first]
            full = above[above.index(start) :]
            late = {u for node in full for u in node.users if first < index.get(u, 0) <= last and u.op != "output"}
            if not late:
                continue
            copies = _copied(gm.graph, above, min(late, key=lambda node: index[node]), first < end)
            stamp(copies[start], identity)
            if first < end:
                forward.add(copies[start].name)
            for user in late:
                for node in full:
                    if node in user.all_input_nodes:
                        user.replace_input_with(node, copies[node])
            for copy in reversed(copies.values()):
                if not copy.users:
                    gm.graph.erase_node(copy)
            again = True
    if again:
        gm.graph.lint()
        gm.recompile()
    return frozenset(forward)


def _copied(graph: fx.Graph, chain: list[fx.Node], before: fx.Node, forward: bool) -> dict[fx.Node, fx.Node]:
    copies: dict[fx.Node, fx.Node] = {}
    with graph.inserting_before(before):
        for node in chain:
            copies[node] = copy = graph.node_copy(node, lambda n: copies.get(n, n))
            copy.meta = {**node.meta, "partitioner_tag": "is_forward" if forward else "is_backward"}
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
