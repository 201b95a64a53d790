"""What becomes of identities in passes that know nothing of them? Upstream's run as they are, and are put right.

Upstream writes the first member's metadata on every node of a bucket, by reference, drops it in a reduce-scatter
dedup and in a decomposition, and aliases it in a lowering (PyTorch 2.11-2.15 ``_inductor/fx_passes``:
``bucketing._populate_node_meta``, ``fsdp.dedup_fsdp_reduce_scatter``, ``decomp_comms``,
``low_contention_collectives._replace_collective``, ``control_dependencies.preserve_node_ordering``). While open,
`reconciled` watches one graph; after each erased start node it applies the contract to whatever took over.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from time import perf_counter

from torch import fx

from collective_identity import BucketRecord, Identity, Member, codes, store
from collective_identity.callers import pass_name
from collective_identity.codes import Code
from collective_identity.compat import collector_paused
from collective_identity.lineage import Step, Takeover, Watch
from collective_identity.merge import Outcome, merge_outcome, replacement_outcome, split_outcome
from collective_identity.roles import DEFAULT_ROLES
from collective_identity.subgraphs import wrapped_body
from collective_identity.transports import Launch, launch_of, launches

FOLDER = "torch/_inductor/fx_passes"

Say = Callable[..., None]
"""``GraphLog.event``, or anything called as ``say(code, node=, role=, pass_name=, detail=)``."""


@dataclass(slots=True)
class Reconciled:
    """What was put right.

    Attributes:
        merged: collectives that stand for several now.
        replaced: collectives that stand for one other.
        cleared: nodes that lost an identity which was never theirs.
        lost: identities that ended their life, as (code, pass, role).
        seconds: what this took, the passes themselves not included.
    """

    merged: int = 0
    replaced: int = 0
    cleared: int = 0
    lost: list[tuple[Code, str, str]] = field(default_factory=list)
    seconds: float = 0.0

    def to_dict(self) -> dict[str, object]:
        """JSON values for the report."""
        lost = [{"code": code.id, "pass": who, "role": role} for code, who, role in self.lost]
        return {"merged": self.merged, "replaced": self.replaced, "cleared": self.cleared, "lost": lost}


@contextmanager
def reconciled(gm: fx.GraphModule, say: Say | None = None) -> Iterator[Reconciled]:
    """Run any passes inside; no node of ``gm`` ends with a wrong, spread or aliased identity.

    Call it on a normalised graph. A pass that reads identities meanwhile may still read a wrong one: until its step
    ends (see `lineage.Watch`) a new collective carries whatever its pass copied there, of upstream's buckets the first
    member's payload; then what the contract gives it. Linear in nodes, edges and events.

    Args:
        gm: the graph; hooks are on its module while open, and gone afterwards, whatever happens inside.
        say: where each loss is recorded.

    Yields:
        What was put right, complete on exit.
    """
    start = perf_counter()
    with collector_paused():
        reconciler = _Reconciler(gm, say)
    done = reconciler.done

    def step(one: Step) -> None:
        start = perf_counter()
        reconciler.step(one)
        done.seconds += perf_counter() - start

    done.seconds += perf_counter() - start
    with Watch(gm, step, name=_who, on_rebuilt=reconciler.rebuilt).watching():
        yield done
    start = perf_counter()
    with collector_paused():
        reconciler.finish()
    done.seconds += perf_counter() - start


def _who() -> str:
    return pass_name(FOLDER) or "a pass that does not say"


class _Reconciler:
    def __init__(self, gm: fx.GraphModule, say: Say | None) -> None:
        self._gm, self._say = gm, say
        self.done = Reconciled()
        self._held: dict[fx.Node, Identity | None] = {}
        self._count: Counter[Identity] = Counter()
        self._decided: set[fx.Node] = set()
        for node, launch in launches(gm).items():
            store.put(node, store.raw_payloads(node))  # a dict of its own, whatever it shared
            self._hold(node, _identity(node, launch))

    def step(self, step: Step) -> None:
        """Give each new collective of the step what the contract gives it, and take from the rest what is not theirs.

        A collective whose pass keeps the contract itself (it recorded the members) is left as it is.
        """
        members: dict[fx.Node, list[Takeover]] = {}
        gone: list[Takeover] = []
        for takeover in step.takeovers:
            if len(takeover.by) == 1:
                members.setdefault(takeover.by[0], []).append(takeover)
            elif self._held.get(takeover.erased) is not None and not takeover.dead:
                gone.append(takeover)
        starts = set(step.starts)
        metas = {id(takeover.erased.meta) for takeover in step.takeovers}
        for node in step.fresh:
            if id(node.meta) in metas:  # the whole metadata is shared, not only what is in it
                node.meta = dict(node.meta)
            metas.add(id(node.meta))
            if node not in starts:
                self.done.cleared += store.has_payload(node)
                store.clear(node)  # a loss that was spread is not the node's own either
        for node, several in members.items():
            self._took_over(node, several)
        parts = {node for takeover in gone for node in takeover.by}
        orphans = [node for node in step.starts if node not in members and node not in parts]
        by_group: dict[str | None, list[Takeover]] = {}
        for takeover in gone:
            if not takeover.by and takeover.opaque is None:
                by_group.setdefault(takeover.launch.group, []).append(takeover)
        dead = [takeover for takeover in step.takeovers if takeover.dead]
        for node in orphans:
            self._orphan(node, by_group.get(_launch(node).group, []), dead)
        left = {_launch(node).group: node for node in reversed(orphans)}
        for takeover in gone:
            self._ended(takeover, left.get(takeover.launch.group))
        for takeover in step.takeovers:
            self._hold(takeover.erased, None)
            del self._held[takeover.erased]
        self._decided.update(node for node in step.starts if node in self._held)

    def rebuilt(self, same: Mapping[fx.Node, fx.Node]) -> None:
        """Follow a graph that was copied node by node."""
        self._held = {same[node]: held for node, held in self._held.items() if node in same}
        self._count = Counter(held for held in self._held.values() if held is not None)
        self._decided = {same[node] for node in self._decided if node in same}

    def finish(self) -> None:
        """Look once at the whole graph: passes also write without creating or erasing anything."""
        seen: set[int] = set()
        found = launches(self._gm)
        of_starts = {id(node.meta) for node in found}
        metas: set[int] = set()
        for node in self._gm.graph.nodes:
            body = wrapped_body(node)
            for inner in body.graph.nodes if body is not None else ():
                if store.has_payload(inner):  # the node that runs the body is the collective
                    store.put(inner, {})
                    self.done.cleared += 1
            paid = store.has_payload(node)
            if paid or id(node.meta) in of_starts:  # only where it holds a payload, or will, does it matter whose it is
                if id(node.meta) in metas:  # another node's whole metadata, assigned
                    node.meta = dict(node.meta)
                metas.add(id(node.meta))
            if not paid:
                continue
            if node not in found:
                store.put(node, {})
                self.done.cleared += 1
            elif id(node.meta["custom"]) in seen:
                store.put(node, store.raw_payloads(node))
            seen.add(id(node.meta.get("custom")))
        for node, launch in found.items():
            held = self._held.get(node)
            now = _identity(node, launch)
            if now == held or store.dropped_of(node) is not None:
                continue
            if held is not None and not DEFAULT_ROLES.allows(held.role, launch.transport):
                self._drop(node, codes.DROPPED_OPAQUE, _who(), held.role, f"its operator is now {launch.transport}")
            elif node in self._decided:  # written over after its step
                self._settle(node, Outcome(held), [held], _who())
            elif now is not None and held is not None and self._count[now]:  # another's, given in passing
                store.stamp(node, held)
                self.done.cleared += 1
            elif now is None and held is not None:
                self._drop(node, codes.DROPPED_UNKNOWN, _who(), held.role, "its metadata was written over")

    def _hold(self, node: fx.Node, identity: Identity | None) -> None:
        before = self._held.get(node)
        if before is not None:
            self._count[before] -= 1
        self._held[node] = identity
        if identity is not None:
            self._count[identity] += 1

    def _took_over(self, node: fx.Node, several: list[Takeover]) -> None:
        launch, who = _launch(node), several[0].pass_name
        parts = [one.erased for one in several]
        if node in self._held:  # it was there before: common subexpressions, found equal
            parts.insert(0, node)
        elif (kept := store.members_of(node)) is not None and all(store.members_of(p) is not kept for p in parts):
            self._hold(node, _identity(node, launch))
            return
        identities = [self._held.get(part) for part in parts]
        outcome = Outcome(identities[0])
        if len(parts) == 1:
            self.done.replaced += 1
            earlier = store.members_of(parts[0])
            if earlier is not None:
                store.set_members(node, earlier)
            lost = store.dropped_of(parts[0])
            if lost is not None and lost.code is not None:  # lost earlier, and recorded then
                store.drop(node, lost.code, lost.pass_name or who, lost.detail)
                self._hold(node, None)
                return
        else:
            self.done.merged += 1
            outcome = merge_outcome(identities, producer=who)
            store.set_members(node, BucketRecord(who, tuple(_members(parts, identities))))
            lost = next((found for part in parts if (found := store.dropped_of(part)) is not None), None)
            if lost is not None and lost.code is not None and not any(identities):
                store.drop(node, lost.code, lost.pass_name or who, lost.detail)
                self._hold(node, None)
                return
        if outcome.identity is not None:
            outcome = replacement_outcome(outcome.identity, launch.transport, producer=who)
        self._settle(node, outcome, identities, who)
        self._hold(node, outcome.identity)

    def _settle(self, node: fx.Node, outcome: Outcome, identities: Iterable[Identity | None], who: str) -> None:
        if outcome.identity is not None:
            store.stamp(node, outcome.identity)
        elif outcome.code is not None:
            store.drop(node, outcome.code, who, outcome.detail)
            for role in sorted({one.role for one in identities if one is not None}):
                self._record(outcome.code, node, who, role, outcome.detail)
        else:
            self.done.cleared += store.has_payload(node)
            store.clear(node)

    def _orphan(self, node: fx.Node, theirs: list[Takeover], dead: list[Takeover]) -> None:
        """A new collective that took over from none: what it carries is its own, a copy's, or somebody else's.

        Of one that went as dead code in this step it is a copy if no other of its kind went with it: else a bucket.
        """
        if theirs:
            who = theirs[0].pass_name
            roles = sorted({held.role for one in theirs if (held := self._held.get(one.erased)) is not None})
            store.drop(node, codes.DROPPED_DECOMPOSED, who, f"{who} decomposed {', '.join(roles)}")
            self._hold(node, None)
            return
        launch = _launch(node)
        found = _identity(node, launch)
        kin = [one for one in dead if (one.launch.transport, one.launch.group) == (launch.transport, launch.group)]
        went = sum(self._held.get(one.erased) == found for one in dead)
        copied = found is not None and (self._count[found] > went or went == len(kin) == 1)
        if copied or (found is not None and store.members_of(node) is not None):
            store.put(node, store.raw_payloads(node))  # a copy, by value
        elif store.has_payload(node):
            store.put(node, {})
            self.done.cleared += 1
            found = None
        self._hold(node, found)

    def _ended(self, takeover: Takeover, orphan: fx.Node | None) -> None:
        held, who = self._held[takeover.erased], takeover.pass_name
        assert held is not None, takeover.erased.name
        was = takeover.launch
        if takeover.opaque is not None:
            detail = f"{who} fused {held.role} into {takeover.opaque.name}"
            store.drop(takeover.opaque, codes.DROPPED_OPAQUE, who, detail)
            self._record(codes.DROPPED_OPAQUE, takeover.opaque, who, held.role, detail)
        elif takeover.by:
            transports = [_launch(node).transport for node in takeover.by]
            outcomes = split_outcome(held, was.transport, transports, producer=who)
            for node, outcome in zip(takeover.by, outcomes, strict=True):
                self._settle(node, outcome, [held], who)
                self._hold(node, outcome.identity)
        elif orphan is not None:
            self._record(codes.DROPPED_DECOMPOSED, orphan, who, held.role, f"{who} decomposed {held.role}")
        else:
            self._record(codes.DROPPED_UNKNOWN, takeover.erased, who, held.role, f"{who} erased {takeover.erased.name}")

    def _drop(self, node: fx.Node, code: Code, who: str, role: str, detail: str) -> None:
        store.drop(node, code, who, detail)
        self._hold(node, None)
        self._record(code, node, who, role, detail)

    def _record(self, code: Code, node: fx.Node, who: str, role: str, detail: str) -> None:
        self.done.lost.append((code, who, role))
        if self._say is not None:
            self._say(code, node=node, role=role, pass_name=who, detail=detail)


def _members(parts: Iterable[fx.Node], identities: Iterable[Identity | None]) -> Iterator[Member]:
    """What each part was made of: its own members if it is a bucket, else itself."""
    for part, identity in zip(parts, identities, strict=True):
        earlier = store.members_of(part)
        yield from earlier.members if earlier is not None else (Member(part.name, identity),)


def _identity(node: fx.Node, launch: Launch) -> Identity | None:
    return store.verdict_for(node, launch, store.raw_payloads(node)).identity


def _launch(node: fx.Node) -> Launch:
    launch = launch_of(node)
    assert launch is not None, node.name
    return launch
