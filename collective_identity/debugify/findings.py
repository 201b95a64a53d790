"""What became of each identity? Compare the graph after a pass with what the contract calls for."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any, Final

from torch import fx

from .. import store
from ..identity import Identity
from ..merge import combine
from ..subgraphs import graph_modules
from ..transports import Launch, launches
from .recorder import Recorder, Stack
from .stamps import Origin


class Kind(str, Enum):
    """What became of an identity."""

    PRESERVED = "preserved"
    """Kept by value, or combined as the contract says."""
    UNCHANGED = "unchanged"
    """The pass left the collective and its identity as they were."""
    DROP = "drop"
    """Gone, and nobody says why."""
    DROP_WITH_REASON = "drop with reason"
    """Gone, and the node that is left says why."""
    SPREAD = "spread"
    """On a node that launches no collective."""
    ARBITRARY_MERGE = "arbitrary merge"
    """A merged collective carries what not every member agrees on."""
    DUPLICATE = "duplicate"
    """On a second collective that has nothing to do with the first."""
    ALIAS = "alias"
    """Two nodes share one dict: a write to one is a write to both."""
    TRANSPORT_MISMATCH = "transport mismatch"
    """On a collective of another transport."""
    SOURCE_UPGRADE = "source upgrade"
    """Inferred before, explicit now."""
    INVENTED = "invented"
    """An identity that no collective had."""

    def __str__(self) -> str:
        return self.value


FAULTS: Final = frozenset(Kind) - {Kind.PRESERVED, Kind.UNCHANGED, Kind.DROP_WITH_REASON}
"""The kinds that break the contract."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that a pass did.

    Attributes:
        kind: what.
        nodes: names of the nodes that are left, empty when none is.
        was: start nodes before the pass that it is about.
        detail: expected and found, in words.
        stack: who did it, ``file:line function``, innermost first; the pass itself where no frame was seen.
    """

    kind: Kind
    nodes: tuple[str, ...]
    was: tuple[str, ...]
    detail: str = ""
    stack: Stack = ()

    @property
    def fault(self) -> bool:
        """Whether it breaks the contract."""
        return self.kind in FAULTS

    def to_dict(self) -> dict[str, Any]:
        """JSON values."""
        return {
            "kind": self.kind.value,
            "fault": self.fault,
            "nodes": list(self.nodes),
            "was": list(self.was),
            "detail": self.detail,
            "stack": list(self.stack),
        }


def compare(
    origins: Mapping[fx.Node, Origin], descent: Mapping[fx.Node, tuple[Origin, ...]], gm: fx.GraphModule, seen: Recorder
) -> tuple[Finding, ...]:
    """Every finding, in graph order.

    Args:
        origins: the collectives before the pass.
        descent: start node after the pass → the collectives whose work it does.
        gm: the graph after the pass.
        seen: what was recorded while it ran.
    """
    starts = {node: launch for module in graph_modules(gm) for node, launch in launches(module).items()}
    nodes = [node for module in graph_modules(gm) for node in module.graph.nodes]
    found: list[Finding] = []
    for node, launch in starts.items():
        found += _at_start(node, launch, descent.get(node, ()), origins, seen)
    found += _ended(origins, descent, starts, seen)
    carriers = [node for node in nodes if store.has_payload(node)]
    found += _spread([node for node in carriers if node not in starts], seen)
    found += _aliased(carriers, seen)
    return tuple(found)


def _at_start(
    node: fx.Node, launch: Launch, parts: tuple[Origin, ...], origins: Mapping[fx.Node, Origin], seen: Recorder
) -> Iterator[Finding]:
    payloads = store.raw_payloads(node)
    now = store.verdict_for(node, launch, payloads).identity
    stack, was = seen.who(node), tuple(part.name for part in parts)
    had = [part.identity for part in parts]

    def finding(kind: Kind, detail: str = "") -> Finding:
        return Finding(kind, (node.name,), was, detail, () if kind in (Kind.PRESERVED, Kind.UNCHANGED) else stack)

    if not parts:
        if now is not None:
            yield _uncalled(node, launch, now, origins, stack)
        return
    expected = had[0] if len(parts) == 1 else combine(had, producer="debugify")
    if payloads and expected is not None and any(part.launch.transport is not launch.transport for part in parts):
        yield finding(Kind.TRANSPORT_MISMATCH, f"{expected.role} of {parts[0].launch.transport} on {launch.transport}")
    elif now is None:
        if any(one is not None for one in had):
            dropped = store.dropped_of(node)
            if dropped is not None:
                yield finding(Kind.DROP_WITH_REASON, f"{dropped.code}: {dropped.detail}")
            else:
                yield finding(Kind.DROP, f"expected {_said(expected)}, or a recorded reason; found nothing")
    elif expected is None and len(parts) > 1:
        met = ", ".join(_said(one) for one in had)
        yield finding(Kind.ARBITRARY_MERGE, f"{now.role} on a merge of {met}")
    elif expected is None:
        yield finding(Kind.INVENTED, f"expected nothing, found {_said(now)}")
    elif now.role != expected.role:
        yield finding(Kind.INVENTED, f"expected {_said(expected)}, found {_said(now)}")
    elif now.explicit and not expected.explicit:
        yield finding(Kind.SOURCE_UPGRADE, f"expected {_said(expected)}, found {_said(now)}")
    elif _fields(now) != _fields(expected):
        kind = Kind.ARBITRARY_MERGE if len(parts) > 1 else Kind.INVENTED
        yield finding(kind, f"expected {_said(expected)}, found {_said(now)}")
    elif node in origins and parts == (origins[node],):
        yield finding(Kind.UNCHANGED)
    else:
        yield finding(Kind.PRESERVED)


def _uncalled(
    node: fx.Node, launch: Launch, now: Identity, origins: Mapping[fx.Node, Origin], stack: Stack
) -> Finding:
    """An identity on a collective that took over from none: a copy keeps it by value, another invents it."""
    same = next((one for one in origins.values() if one.identity is not None and one.identity == now), None)
    if same is None:
        return Finding(Kind.INVENTED, (node.name,), (), f"no collective had {_said(now)}", stack)
    like = (same.launch.transport, same.launch.group) == (launch.transport, launch.group)
    if same.launch.transport is not launch.transport:
        detail = f"{now.role} of {same.launch.transport} on {launch.transport}"
        return Finding(Kind.TRANSPORT_MISMATCH, (node.name,), (same.name,), detail, stack)
    if like and tuple(i.name for i in same.launch.inputs) == tuple(i.name for i in launch.inputs):
        return Finding(Kind.PRESERVED, (node.name,), (same.name,), "a copy")
    detail = f"{_said(now)} is {same.name}'s, and this is no copy of it"
    return Finding(Kind.DUPLICATE, (node.name,), (same.name,), detail, stack)


def _ended(
    origins: Mapping[fx.Node, Origin],
    descent: Mapping[fx.Node, tuple[Origin, ...]],
    starts: Mapping[fx.Node, Launch],
    seen: Recorder,
) -> Iterator[Finding]:
    """Identities that no collective carries on."""
    reached = {part.number for parts in descent.values() for part in parts}
    by_name = {one.erased.name: one for one in reversed(seen.takeovers)}
    reasons = {  # of those that took over from none: a reason speaks for its own collectives only
        launch.group: dropped
        for node, launch in starts.items()
        if not descent.get(node) and (dropped := store.dropped_of(node)) is not None
    }
    for origin in origins.values():
        if origin.number in reached or origin.identity is None:
            continue
        takeover = by_name.get(origin.name)
        stack = takeover.stack if takeover is not None else ()
        dropped = reasons.get(origin.launch.group)
        left: tuple[str, ...] = ()
        if takeover is not None and takeover.opaque is not None:
            left = (takeover.opaque.name,)
            dropped = store.dropped_of(takeover.opaque)
        elif takeover is not None and takeover.dead:
            yield Finding(Kind.DROP_WITH_REASON, (), (origin.name,), "nobody used its result", stack)
            continue
        if dropped is not None:
            yield Finding(Kind.DROP_WITH_REASON, left, (origin.name,), f"{dropped.code}: {dropped.detail}", stack)
        else:
            detail = f"expected {_said(origin.identity)} or a recorded reason on what took over; found neither"
            yield Finding(Kind.DROP, left, (origin.name,), detail, stack)


def _spread(nodes: Iterable[fx.Node], seen: Recorder) -> Iterator[Finding]:
    by_stack: dict[Stack, list[str]] = {}
    for node in nodes:
        by_stack.setdefault(seen.who(node), []).append(node.name)
    for stack, names in by_stack.items():
        yield Finding(Kind.SPREAD, tuple(names), (), f"{len(names)} nodes that launch no collective", stack)


def _aliased(nodes: Iterable[fx.Node], seen: Recorder) -> Iterator[Finding]:
    sharing: dict[int, list[fx.Node]] = {}
    for node in nodes:
        custom = node.meta["custom"]
        for held in {id(custom), *map(id, (custom[key] for key in store.raw_payloads(node)))}:
            sharing.setdefault(held, []).append(node)
    told: set[tuple[str, ...]] = set()
    for several in sharing.values():
        names = tuple(node.name for node in several)
        if len(several) > 1 and names not in told:
            told.add(names)
            yield Finding(Kind.ALIAS, names, (), f"{len(names)} nodes share one dict", seen.who(several[-1]))


def _fields(identity: Identity) -> Identity:
    return replace(identity, producer="")


def _said(identity: Identity | None) -> str:
    if identity is None:
        return "no role"
    return f"{identity.role} ({identity.source}, of {', '.join(identity.params or ()) or '?'})"
