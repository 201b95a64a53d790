"""``reshard_after_forward`` in a captured graph: gathered parameters are gathered again in backward, not saved.

Without a mark, the min-cut partitioner saves the gathered parameter for backward and nothing is freed. The pass
marks each ``fsdp.param_unshard`` whose producer asked for it, the nodes it is made from (cast, pad), and what is
only a view, cast or slice of it, MUST_RECOMPUTE on the joint graph (torch/_functorch/partitioners.py, read in
torch 2.11.0 to 2.15.0). This belongs to capture, not to optimisation: it runs in observe sessions and in lite mode.
"""

from __future__ import annotations

from collections.abc import Iterator

from torch import fx

from collective_identity import PARAM_UNSHARD, classify
from collective_identity.compat import collector_paused
from collective_identity.subgraphs import graph_modules
from collective_identity.transports import waits_of

from .contract import LiteBehaviour, PassContext, PassContract, PassOutcome
from .upstream import custom_value, mark_recompute
from .uses import rearranges

RESHARD_KEY = "distributed.fsdp.reshard_after_forward"

# The partitioner saves a recomputed node whose user belongs to a *later* checkpoint region; ours come last.
_REGION = 1 << 30


class Reshard:
    """Joint-graph pass: free gathered parameters after forward where the producer asked for it."""

    contract = PassContract(
        name="reshard", lite=LiteBehaviour.CAPTURE, provides=frozenset({"resharded"}), stage="joint"
    )

    def __call__(self, gm: fx.GraphModule, context: PassContext) -> PassOutcome:
        """Mark; the partitioner does the rest."""
        with collector_paused():
            return _marked(gm)


def _marked(gm: fx.GraphModule) -> PassOutcome:
    identities = classify(gm)
    nodes = (node for module in graph_modules(gm) for node in module.graph.nodes)
    asked = [node for node in nodes if custom_value(node, RESHARD_KEY) is True]
    starts, alone = [], []
    for node in asked:
        identity = identities.get(node)
        if identity is not None and identity.role == PARAM_UNSHARD:
            starts.append(node)
        elif node not in identities and _only_rearranges(node):  # a group of one rank copies, and gathers nothing
            alone.append(node)
    marked: set[fx.Node] = set()
    for start in (*starts, *alone):
        for node in (*_made_from(start), start, *_views_of(start)):
            if node not in marked:
                mark_recompute(node, _REGION)
                marked.add(node)
    return PassOutcome(changed=False, summary={"resharded": len(starts), "marked": len(marked)})


def _made_from(start: fx.Node) -> Iterator[fx.Node]:
    """The chain of single-input nodes between a graph input and the gather."""
    node = start
    while len(node.all_input_nodes) == 1:
        (node,) = node.all_input_nodes
        if node.op != "call_function":
            return
        yield node


def _views_of(start: fx.Node) -> Iterator[fx.Node]:
    """The waits, and everything that only reshapes, slices, casts or reorders what they, or a copy, return."""
    pending = list(waits_of(start)) or [start]
    seen = set(pending)
    while pending:
        node = pending.pop()
        yield node
        for user in node.users:
            if user not in seen and _only_rearranges(user) and len(user.all_input_nodes) == 1:
                seen.add(user)
                pending.append(user)


def _only_rearranges(node: fx.Node) -> bool:
    return node.meta.get("partitioner_tag") != "is_backward" and rearranges(node)
