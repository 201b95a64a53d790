"""What does a collective's identity become when other nodes take its place? The contract's rules on graph nodes.

For passes that replace, lower or split a collective. A replacement in another form of the same transport
(``control_deps``, low-contention, out, coalesced) is the same communication and keeps the identity; a fused
operator is not, and loses it as opaque; a part of another transport loses it as decomposed. Below the FX graph, in
Inductor's IR, no node carries an identity: it ends where the graph is lowered, and coverage is taken before.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import fx

from collective_identity import merge, store
from collective_identity.identity import Identity
from collective_identity.merge import Outcome
from collective_identity.transports import launch_of


def replaced(
    old: fx.Node, new: fx.Node, *, pass_name: str, identity: Identity | None = None
) -> Outcome:
    """One collective became one other node: hand on its identity, or record on ``new`` that it was lost (opaque).

    Args:
        old: the start node replaced; still in the graph, or at least readable.
        new: what took its place.
        pass_name: who answers for it.
        identity: of the old node where it is not on the node itself; its payload by default.

    Returns:
        What was done. ``new`` holds a dict of its own, and the provenance of a merged node.
    """
    said = store.identity_of(old) if identity is None else identity
    launch = launch_of(new)
    outcome = merge.replacement_outcome(said, launch.transport if launch else None, producer=pass_name)
    _settle(old, new, outcome, pass_name)
    return outcome


def split(old: fx.Node, parts: Sequence[fx.Node], *, pass_name: str) -> tuple[Outcome, ...]:
    """One collective became several nodes: each of its transport keeps its identity, others lose it (decomposed).

    Nodes among the parts that launch nothing (copies, waits, views) carry nothing and lose nothing.

    Raises:
        ValueError: ``old`` launches no collective.
    """
    launch = launch_of(old)
    if launch is None:
        raise ValueError(f"expected a collective to split, found {old.format_node()}")
    launched = [launch_of(part) for part in parts]
    outcomes = merge.split_outcome(
        store.identity_of(old), launch.transport, [p.transport if p else None for p in launched], producer=pass_name
    )
    for part, found, outcome in zip(parts, launched, outcomes, strict=True):
        if found is not None:
            _settle(old, part, outcome, pass_name)
    return outcomes


def _settle(old: fx.Node, new: fx.Node, outcome: Outcome, pass_name: str) -> None:
    """Write the outcome on ``new``, whatever metadata was copied onto it before."""
    earlier, record = store.dropped_of(old), store.members_of(old)
    if outcome.identity is not None:
        store.stamp(new, outcome.identity)
    elif outcome.code is not None:
        store.drop(new, outcome.code, pass_name, outcome.detail)
    elif earlier is not None and earlier.code is not None:
        store.drop(new, earlier.code, earlier.pass_name or pass_name, earlier.detail)
    else:
        store.clear(new)
    if record is not None and store.members_of(new) is None:
        store.set_members(new, record)
