"""Do the files of a run folder make one whole run? A file of another job, or one that ends early, is said."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from .jsonl import RankLog
from .records import RunRecord
from .steps import Graph

_APART = 1800.0
"""Seconds: torch's own bound for ranks that wait for each other (2.11-2.15 ``distributed/constants.py``)."""
_SKEW = 30.0  # seconds by which clocks of hosts may be apart
_WHY = "its record ends before, or it ran without torch.compile"


@dataclass(slots=True)
class Together:
    """Which ranks' records are told, and what is amiss: of the run, and by rank."""

    kept: tuple[RankLog, ...]
    failures: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    by_rank: dict[int, list[str]] = field(default_factory=dict)


def run_of(log: RankLog) -> RunRecord | None:
    """The `run` line of a section; None when it could not be read."""
    return next((record for record in log.records if isinstance(record, RunRecord)), None)


def sort_out(logs: Sequence[RankLog], *, folder: bool) -> Together:
    """Leave out what is unreadable or of an earlier start; in a `folder` every rank must have left a file."""
    ordered = sorted(logs, key=lambda log: log.rank)
    runs = {log.rank: run for log in ordered if (run := run_of(log)) is not None}
    newest = max(runs.values(), key=lambda run: run.started, default=None)
    found = Together(())
    kept: list[RankLog] = []
    stale: list[RankLog] = []
    for log in ordered:
        if not log.records:
            found.failures.append(f"rank {log.rank} left no readable record: {'; '.join(log.damaged) or 'none'}")
            continue
        run = runs.get(log.rank)
        same = newest is None or run is None or (run.run_id, run.restart) == (newest.run_id, newest.restart)
        (kept if same and (newest is None or log.rank < newest.ranks) else stale).append(log)
    found.kept = tuple(kept)
    if stale:
        found.notes.append(f"ranks {[log.rank for log in stale]} are of an earlier start and left out")
    if not folder or not kept:
        return found
    for log in kept:
        if texts := _out_of_place(log, runs, newest):
            found.by_rank[log.rank] = texts
    sections = max(log.sections for log in kept)
    found.notes += [
        f"rank {log.rank} left {log.sections} sessions, others {sections}" for log in kept if log.sections < sections
    ]
    if newest is not None:
        there = sorted({log.rank for log in ordered} - {log.rank for log in stale})
        if missing := _gaps(there, newest.ranks):
            found.failures.append(f"ranks [{missing}] of {newest.ranks} left no readable file")
    return found


def _gaps(ranks: Sequence[int], of: int) -> str:
    """The numbers below `of` that are not among the sorted `ranks`: "1, 3-6"."""
    ends = [-1, *(rank for rank in ranks if rank < of), of]
    gaps = [(a + 1, b - 1) for a, b in zip(ends, ends[1:], strict=False) if b - a > 1]
    return ", ".join(str(a) if a == b else f"{a}, {b}" if b == a + 1 else f"{a}-{b}" for a, b in gaps)


def _out_of_place(log: RankLog, runs: Mapping[int, RunRecord], newest: RunRecord | None) -> list[str]:
    """Why a rank's section cannot be of the same session as the newest rank's."""
    run = runs.get(log.rank)
    if run is None or newest is None:
        return ["its run line cannot be read: whether its records are of this job is not known"]
    texts = []
    other = "its file may be of an earlier job in this folder, which left nothing in this one"
    last = max((r.session or 0 for r in runs.values()), default=0)
    if run.ranks != newest.ranks:
        texts.append(f"it says that the job has {run.ranks} ranks, rank {newest.rank} says {newest.ranks}; {other}")
    if run.session is not None and run.session < last:
        texts.append(f"session {run.session} of its process, where other ranks have {last}; {other}")
    elif newest.started - run.started > _APART:
        apart = newest.started - run.started
        texts.append(f"its session began {apart:.0f} s before rank {newest.rank}'s; {other}")
    elif log.written is not None and newest.started - log.written > _SKEW:
        apart = newest.started - log.written
        texts.append(f"its last record is {apart:.0f} s older than rank {newest.rank}'s first; {other}")
    return texts


def ended_early(graphs: Mapping[int, Sequence[Graph]], ranks: int) -> tuple[dict[int, list[str]], dict[int, list[str]]]:
    """Ranks that lack graphs which others have: failures where they must have had them, else notes, by rank.

    A graph with collectives on all `ranks`, or one that another rank found to agree, cannot have run without
    this rank. Without such a proof stages of a pipeline may rightly hold different graphs.
    """
    failures: dict[int, list[str]] = {}
    notes: dict[int, list[str]] = {}
    counts = {rank: _Count.of(held, ranks) for rank, held in graphs.items()}
    for rank, mine in counts.items():
        others = {other: count for other, count in counts.items() if other != rank and count.any}
        if others and not graphs[rank]:
            other = next(iter(others))
            failures[rank] = [f"no compiled graph, where rank {other} has {len(graphs[other])}: {_WHY}"]
            continue
        for phase in dict.fromkeys(phase for count in others.values() for phase in count.any):
            held = mine.any[phase] + mine.unknown[phase]
            most = max(count.all[phase] for count in others.values())
            agreed = max(count.agreed[phase] for count in others.values())
            have = f"{held} {phase} graphs with collectives, where"
            if held < agreed or (most and not held):
                text = f"{have} another rank has {max(agreed, most)} that this one must have run too: {_WHY}"
                failures.setdefault(rank, []).append(text)
            elif held < most or not held:
                most = max(count.any[phase] for count in others.values())
                notes.setdefault(rank, []).append(f"{have} another rank has {most}")
    return failures, notes


@dataclass(frozen=True, slots=True)
class _Count:
    """Graphs of one rank by phase: with collectives, with one on all ranks, of those agreed upon, of unknown rows."""

    any: Counter[str]
    all: Counter[str]
    agreed: Counter[str]
    unknown: Counter[str]

    @classmethod
    def of(cls, graphs: Sequence[Graph], ranks: int) -> _Count:
        found = cls(Counter(), Counter(), Counter(), Counter())
        for graph in graphs:
            if graph.before is None:
                found.unknown[graph.phase] += 1
            elif graph.before:
                found.any[graph.phase] += 1
                whole = any(row.group_size == ranks for row in graph.before)
                found.all[graph.phase] += whole
                verdict = graph.agreement.status if graph.agreement is not None else ""
                found.agreed[graph.phase] += whole and verdict == "agreed"
        return found
