"""Which compiled graphs make up one training step, and which collectives does it hold?

A forward and a backward with the same name are one step. A recompile, or an evaluation graph beside a
training graph, is a step of its own: steps are compared with what was expected one by one and never added up.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType

from .. import codes
from ..digest import CollectiveRow
from ..roles import GRAD_REDUCE_SHARD, GRAD_REPLICATE_REDUCE, PARAM_UNSHARD, is_fsdp
from .records import (
    AgreementRecord,
    CapturedRecord,
    EventRecord,
    FinishRecord,
    GraphRecord,
    PassRecord,
    Record,
)

PHASES = ("forward", "regather", "backward")

MALFORMED = frozenset(
    code.id
    for code in (
        codes.MISSING_FIELD,
        codes.WRONG_TYPE,
        codes.UNKNOWN_VERSION,
        codes.UNKNOWN_SOURCE,
        codes.BAD_ROLE,
        codes.ROLE_TRANSPORT,
        codes.GROUP_MISMATCH,
        codes.SEQ_NR_COPY,
        codes.BACKWARD_ONLY,
    )
)
"""Codes of a payload that counts as absent."""
DROPPED = frozenset(
    code.id
    for code in (
        codes.DROPPED_MIXED,
        codes.DROPPED_OPAQUE,
        codes.DROPPED_DECOMPOSED,
        codes.DROPPED_UNKNOWN,
    )
)
"""Codes of an identity that a transformation lost."""
CONFLICT = frozenset((codes.STRUCTURE_MISMATCH.id, codes.AMBIGUOUS_PAYLOAD.id))
"""Codes of evidence that contradicts itself."""

_ROLE_OF: Mapping[str, str] = MappingProxyType(
    {"all_gather": PARAM_UNSHARD, "reduce_scatter": GRAD_REDUCE_SHARD, "all_reduce": GRAD_REPLICATE_REDUCE}
)

Cell = tuple[str, str]
"""(role, phase)."""


@dataclass(slots=True)
class Graph:
    """The records of one compile."""

    number: int
    phase: str
    name: str
    backend: str
    begun: str = "off"
    modules: tuple[str, ...] | None = None
    captured: tuple[CollectiveRow, ...] | None = None
    finish: FinishRecord | None = None
    agreement: AgreementRecord | None = None
    events: list[EventRecord] = field(default_factory=list)
    passes: list[PassRecord] = field(default_factory=list)

    @property
    def state(self) -> str:
        """ "compiled", "failed", "unfinished", or "passes only" for a joint graph that compiles as its two
        halves."""
        if self.finish is not None:
            return "compiled" if self.finish.error is None else "failed"
        return "passes only" if self.phase == "joint" and self.captured is None else "unfinished"

    @property
    def lite(self) -> str:
        """The lite state: what the compile ended with, else what it began with."""
        return self.begun if self.finish is None or self.finish.error is not None else self.finish.lite

    @property
    def cached(self) -> bool:
        return self.finish is not None and self.finish.cached

    @property
    def before(self) -> tuple[CollectiveRow, ...] | None:
        """The collectives captured; None when they are not known (from cache, not there yet, failed)."""
        if self.captured is not None:
            return self.captured
        return self.after

    @property
    def after(self) -> tuple[CollectiveRow, ...] | None:
        """The collectives left; None when they are not known."""
        if self.finish is None or self.finish.error is not None:
            return None
        unknown = self.finish.cached and not self.finish.rows and self.captured != ()  # nothing comes of nothing
        return None if unknown else tuple(self.finish.rows)

    def phase_of(self, row: CollectiveRow) -> str:
        """ "forward", "regather" (a gather on the backward side) or "backward" (a reduction)."""
        if row.transport != "all_gather":
            return "backward"
        backward = self.phase == "backward" or (self.phase in ("joint", "step") and row.backward)
        return "regather" if backward else "forward"

    def marked(self, wanted: frozenset[str], absence: str) -> dict[str, str]:
        """Node → code for the nodes that an event with such a code or a row with such an absence names.

        What normalisation dropped because it was malformed or in conflict counts as that.
        """
        rows = (*(self.captured or ()), *(self.finish.rows if self.finish else ()))
        others = (MALFORMED | DROPPED | CONFLICT) - wanted
        found = {row.node: row.code or "" for row in rows if row.absence == absence and row.code not in others}
        found.update(
            {event.node or f"({event.detail})": event.code for event in self.events if event.code in wanted}
        )
        return found


@dataclass(frozen=True, slots=True)
class Step:
    """The graphs of one compile of one piece of code: `kind` "training", "inference", or "backward" when
    only that was seen. `parts` are the graphs to count in, `phases` those phases they tell about."""

    name: str
    kind: str
    parts: tuple[Graph, ...]
    phases: frozenset[str]

    @property
    def known(self) -> bool:
        return bool(self.phases)

    @property
    def modules(self) -> tuple[str, ...]:
        """The declared models whose parameters its graphs take, sorted; none when that is not known."""
        return tuple(sorted({name for graph in self.parts for name in graph.modules or ()}))


@dataclass(frozen=True, slots=True)
class Tally:
    """What a step holds, by (role, phase). `absent` are collectives in the graph whose role is not known
    there, for whatever reason; `groups` splits `captured` by parameter group as well."""

    captured: Counter[Cell]
    explicit: Counter[Cell]
    inferred: Counter[Cell]
    malformed: Counter[Cell]
    unlabelled: Counter[Cell]
    absent: Counter[Cell]
    dropped: Mapping[Cell, Counter[str]]
    after: Counter[Cell]
    groups: Counter[tuple[str, str, str | None]]
    other: Counter[str]

    @property
    def has_fsdp(self) -> bool:
        return any(is_fsdp(role) for role, _ in self.captured)


def graphs_of(records: Iterable[Record]) -> tuple[Graph, ...]:
    """The compiles in a rank's records, in the order in which they began."""
    graphs: dict[int, Graph] = {}
    for record in records:
        if isinstance(record, GraphRecord):
            graphs[record.graph] = Graph(
                record.graph, record.phase, record.name, record.backend, record.lite, record.modules
            )
            continue
        number = getattr(record, "graph", None)
        graph = graphs.get(number) if number is not None else None
        if graph is None:
            continue  # a session's own record, or one whose `graph` line was damaged
        if isinstance(record, CapturedRecord):
            graph.captured = tuple(record.rows)
        elif isinstance(record, FinishRecord):
            graph.finish = replace(record, rows=tuple(record.rows))
        elif isinstance(record, AgreementRecord):
            graph.agreement = record
        elif isinstance(record, EventRecord):
            graph.events.append(record)
        elif isinstance(record, PassRecord):
            graph.passes.append(record)
    return tuple(graphs[number] for number in sorted(graphs))


