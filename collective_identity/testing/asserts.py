"""Does a report hold the roles it should, and nothing lost? As assertions with the places in their text."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Literal

from ..codes import NOTHING_COMPILED
from ..reporting.report import FAULTS, RankReport, Report

Stage = Literal["captured", "after"]


def assert_nothing_lost(report: Report) -> None:
    """Every rank compiled something, and no identity was dropped, refuted, contradicted or left outside the graphs.

    Raises:
        AssertionError: with one line per fault, its code and its place.
    """
    __tracebackhide__ = True
    empty = [rank.rank for rank in report.ranks if not rank.graphs]
    if empty:
        raise AssertionError(
            f"ranks {empty} compiled nothing: expected a function compiled with backend='collective_identity', so "
            f"there is nothing that could be lost{_told(report)}"
        )
    reasons = [*report.failures, *report.faults(kind for kind in FAULTS if kind != "unfinished")]
    if reasons:
        raise AssertionError(_listed(f"{len(reasons)} reasons", reasons))


def _listed(what: str, texts: Sequence[str]) -> str:
    """The first in the first line, which is all that pytest's summary shows."""
    return "\n".join([f"{what}: {texts[0]}", *(f"  {text}" for text in texts[1:])])


def _told(report: Report) -> str:
    note = next((text for text in report.notes if NOTHING_COMPILED.id in text), None)
    return "" if note is None else f". {note}"


def assert_roles(report: Report, expected: Mapping[str, int], *, stage: Stage = "captured") -> None:
    """Each rank's graphs hold exactly these collectives by role, all graphs together.

    Args:
        report: of one rank or of several.
        expected: role → number; a collective without a role counts as ``"(TRANSPORT)"``, ``"(all_reduce)"``. Every
            role that occurs must be named.
        stage: ``"captured"`` before any pass, ``"after"`` once all have run.

    Raises:
        AssertionError: with each role that differs, the number found and some node names; or where a graph from a
            compile cache leaves the number unknown.
    """
    __tracebackhide__ = True
    if stage not in ("captured", "after"):
        raise ValueError(f"stage: expected 'captured' or 'after', found {stage!r}")
    wrong = [text for rank in report.ranks for text in _on_rank(rank, expected, stage)]
    if wrong:
        raise AssertionError(_listed(f"roles {stage}", wrong))


def _on_rank(rank: RankReport, expected: Mapping[str, int], stage: Stage) -> list[str]:
    found: Counter[str] = Counter()
    names: dict[str, list[str]] = {}
    texts = []
    for graph in rank.graphs:
        if graph.state == "passes only":
            continue
        rows = graph.before if stage == "captured" else graph.after
        if rows is None:
            texts.append(f"rank {rank.rank}: {graph.phase} graph {graph.name} is {graph.state}: its roles are unknown")
        for row in rows or ():
            role = row.role or f"({row.transport})"
            found[role] += 1
            names.setdefault(role, []).append(row.node)
    for role in sorted({*found, *expected}):
        if found[role] != expected.get(role, 0):
            nodes = ", ".join(names.get(role, [])[:4])
            texts.append(
                f"rank {rank.rank}: {role}: expected {expected.get(role, 0)}, found {found[role]}"
                + (f" ({nodes}{', ...' if found[role] > 4 else ''})" if nodes else "")
            )
    return texts
