"""What does a run amount to? One report from the records of one rank or of all, as values and as a dict."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from .. import codes
from . import totals
from .coverage import Coverage, cover
from .jsonl import RankLog
from .records import SCHEMA, EndRecord, EventRecord, ExpectedRecord, RunRecord
from .steps import CONFLICT, DROPPED, MALFORMED, PHASES, Graph, graphs_of, steps_of
from .together import ended_early, run_of, sort_out

_AGREEMENT = ("differs", "timeout", "agreed", "alone", "skipped", "off")  # the first found speaks for the run
_EXAMPLES = 20

FAULTS = ("lost", "conflict", "malformed", "not_captured", "unfinished")
"""Kinds of fault that `Report.faults` can be asked for."""


@dataclass(frozen=True, slots=True)
class Warned:
    """One code and where it came up; `examples` holds the first twenty places, `count` all."""

    code: str
    slug: str
    severity: str
    text: str
    remedy: str
    count: int
    examples: tuple[Mapping[str, Any], ...]


@dataclass(frozen=True, slots=True)
class RankReport:
    """One rank's part of the report."""

    rank: int
    run: RunRecord | None
    graphs: tuple[Graph, ...]
    coverage: Coverage
    warnings: tuple[Warned, ...]
    failures: tuple[str, ...]
    notes: tuple[str, ...]
    agreement: str
    unfinished: str | None = None

    @property
    def counts(self) -> dict[str, int]:
        """Collectives by what is known of them. `malformed` and `dropped` are of every graph, the others of
        the steps shown in the coverage."""
        rows = self.coverage.rows
        return {
            "explicit": sum(row.explicit for row in rows),
            "inferred": sum(row.inferred for row in rows),
            "malformed": sum(len(graph.marked(MALFORMED, "malformed")) for graph in self.graphs),
            "dropped": sum(len(graph.marked(DROPPED, "dropped")) for graph in self.graphs),
            "not_captured": sum(row.not_captured or 0 for row in rows),
            "other": sum(self.coverage.other.values()),
        }

    @property
    def seconds(self) -> dict[str, float]:
        """Seconds of all compiles and of our passes in them."""
        finished = [graph.finish for graph in self.graphs if graph.finish is not None]
        return {
            "compile": round(sum(f.compile_seconds or 0.0 for f in finished), 6),
            "passes": round(sum(p.seconds for graph in self.graphs for p in graph.passes), 6),
        }

    @property
    def collectives(self) -> dict[str, Any]:
        """Expected and captured by role and phase (null: unknown), before and after bucketing by role."""
        rows = self.coverage.rows
        roles = list(dict.fromkeys(row.role for row in rows))

        def by_phase(name: str) -> dict[str, dict[str, int | None]]:
            table: dict[str, dict[str, int | None]] = {role: dict.fromkeys(PHASES, 0) for role in roles}
            for row in rows:
                table[row.role][row.phase] = getattr(row, name)
            return table

        def by_role(name: str) -> dict[str, int | None]:
            totals: dict[str, int | None] = {}
            for role in roles:
                values = [getattr(row, name) for row in rows if row.role == role]
                totals[role] = None if None in values else sum(values)
            return totals

        return {
            "expected": by_phase("expected"),
            "captured": by_phase("captured"),
            "before_bucketing": by_role("captured"),
            "after_bucketing": by_role("after"),
        }


