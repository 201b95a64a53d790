"""How does a plan of places become an order of nodes? Data flow, writes and effects keep theirs."""

from __future__ import annotations

import itertools

from torch import fx

from ..bucketing.hazards import hazards_of
from ..bucketing.order import stable_order
from ..uses import rearranges
from .plan import OverlapPlan


def apply_overlap(gm: fx.GraphModule, plan: OverlapPlan) -> bool:
    """Move the nodes of a plan to their places, as near as their inputs allow; True if the order changed.

    No node is made, changed or removed.

    Raises:
        ValueError: the plan is not of this graph.
    """
    if not plan.places:
        return False
    nodes = list(gm.graph.nodes)
    index = {node: i for i, node in enumerate(nodes)}
    stranger = next((node for node in plan.places if node not in index), None)
    if stranger is not None:
        raise ValueError(
            f"expected a plan of this graph, found {stranger.name!r} not in it; plan again after any change"
        )
    hazards = hazards_of(nodes, [node for start in (*plan.started, *plan.delayed) for node in start.all_input_nodes])
    before = [
        list(itertools.chain((index[n] for n in node.all_input_nodes), hazards.before.get(i, ())))
        for i, node in enumerate(nodes)
    ]
    output = len(nodes) - 1
    before[output] = list(range(output))
    priority = [-1e18 if node.op == "placeholder" else float(i) for i, node in enumerate(nodes)]
    behind: dict[fx.Node, float] = {}  # nobody else moves for a collective, nor for what only some ranks pad for it
    for i, node in enumerate(nodes):
        if node in plan.places or rearranges(node):
            own = max(hazards.before.get(i, ()), default=-1) + 0.25
            behind[node] = max([own, *(behind[above] for above in node.all_input_nodes if above in behind)])
        if node in plan.places:
            priority[i] = max(plan.places[node], behind[node], -1e17)
    hoisted = plan.started if plan.hurried is None else (*plan.started, plan.hurried)
    ordered = stable_order(before, priority, [index[start] for start in hoisted])
    if ordered == list(range(len(nodes))):
        return False
    for item in ordered[:-1]:
        nodes[output].prepend(nodes[item])
    return True
