"""In what do two reports, or two ranks of one, differ? Graph by graph, collective by collective."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from ..comparison import FIELDS
from ..digest import CollectiveRow
from .report import RankReport, Report
from .steps import Graph

_COMPARED = tuple(name for name in FIELDS if name != "group")
"""Names of process groups are a rank's own and differ between runs; their sizes are compared."""
_EXAMPLES = 10

_Row = tuple[Any, ...]


def rank_differences(report: Report) -> list[dict[str, Any]]:
    """What sets each rank apart from the first one: graphs it alone has or lacks, collectives, codes, verdict.

    One object per rank that differs: ``rank``, ``graphs`` as in `run_difference`, ``codes``. Sizes of a collective
    that may rightly differ (all-to-all) are compared as well: this tells, it does not judge.
    """
    first, *others = report.ranks
    found = []
    for other in others:
        difference = _ranks(first, other)
        if difference["graphs"] or difference["codes"]:
            found.append({"rank": other.rank, **difference})
    return found


def run_difference(a: Report, b: Report) -> dict[str, Any]:
    """How run B differs from run A, by the first rank of each.

    Returns:
        ``same``; ``coverage``: role, phase, and each count that differs as [a, b]; ``codes``: code → [a, b] counts;
        ``graphs``: one object per graph that differs: ``graph``, ``stage`` (``captured`` or ``after``), ``in`` (``a``
        or ``b`` where only one has it, else ``both``), ``count`` [a, b], ``only_a`` and ``only_b`` (number of
        collectives without a counterpart), ``first`` (position, field and both values of the first divergence, null
        where only counts are known), ``examples``; ``failures``: {``only_a``, ``only_b``}.
    """
    first, second = a.ranks[0], b.ranks[0]
    difference = _ranks(first, second)
    coverage = _coverage(first, second)
    ours, theirs = ((*of.run_failures, *rank.failures) for of, rank in ((a, first), (b, second)))
    failures = {
        "only_a": [text for text in ours if text not in theirs],
        "only_b": [text for text in theirs if text not in ours],
    }
    same = not (difference["graphs"] or difference["codes"] or coverage or failures["only_a"] or failures["only_b"])
    return {"same": same, "coverage": coverage, **difference, "failures": failures}


def _ranks(a: RankReport, b: RankReport) -> dict[str, Any]:
    ours, theirs = _by_name(a.graphs), _by_name(b.graphs)
    graphs = []
    for name in dict.fromkeys((*ours, *theirs)):
        one, other = ours.get(name), theirs.get(name)
        if one is None or other is None:
            graphs.append({"graph": name, "stage": "captured", "in": "b" if one is None else "a"})
            continue
        for stage in ("captured", "after"):
            rows = [graph.before if stage == "captured" else graph.after for graph in (one, other)]
            difference = _rows(rows[0], rows[1])
            if difference is not None:
                graphs.append({"graph": name, "stage": stage, "in": "both", **difference})
    codes = {code: counts for code, counts in _codes(a, b).items() if counts[0] != counts[1]}
    return {"graphs": graphs, "codes": codes}


def _by_name(graphs: Sequence[Graph]) -> dict[str, Graph]:
    """Graphs by phase and name; the second of a name has its number behind it."""
    seen: Counter[str] = Counter()
    named = {}
    for graph in graphs:
        name = f"{graph.phase} {graph.name}"
        seen[name] += 1
        named[name if seen[name] == 1 else f"{name} #{seen[name]}"] = graph
    return named


def _rows(a: Sequence[CollectiveRow] | None, b: Sequence[CollectiveRow] | None) -> dict[str, Any] | None:
    if a is None or b is None:
        if a is None and b is None:
            return None
        counts = [None if rows is None else len(rows) for rows in (a, b)]
        return {"count": counts, "only_a": None, "only_b": None, "first": None, "examples": []}
    ours, theirs = [_key(row) for row in a], [_key(row) for row in b]
    if ours == theirs:
        return None
    only_a, only_b = Counter(ours) - Counter(theirs), Counter(theirs) - Counter(ours)
    examples = [
        {"in": side, "node": rows[keys.index(key)].node, "count": n, **dict(zip(_COMPARED, key, strict=True))}
        for side, only, keys, rows in (("a", only_a, ours, a), ("b", only_b, theirs, b))
        for key, n in list(only.items())[:_EXAMPLES]
    ]
    return {
        "count": [len(a), len(b)],
        "only_a": only_a.total(),
        "only_b": only_b.total(),
        "first": _first(ours, theirs),
        "examples": examples,
    }


def _key(row: CollectiveRow) -> _Row:
    return tuple(getattr(row, name) for name in _COMPARED)


def _first(ours: Sequence[_Row], theirs: Sequence[_Row]) -> dict[str, Any]:
    for position in range(min(len(ours), len(theirs))):
        for name, a, b in zip(_COMPARED, ours[position], theirs[position], strict=True):
            if a != b:
                return {"position": position, "field": name, "a": a, "b": b}
    position = min(len(ours), len(theirs))
    return {"position": position, "field": "collective", "a": position < len(ours), "b": position < len(theirs)}


def _codes(a: RankReport, b: RankReport) -> dict[str, list[int]]:
    counts = [{w.code: w.count for w in rank.warnings} for rank in (a, b)]
    return {code: [c.get(code, 0) for c in counts] for code in sorted({*counts[0], *counts[1]})}


def _coverage(a: RankReport, b: RankReport) -> list[dict[str, Any]]:
    sides = [{(row.role, row.phase): row for row in rank.coverage.rows} for rank in (a, b)]
    names = ("expected", "captured", "explicit", "inferred", "malformed", "unlabelled", "not_captured", "after")
    found = []
    for role, phase in sorted({*sides[0], *sides[1]}):
        rows = [side.get((role, phase)) for side in sides]
        values = {name: [None if row is None else getattr(row, name) for row in rows] for name in names}
        changed = {name: both for name, both in values.items() if both[0] != both[1]}
        if changed:
            found.append({"role": role, "phase": phase, **changed})
    return found
