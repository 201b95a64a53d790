"""Why does a job stand still? From what each rank last said of itself; reads values, returns values.

Ranks are compared group by group, by the number of collectives each has issued on it. Who has issued fewer is
waited for; who is waited for and waits for nobody himself comes first. On groups where all have issued as many,
torch's record of the operations says whether they were the same ones.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

from .board import spell, unspell

Kind = Literal["silent", "skipped", "other_operation", "behind", "unfinished"]

_URGENCY: dict[str, int] = {"silent": 0, "skipped": 1, "other_operation": 2, "behind": 3, "unfinished": 4}


@dataclass(frozen=True, slots=True)
class Graph:
    """A compiled graph of one rank; `rows` is empty when it came from a cache that recorded none."""

    kind: str
    name: str
    rows: Sequence[Mapping[str, Any]]


@dataclass(frozen=True, slots=True)
class Seen:
    """One rank: what `Standing.look` said, its graphs by number, its newest operations by group, whether it has
    stopped giving signs of life, and by how many seconds its last one is older than the newest of any rank, where
    that is more than it should be and no clocks that are apart are ruled out yet."""

    rank: int
    record: Mapping[str, Any]
    graphs: Mapping[int, Graph]
    operations: Mapping[str, Sequence[Sequence[Any]]]
    silent: bool = False
    old: float = 0.0

    @property
    def compiles(self) -> bool:
        """In a compile, and not in a graph."""
        return not self.gone and any(what.startswith("compiles") for what in self.record["doing"])

    @property
    def gone(self) -> bool:
        """Ended, or silent: it will not issue anything more."""
        return self.silent or bool(self.record["ended"])

    def where(self) -> str:
        """Where this rank stands, in words."""
        if self.record["ended"]:
            return "has ended"
        opened = [call for call in self.record["calls"] if call["out"] is None]
        place = self.record["doing"][-1] if self.record["doing"] else "is outside every graph"
        if opened and not self.record["doing"]:
            graph = self.graphs.get(opened[-1]["graph"])
            place = f"is in {_named(graph)}, call {opened[-1]['call']}"
        frames = self.record["frames"]
        inside = f" (inside: {'; '.join(frames[1:])})" if frames[1:] else ""
        text = f"{place}, at {frames[0]}{inside}" if frames else place
        if self.silent:
            return f"{text} (no sign of life since)"
        return f"{text} (its last sign of life is {self.old:.0f} s older than another rank's)" if self.old else text


@dataclass(frozen=True, slots=True)
class Collective:
    """One collective: number on its group from 1, and, when it belongs to a call of a graph whose table is known,
    its position among the graph's collectives, from 0."""

    number: int
    graph: str | None = None
    call: int | None = None
    position: int | None = None
    of: int | None = None
    row: Mapping[str, Any] | None = None

    def __str__(self) -> str:
        if self.graph is None:
            return f"collective {self.number}, outside every graph"
        if self.row is None or self.position is None:
            return f"collective {self.number}, in {self.graph}, call {self.call}"
        row = self.row
        what = f"{row['transport']} {row['role'] or 'without a role'}"
        unit = row["param_group"] or (row["params"] or [None])[0]
        of = f" of {unit}" if unit else ""
        return f"{what}{of}, collective {self.position + 1} of {self.of} in {self.graph}, call {self.call}"


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that keeps ranks waiting. `ranks` are those to look at, `waiting` those that wait for them."""

    kind: Kind
    group: str
    members: str
    ranks: tuple[int, ...]
    waiting: tuple[int, ...]
    collective: Collective
    detail: str = ""

    def __str__(self) -> str:
        who = _said(self.ranks, "has", "have")
        on = f"group {self.group!r} (ranks {self.members})"
        if self.kind == "skipped":
            return f"{who} skipped collectives on {on}: {self.detail}"
        if self.kind == "other_operation":
            return f"{who} issued another operation than the others on {on}, {self.collective}: {self.detail}"
        if self.kind == "unfinished":
            return f"all of {on} have issued {self.collective}, and it does not end"
        waits = _said(self.waiting, "waits", "wait")
        if self.kind == "silent":
            return f"{_said(self.ranks, 'gives', 'give')} no sign of life, and {waits} on {on}: {self.collective}"
        text = f"{who} not issued what {waits} for on {on}: {self.collective}"
        return f"{text}; {self.detail}" if self.detail else text


@dataclass(frozen=True, slots=True)
class Verdict:
    """`stands`: no rank that lives (none at all, where no rank has a sign of life) has moved for `still` seconds, at
    least as long as was asked for, and not only because some are `compiling`. `unheard` ranks never said anything;
    `findings` begin with the cause, as far as it can be told."""

    stands: bool
    still: float
    findings: tuple[Finding, ...]
    unheard: tuple[int, ...]
    compiling: tuple[int, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """As JSON values."""
        found = [{**asdict(f), "text": str(f)} for f in self.findings]
        lists = {"unheard": list(self.unheard), "compiling": list(self.compiling)}
        return {"stands": self.stands, "still": self.still, "findings": found, **lists}


def judge(seen: Sequence[Seen], ranks: int, stall: float) -> Verdict:
    """What the ranks' own words amount to.

    Args:
        seen: the ranks that were heard.
        ranks: of the job.
        stall: seconds without any movement from which the job counts as standing still.
    """
    alive = [one for one in seen if not one.gone]
    unheard = tuple(sorted(set(range(ranks)) - {one.rank for one in seen}))
    still = min((float(one.record["still"]) for one in alive), default=0.0)
    if (alive and still < stall) or all(one.record["ended"] for one in seen):
        return Verdict(False, still, (), unheard)
    found = [finding for members in _by_group(seen).items() for finding in _on_group(*members)]
    found = [replace(f, detail=_cycle(f, found)) if f.kind == "behind" else f for f in found]
    waiting = {rank for f in found if f.kind in ("silent", "behind") for rank in f.waiting}
    found.sort(key=lambda f: (_URGENCY[f.kind], set(f.ranks) <= waiting, len(f.ranks), f.group))
    compiling = tuple(one.rank for one in alive if one.compiles)
    excused = {*compiling, *waiting}  # when the compile ends, these may go on
    stands = not compiling or any(f.kind != "unfinished" and not excused.issuperset(f.ranks) for f in found)
    return Verdict(stands, still, tuple(found), unheard, compiling)


def _cycle(one: Finding, found: Sequence[Finding]) -> str:
    """Whether who is waited for here waits, on another group, for those that wait here."""
    for other in found:
        if other.kind == "behind" and set(one.ranks) <= set(other.waiting) and set(one.waiting) & set(other.ranks):
            waits, whom = _said(one.ranks, "waits", "wait"), _said(other.ranks, "", "").strip()
            return f"they wait for each other: {waits} for {whom} on group {other.group!r}"
    return ""


def _by_group(seen: Sequence[Seen]) -> dict[tuple[str, str], list[Seen]]:
    groups: dict[tuple[str, str], list[Seen]] = defaultdict(list)
    for one in seen:
        for name, (_, members) in one.record["groups"].items():
            groups[name, members].append(one)
    return groups


def _on_group(key: tuple[str, str], members: Sequence[Seen]) -> Iterator[Finding]:
    group, spelled = key
    yield from _skipped(group, spelled, members)
    counts = {one.rank: int(one.record["groups"][group][0]) for one in members}
    yield from _other_operation(group, spelled, members)
    low, high = min(counts.values()), max(counts.values())
    missing = tuple(sorted(set(unspell(spelled)) - set(counts)))
    if missing and any(_in_it(one, group, high) for one in members):
        told = max((_locate(one, group, high) for one in members), key=_telling)
        yield Finding("behind", group, spelled, missing, tuple(counts), told)
    elif low < high:
        behind = tuple(rank for rank, count in counts.items() if count == low)
        ahead = tuple(rank for rank, count in counts.items() if count > low)
        first = low + 1
        silent = all(one.silent for one in members if one.rank in behind)
        if silent:  # what it last said of itself may be old: it issued at least what another has got past
            first = max(_first_open(one, group, first) for one in members if one.rank in ahead)
        told = max((_locate(one, group, first) for one in members if one.rank in ahead), key=_telling)
        yield Finding("silent" if silent else "behind", group, spelled, behind, ahead, told)
    elif high and any(_in_it(one, group, high) for one in members if not one.silent):
        told = max((_locate(one, group, high) for one in members), key=_telling)
        quiet = tuple(one.rank for one in members if one.silent)
        waiting = tuple(rank for rank in counts if rank not in quiet)
        yield Finding("silent" if quiet else "unfinished", group, spelled, quiet or waiting, waiting, told)


def _skipped(group: str, spelled: str, members: Sequence[Seen]) -> Iterator[Finding]:
    """Ranks that left a graph with fewer collectives than any whole call of the same graph has had."""
    calls = [
        (one, graph, call, call["out"][group] - call["at"][group])
        for one in members
        for call in one.record["calls"]
        if (graph := one.graphs.get(call["graph"])) is not None and group in (call["out"] or ()) and group in call["at"]
    ]
    whole: dict[tuple[str, str], int] = defaultdict(int)
    for one in members:
        for graph in one.graphs.values():
            rows = sum(row["group"] == group for row in graph.rows)
            whole[graph.kind, graph.name] = max(whole[graph.kind, graph.name], rows)
    for one, graph, call, issued in calls:
        expected = whole[graph.kind, graph.name]
        if issued < expected:
            detail = f"it left {_named(graph)}, call {call['call']}, with {issued} of {expected} issued"
            others = tuple(other.rank for other in members if other is not one)
            collective = Collective(call["out"][group], _named(graph), call["call"])
            yield Finding("skipped", group, spelled, (one.rank,), others, collective, detail)


def _other_operation(group: str, spelled: str, members: Sequence[Seen]) -> Iterator[Finding]:
    """The first number under which members issued different operations, as torch recorded them."""
    by_number: dict[int, dict[str, list[Seen]]] = defaultdict(lambda: defaultdict(list))
    for one in members:
        for number, text, _ in one.operations.get(group, ()):
            name, _, sizes = str(text).partition(" ")
            uneven = "alltoall" in name or "all_to_all" in name  # its sizes may rightly differ between ranks
            by_number[number][name if uneven else f"{name} {sizes}"].append(one)
    for number in sorted(by_number):
        kinds = by_number[number]
        if len(kinds) > 1:
            few = min(kinds, key=lambda text: (len(kinds[text]), -kinds[text][-1].rank))
            others = [one.rank for text, ones in kinds.items() if text != few for one in ones]
            detail = "; ".join(f"{text} on ranks {spell([one.rank for one in ones])}" for text, ones in kinds.items())
            ranks = tuple(one.rank for one in kinds[few])
            collective = max((_locate(o, group, number) for o in members if o.rank in others), key=_telling)
            yield Finding("other_operation", group, spelled, ranks, tuple(others), collective, detail)
            return


def _locate(one: Seen, group: str, number: int) -> Collective:
    """Which collective of which call had this number on the group, as that rank knows it."""
    for call in reversed(one.record["calls"]):
        began, left = call["at"].get(group), (call["out"] or {}).get(group)
        if began is None or number <= began or (left is not None and number > left):
            continue
        graph = one.graphs.get(call["graph"])
        if graph is None:
            return Collective(number, "a graph", call["call"])
        on_group = [i for i, row in enumerate(graph.rows) if row["group"] == group]
        calls = [c for c in one.record["calls"] if c["graph"] == call["graph"] and c["out"]]
        several = any(c["out"][group] - c["at"][group] > len(on_group) for c in calls)  # a row counts as several
        offset = number - began - 1
        if offset >= len(on_group) or several:
            return Collective(number, _named(graph), call["call"])
        position = on_group[offset]
        return Collective(number, _named(graph), call["call"], position, len(graph.rows), graph.rows[position])
    return Collective(number)


def _in_it(one: Seen, group: str, number: int) -> bool:
    """Whether the rank may be waiting for this collective: torch says that it has not ended, or a call is open."""
    recorded = {n: ended for n, _, ended in one.operations.get(group, ())}
    if number in recorded:
        return not recorded[number]
    return any(call["out"] is None and number > call["at"].get(group, number) for call in one.record["calls"])


def _first_open(one: Seen, group: str, number: int) -> int:
    """The first collective from `number` on that the rank may still wait for: not one that has ended, nor one from
    before the graph that it is in."""
    recorded = {n: ended for n, _, ended in one.operations.get(group, ())}
    entered = max((call["at"].get(group, 0) for call in one.record["calls"] if call["out"] is None), default=0)
    while number < one.record["groups"][group][0] and recorded.get(number, number <= entered):
        number += 1
    return number


def _telling(collective: Collective) -> tuple[bool, bool]:
    return collective.row is not None, collective.graph is not None


def _said(ranks: Sequence[int], one: str, several: str) -> str:
    return f"rank {ranks[0]} {one}" if len(ranks) == 1 else f"ranks {spell(ranks)} {several}"


def _named(graph: Graph | None) -> str:
    return "a graph" if graph is None else f"{graph.kind} graph {graph.name}"