@dataclass(frozen=True, slots=True)
class Report:
    """What a run captured, labelled, merged and lost. `ranks` is sorted; the first one's tables are shown.
    `run_failures` and `run_notes` are of no rank that is shown: missing, unreadable or earlier files."""

    ranks: tuple[RankReport, ...]
    run_failures: tuple[str, ...] = ()
    run_notes: tuple[str, ...] = ()

    @property
    def failures(self) -> tuple[str, ...]:
        """Everything that is not as declared, each text with its rank where the report holds several."""
        return (*self.run_failures, *self._all("failures"))

    @property
    def notes(self) -> tuple[str, ...]:
        """What a reader should know but need not mend."""
        return (*self.run_notes, *self._all("notes"))

    @property
    def ok(self) -> bool:
        """No failure on any rank."""
        return not self.failures

    @property
    def agreement(self) -> str:
        """The worst verdict of the cross-rank check: differs, timeout, agreed, alone, skipped, off or
        none."""
        return _worst(rank.agreement for rank in self.ranks)

    def faults(self, kinds: Iterable[str]) -> list[str]:
        """One line per fault of the given kinds (`FAULTS`) on any rank; ValueError for an unknown kind."""
        found = []
        for kind in kinds:
            if kind not in FAULTS:
                raise ValueError(f"expected kinds out of {', '.join(FAULTS)}, found {kind!r}")
            for rank in self.ranks:
                found += [f"{kind}: {self._on(rank)}{text}" for text in _faults(rank, kind)]
        return found

    def to_dict(self) -> dict[str, Any]:
        """Primitives only; the keys are listed in docs/run-format.md."""
        first = self.ranks[0]
        run = first.run
        return {
            "schema": SCHEMA,
            "ok": self.ok,
            "failures": list(self.failures),
            "notes": list(self.notes),
            "agreement": self.agreement,
            "rank": first.rank,
            "ranks": run.ranks if run is not None else len(self.ranks),
            "run": None if run is None else asdict(run),
            "counts": first.counts,
            "collectives": first.collectives,
            "coverage": [asdict(row) for row in first.coverage.rows],
            "other": dict(first.coverage.other),
            "roles": totals.by_role(first.graphs),
            "losses": totals.losses(first.graphs),
            "steps": first.coverage.steps,
            "seconds": first.seconds,
            "graphs": [_graph(graph) for graph in first.graphs],
            "warnings": [asdict(warned) for warned in first.warnings],
            "by_rank": [
                {
                    "rank": rank.rank,
                    "ok": not rank.failures,
                    "counts": rank.counts,
                    "agreement": rank.agreement,
                    "seconds": rank.seconds,
                    "graphs": len(rank.graphs),
                }
                for rank in self.ranks
            ],
        }

    def _all(self, name: str) -> tuple[str, ...]:
        return tuple(self._on(rank) + text for rank in self.ranks for text in getattr(rank, name))

    def _on(self, rank: RankReport) -> str:
        return f"rank {rank.rank}: " if len(self.ranks) > 1 else ""


def build_report(logs: Sequence[RankLog], *, folder: bool = True) -> Report:
    """The report of one or more ranks' records. Ranks left over from an earlier start are left out, and said;
    in a run `folder` every rank is expected to have left a file, and graphs that the others have too."""
    found = sort_out(logs, folder=folder)
    ranks = [_rank_report(log, folder=folder) for log in found.kept]
    told = next((rank.run.ranks for rank in ranks if rank.run is not None), len(ranks))
    early, notes = ended_early({rank.rank: rank.graphs for rank in ranks}, told) if folder else ({}, {})
    return Report(
        tuple(
            replace(
                rank,
                failures=(*found.by_rank.get(rank.rank, ()), *early.get(rank.rank, ()), *rank.failures),
                notes=(*rank.notes, *notes.get(rank.rank, ())),
            )
            for rank in ranks
        ),
        tuple(found.failures),
        tuple(found.notes),
    )


def _rank_report(log: RankLog, *, folder: bool) -> RankReport:
    graphs = graphs_of(log.records)
    declared = [record for record in log.records if isinstance(record, ExpectedRecord)]
    events = [record for record in log.records if isinstance(record, EventRecord)]
    coverage = cover(steps_of(graphs), declared)
    failures = list(coverage.failures)
    unfinished = _unfinished(log, folder=folder)
    notes = [*([] if unfinished is None else [unfinished]), *coverage.notes]
    notes += [
        f"{event.code} {event.slug}: {event.text}; {event.detail or 'nothing was declared'}. {event.remedy}"
        for event in events
        if event.code in (codes.NOTHING_COMPILED.id, codes.EAGER_ROLES.id)
    ]
    for graph in graphs:
        where = f"{graph.phase} graph {graph.name}"
        if graph.state == "unfinished":
            failures.append(f"{where}: its compile did not end, or its record was cut off")
        elif graph.finish is not None and graph.finish.error is not None:
            failures.append(f"{where}: the compile failed: {graph.finish.error}")
        elif graph.cached:
            notes.append(
                f"{where}: from a compile cache, no pass ran in this process; its compile seconds are what finding and "
                "loading it took"
            )
        if graph.agreement is not None and graph.agreement.status == "differs":
            failures.append(f"{where}: {graph.agreement.detail}")
        elif graph.agreement is not None and graph.agreement.status == "timeout":
            notes.append(f"{where}: not compared with every rank: {graph.agreement.detail}")
    failures += [
        f"{event.code} {event.slug}: {event.text}; {event.detail}"
        for event in events
        if event.severity == "error" and event.code != codes.RANKS_DISAGREE.id
    ]
    notes += log.damaged
    if log.sections > 1:
        notes.append(f"the last of {log.sections} sessions in the file")
    verdicts = (graph.agreement.status for graph in graphs if graph.agreement is not None)
    return RankReport(
        rank=log.rank,
        run=run_of(log),
        graphs=graphs,
        coverage=coverage,
        warnings=_warned(events, graphs),
        failures=tuple(failures),
        notes=tuple(notes),
        agreement=_worst(verdicts),
        unfinished=unfinished,
    )


