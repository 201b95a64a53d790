"""How does a merged reduce-scatter look in the graph? Adds up what is sent as it comes, scatters once."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import torch
from torch import fx

from collective_identity import store
from collective_identity.transports import WAIT, Transport, default_overload, launch_of

from ..bucketing.emit import redirect_users
from ..bucketing.node_builder import NodeBuilder, mode_of
from .decide import PASS_NAME
from .plan import DedupPlan, Merge
from .trees import ADD, Sum

# Where the code came from, and in which half of the step it runs: taken from the last member.
_HANDED_ON: Final = ("stack_trace", "nn_module_stack", "partitioner_tag", "autograd_backward")


def apply_dedup(gm: fx.GraphModule, plan: DedupPlan) -> bool:
    """Carry out a plan; True if the graph changed. Linear in the members and additions of the plan.

    Code is not generated again: call `gm.recompile()`.

    Each tensor is added to the others where its own reduce-scatter read it, so that at most one accumulated
    tensor is alive; the merged collective stands where the last one stood. Additions of anything else keep
    their place and order.

    Raises:
        ValueError: the plan is not of this graph.
    """
    if not plan.merges:
        return False
    present = set(gm.graph.nodes)
    stranger = next((m for merge in plan.merges for m in merge.members if m not in present), None)
    if stranger is not None:
        raise ValueError(f"expected a plan of this graph, found {stranger.name!r} not in it; plan again after any "
                         "change to the graph")
    instead: dict[fx.Node, fx.Node | None] = {}
    sums: dict[fx.Node, Sum] = {}
    for merge in plan.merges:
        instead.update(_emit(gm.graph, merge))
        sums[merge.sum.root] = merge.sum
    replaced: dict[fx.Node, fx.Node] = {}
    gone: list[fx.Node] = []
    for one in sums.values():
        gone += _shorten(one, instead, replaced)
    redirect_users({root: _final(root, replaced) for root in replaced})
    for add in sorted(gone, reverse=True):
        gm.graph.erase_node(add)
    for merge in plan.merges:
        for start in merge.members:
            (wait,) = start.users
            gm.graph.erase_node(wait)
            gm.graph.erase_node(start)
    return True


def _emit(graph: fx.Graph, merge: Merge) -> Mapping[fx.Node, fx.Node | None]:
    """Build one merged collective. What stands for each old wait: the new one for the last, nothing for others."""
    last = merge.members[-1]
    sent = [_sent(member) for member in merge.members]
    build = NodeBuilder(graph, mode_of(sent), {k: last.meta[k] for k in _HANDED_ON if k in last.meta})
    total = sent[0]
    for member, more in zip(merge.members[1:], sent[1:], strict=True):
        with graph.inserting_before(member):
            total = build.call(ADD, (total, more), [], build.like_both(total, more))
    launch = launch_of(last)
    assert launch is not None
    with graph.inserting_before(last):
        start = build.call(
            default_overload(Transport.REDUCE_SCATTER),
            (total, launch.reduce_op, launch.group_size, launch.group), [], last.meta["val"],
        )
    store.set_members(start, store.BucketRecord(PASS_NAME, tuple(
        store.Member(m.name, identity) for m, identity in zip(merge.members, merge.identities, strict=True)
    )))
    outcome = merge.outcome
    if outcome.identity is not None:
        store.stamp(start, outcome.identity)
    elif outcome.code is not None:
        store.drop(start, outcome.code, PASS_NAME, outcome.detail)
    waits = [next(iter(member.users)) for member in merge.members]
    with graph.inserting_before(waits[-1]):
        wait = build.call(WAIT, (start,), [], waits[-1].meta["val"])
    return {**dict.fromkeys(waits[:-1]), waits[-1]: wait}


def _shorten(
    one: Sum, instead: Mapping[fx.Node, fx.Node | None], replaced: dict[fx.Node, fx.Node]
) -> list[fx.Node]:
    """Take the merged addends out of a sum: an addition that is left with one operand is that operand.

    Returns:
        The additions that are no longer needed; what stands for the root is put into ``replaced``.
    """
    now: dict[fx.Node, fx.Node | None] = {}
    for add in one.adds:
        old = [a for a in add.args if isinstance(a, fx.Node)]
        left = [new for new in (now[a] if a in now else instead.get(a, a) for a in old) if new is not None]
        if len(left) < 2:
            now[add] = left[0] if left else None
        elif left != old:
            add.args = tuple(left)
    result = now.get(one.root)
    if result is not None:
        replaced[one.root] = result
    return list(now)


def _final(root: fx.Node, replaced: Mapping[fx.Node, fx.Node]) -> fx.Node:
    """What stands for a root in the end: its result may be another root."""
    while root in replaced:
        root = replaced[root]
    return root


def _sent(member: fx.Node) -> fx.Node:
    launch = launch_of(member)
    assert launch is not None and isinstance(launch.inputs[0].meta["val"], torch.Tensor)
    return launch.inputs[0]