def steps_of(graphs: Iterable[Graph]) -> tuple[Step, ...]:
    """Pair forwards with backwards. A joint graph stands for its step where the two halves are not known; a step that
    was compiled as one graph is a step."""
    slots: list[dict[str, Graph]] = []
    for graph in graphs:
        needs = {"forward": "joint", "backward": "forward"}.get(graph.phase)
        home = next(
            (
                slot
                for slot in reversed(slots)
                if graph.phase not in slot
                and "inference" not in slot
                and needs is not None
                and (needs in slot or (graph.phase == "backward" and "joint" in slot))
                and next(iter(slot.values())).name == graph.name
            ),
            None,
        )
        if home is None:
            slots.append({graph.phase: graph})
        else:
            home[graph.phase] = graph
    return tuple(_step(slot) for slot in slots)


def _step(slot: Mapping[str, Graph]) -> Step:
    name = next(iter(slot.values())).name
    if "inference" in slot:
        graph = slot["inference"]
        return Step(
            name, "inference", (graph,), frozenset() if graph.before is None else frozenset(("forward",))
        )
    if "step" in slot:
        graph = slot["step"]
        return Step(name, "training", (graph,), frozenset() if graph.before is None else frozenset(PHASES))
    parts: list[Graph] = []
    phases: set[str] = set()
    for phase, tells in (("forward", ("forward",)), ("backward", ("regather", "backward"))):
        graph_or_none = slot.get(phase)
        if graph_or_none is not None and graph_or_none.before is not None:
            parts.append(graph_or_none)
            phases.update(tells)
    joint = slot.get("joint")
    if joint is not None and joint.before is not None and len(phases) < len(PHASES):
        parts, phases = [joint], set(PHASES)
    if not parts:
        parts = list(slot.values())
    return Step(
        name, "backward" if set(slot) == {"backward"} else "training", tuple(parts), frozenset(phases)
    )


