"""What did a pass lose that does not say so? Look before, look after, and record each loss under its name."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from torch import fx

from . import compat, store
from .identity import Identity
from .merge import UNKNOWN
from .subgraphs import graph_modules
from .transports import Launch, launches

_Signature = tuple[object, ...]


@dataclass(frozen=True, slots=True)
class Seen:
    """A collective as it was: its node, the name that had, what it launched and its valid identity, if any."""

    node: fx.Node
    name: str
    signature: _Signature
    identity: Identity | None


@dataclass(frozen=True, slots=True)
class Loss:
    """An identity that a pass lost.

    Attributes:
        was: the start node's name before.
        identity: what it carried.
        node: the start node that has lost it; None when no collective of the kind is left.
    """

    was: str
    identity: Identity
    node: fx.Node | None


def snapshot(gm: fx.GraphModule) -> tuple[Seen, ...]:
    """Every collective of the graph and its sub-graphs with its identity. Reads only."""
    with compat.collector_paused():
        return tuple(_seen(node, launch) for module in graph_modules(gm) for node, launch in launches(module).items())


def _seen(node: fx.Node, launch: Launch) -> Seen:
    identity = store.verdict_for(node, launch, store.raw_payloads(node)).identity
    return Seen(node, node.name, _signature(launch), identity)


def record_losses(before: Sequence[Seen], gm: fx.GraphModule, *, pass_name: str) -> tuple[Loss, ...]:
    """Compare with what was there, and record on each collective left without its identity who lost it.

    A collective that carries another's identity now is left without one, whatever it had: nothing says which is right.

    A collective is the same if its node is; else if its name and kind are; else by its place among those of its
    kind, where their number has not changed (a retrace renames every node). Any other collective without an
    identity stands for what has vanished of its kind, and carries no role either.

    Args:
        before: from `snapshot`, taken before the pass.
        gm: the graph after it; may be another module.
        pass_name: who answers for it.

    Returns:
        Every loss, in the order of ``before``.
    """
    with compat.collector_paused():
        return _recorded(before, snapshot(gm), pass_name)


def _recorded(before: Sequence[Seen], after: Sequence[Seen], pass_name: str) -> tuple[Loss, ...]:
    code = UNKNOWN.lost
    assert code is not None
    match = matches(before, after)
    losses: dict[int, Loss] = {}  # by place in ``before``: names repeat across sub-graphs
    owners: dict[Identity, set[fx.Node]] = defaultdict(set)
    for seen in before:
        if seen.identity is not None:
            owners[seen.identity].add(seen.node)
    vanished: dict[_Signature, list[tuple[int, Seen]]] = defaultdict(list)
    for place, seen in enumerate(before):
        found = match.get(seen.node)
        if found is not None and found.node is seen.node and _taken(seen, found, owners, match):
            assert found.identity is not None
            detail = f"{pass_name} gave it the identity of {', '.join(sorted(n.name for n in owners[found.identity]))}"
            store.drop(found.node, code, pass_name, detail)
            if seen.identity is not None:
                losses[place] = Loss(seen.name, seen.identity, found.node)
        if seen.identity is None:
            continue
        if found is None:
            vanished[seen.signature].append((place, seen))
        elif found.identity is None and store.dropped_of(found.node) is None:
            losses[place] = Loss(seen.name, seen.identity, found.node)
    matched = {seen.node for seen in match.values()}
    for new in after:
        gone = vanished.get(new.signature)
        if gone and new.node not in matched and new.identity is None and store.dropped_of(new.node) is None:
            losses |= {place: Loss(seen.name, _known(seen), new.node) for place, seen in gone}
            del vanished[new.signature]
    losses |= {place: Loss(seen.name, _known(seen), None) for gone in vanished.values() for place, seen in gone}
    roles: dict[fx.Node, set[str]] = defaultdict(set)
    for loss in losses.values():
        if loss.node is not None:
            roles[loss.node].add(loss.identity.role)
    for node, lost in roles.items():
        if not store.has_payload(node) and store.dropped_of(node) is None:
            store.drop(node, code, pass_name, f"{pass_name} lost {', '.join(sorted(lost))}")
    return tuple(losses[place] for place in sorted(losses))


def _taken(
    seen: Seen, found: Seen, owners: Mapping[Identity, set[fx.Node]], match: Mapping[fx.Node, Seen]
) -> bool:
    """Whether the collective carries, since the pass, what only others carried before.

    One without an explicit identity may come by an equal one honestly, from its wait node; not by sharing another's
    dict, nor where the other has it no more.
    """
    if found.identity is None or found.identity == seen.identity:
        return False
    if seen.identity is not None and seen.identity.explicit:
        return found.identity in owners
    return any(
        node.meta.get("custom") is found.node.meta.get("custom")
        or (node in match and match[node].identity != found.identity)
        for node in owners.get(found.identity, ())
    )


def _known(seen: Seen) -> Identity:
    assert seen.identity is not None, seen.name
    return seen.identity


def _signature(launch: Launch) -> _Signature:
    return launch.transport, launch.group, launch.group_size, launch.reduce_op


def matches(before: Sequence[Seen], after: Sequence[Seen]) -> Mapping[fx.Node, Seen]:
    """Which collective of ``after`` is which of ``before``: by node, else name and kind, else kind and place."""
    by_node = {seen.node: seen for seen in after}
    match = {seen.node: by_node[seen.node] for seen in before if seen.node in by_node}
    for alike in (lambda seen: (seen.name, seen.signature), lambda seen: seen.signature):
        taken = {seen.node for seen in match.values()}
        old = _grouped((seen for seen in before if seen.node not in match), alike)
        new = _grouped((seen for seen in after if seen.node not in taken), alike)
        for key, several in old.items():
            if len(several) == len(new[key]):
                match.update((was.node, now) for was, now in zip(several, new[key], strict=True))
    return match


def _grouped(seen: Iterable[Seen], key: Callable[[Seen], object]) -> dict[object, list[Seen]]:
    groups: dict[object, list[Seen]] = defaultdict(list)
    for one in seen:
        groups[key(one)].append(one)
    return groups