def _unfinished(log: RankLog, *, folder: bool) -> str | None:
    """What ended the session, if it was not its end. In a run `folder` a session that is open has left no last line."""
    end = next((record for record in log.records if isinstance(record, EndRecord)), None)
    if end is not None:
        return None if end.error is None else f"an exception ended the session: {end.error}"
    return "the session was never closed: its process was killed, or still runs" if folder else None


def _worst(verdicts: Iterable[str]) -> str:
    found = set(verdicts)
    return next((verdict for verdict in _AGREEMENT if verdict in found), "none")


def _warned(events: Sequence[EventRecord], graphs: Sequence[Graph]) -> tuple[Warned, ...]:
    names = {graph.number: f"{graph.phase} {graph.name}" for graph in graphs}
    by_code: dict[str, list[EventRecord]] = {}
    for event in events:
        by_code.setdefault(event.code, []).append(event)
    rank = {"error": 0, "warning": 1, "info": 2}
    return tuple(
        Warned(
            code=found[0].code,
            slug=found[0].slug,
            severity=found[0].severity,
            text=found[0].text,
            remedy=found[0].remedy,
            count=len(found),
            examples=tuple(
                {
                    "graph": None if e.graph is None else names.get(e.graph, str(e.graph)),
                    "node": e.node,
                    "role": e.role,
                    "pass": e.pass_name,
                    "detail": e.detail,
                    "params": None if e.params is None else list(e.params),
                    "stack": e.stack,
                }
                for e in found[:_EXAMPLES]
            ),
        )
        for found in sorted(by_code.values(), key=lambda f: (rank.get(f[0].severity, 0), f[0].code))
    )


def _faults(rank: RankReport, kind: str) -> list[str]:
    if kind == "unfinished":
        return [] if rank.unfinished is None else [rank.unfinished]
    if kind == "not_captured":
        rows = [row for row in rank.coverage.rows if row.not_captured]
        missing = (codes.NOT_CAPTURED.id, codes.NOTHING_COMPILED.id)
        told = [(w, e) for w in rank.warnings if w.code in missing for e in w.examples]
        return [
            *(f"{row.role}, {row.phase}: {row.not_captured} of {row.expected} not captured" for row in rows),
            *(f"{w.code} {w.slug}: {example['detail'] or w.text}" for w, example in told),
        ]
    slug = {code.id: code.slug for code in codes.CODES.values()}
    wanted, absence = {
        "lost": (DROPPED, "dropped"),
        "malformed": (MALFORMED, "malformed"),
        "conflict": (CONFLICT, "conflict"),
    }[kind]
    return [
        f"{code} {slug.get(code, '')}: node {node} of {graph.phase} graph {graph.name}"
        for graph in rank.graphs
        for node, code in graph.marked(wanted, absence).items()
    ]


def _graph(graph: Graph) -> dict[str, Any]:
    finish = graph.finish
    return {
        "graph": graph.number,
        "phase": graph.phase,
        "name": graph.name,
        "backend": graph.backend,
        "state": graph.state,
        "error": finish.error if finish is not None else None,
        "cached": graph.cached,
        "lite": graph.lite,
        "compile_seconds": finish.compile_seconds if finish is not None else None,
        "agreement": graph.agreement.status if graph.agreement is not None else "none",
        "captured": _roles(graph.before),
        "after": _roles(graph.after),
        "passes": [
            {
                "name": p.name,
                "seconds": p.seconds,
                "changed": p.changed,
                "before": dict(p.before),
                "after": dict(p.after),
                "summary": dict(p.summary),
            }
            for p in graph.passes
        ],
    }


def _roles(rows: Sequence[Any] | None) -> dict[str, int] | None:
    return None if rows is None else dict(Counter(row.role or f"({row.transport})" for row in rows))