def merged(steps: Iterable[Step]) -> Step:
    """All steps as one: a model whose code was split over several graphs."""
    listed = tuple(steps)
    phases = frozenset(PHASES).intersection(*(step.phases for step in listed))
    return Step(
        " + ".join(s.name for s in listed), "training", tuple(g for s in listed for g in s.parts), phases
    )


def tally(step: Step, *, any_group: bool = False) -> Tally:
    """Count a step. A collective without a role counts where its transport would put it when its payload was
    malformed or dropped, or (`unlabelled`) when it had none and runs on a group that carries that role here;
    `any_group` lifts the last condition."""
    captured: Counter[Cell] = Counter()
    explicit: Counter[Cell] = Counter()
    inferred: Counter[Cell] = Counter()
    malformed: Counter[Cell] = Counter()
    unlabelled: Counter[Cell] = Counter()
    absent: Counter[Cell] = Counter()
    after: Counter[Cell] = Counter()
    dropped: dict[Cell, Counter[str]] = {}
    groups: Counter[tuple[str, str, str | None]] = Counter()
    other: Counter[str] = Counter()
    homes = {(row.role, row.group) for graph in step.parts for row in graph.before or () if is_fsdp(row.role)}
    for graph in step.parts:
        bad, lost = graph.marked(MALFORMED, "malformed"), graph.marked(DROPPED, "dropped")
        places: dict[str, Cell] = {}
        phases: dict[str, str] = {}
        for row in graph.before or ():
            guess = _ROLE_OF.get(row.transport)
            phase = phases[row.node] = graph.phase_of(row)
            if guess is not None:
                places[row.node] = (guess, phase)
            if row.role is not None and is_fsdp(row.role):
                cell = places[row.node] = (row.role, phase)
                captured[cell] += 1
                groups[row.role, phase, row.param_group] += 1
                (explicit if row.source == "explicit" else inferred)[cell] += 1
            elif row.role is not None or guess is None:
                other[row.role or f"({row.transport})"] += 1
            elif row.node in bad or row.node in lost:
                absent[guess, phase] += 1
            else:
                other[f"({row.transport})"] += 1
                if any_group or (guess, row.group) in homes:
                    unlabelled[guess, phase] += 1
                    absent[guess, phase] += 1
        for row in graph.after or ():
            if row.role is not None and is_fsdp(row.role):
                first = row.members[0] if row.members else row.node  # of a merged one its members tell
                after[row.role, phases.get(first) or graph.phase_of(row)] += 1
        by_event = {event.node: event.role for event in graph.events if event.role is not None}
        for node in bad:
            malformed[places.get(node, ("(none)", "backward"))] += 1
        for node, code in lost.items():
            role = by_event.get(node)
            phase = "regather" if graph.phase == "backward" else "forward"
            cell = places.get(node) or (role or "(none)", phase if role == PARAM_UNSHARD else "backward")
            dropped.setdefault(cell, Counter())[code] += 1
    return Tally(captured, explicit, inferred, malformed, unlabelled, absent, dropped, after, groups, other)
