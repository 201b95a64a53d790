"""What does the report of a variant say of its collectives, and which variants failed?"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import collective_identity as ci
from benchmarks.train_layouts import TP
from benchmarks.train_variants import VARIANTS
from collective_identity.reporting import Report
from collective_identity.roles import is_fsdp

if TYPE_CHECKING:
    from benchmarks.train_measure import Figures


def read(report: Report, *, fusion: bool) -> dict[str, Any]:
    """The fields of `Figures` that a report gives, from this rank's graphs."""
    found = report.to_dict()
    after = found["collectives"]["after_bucketing"]
    graphs = report.ranks[0].graphs
    return {
        "gathers": after.get(ci.PARAM_UNSHARD),
        "reductions": after.get(ci.GRAD_REDUCE_SHARD),
        "replica_reductions": after.get(ci.GRAD_REPLICATE_REDUCE),
        "passes_s": found["seconds"]["passes"],
        "report_ok": report.ok,
        "report_failures": report.failures,
        "explicit_share": _explicit_share(found["coverage"]),
        "tp_collectives": sum(count for role, count in found["other"].items() if role.startswith(TP)),
        "merged_with_others": sum(_merged_with_others(graph.before, graph.after) for graph in graphs),
        **(_fusions(graphs) if fusion else {}),
    }


def _explicit_share(coverage: Sequence[Mapping[str, Any]]) -> float | None:
    """Of FSDP's collectives, captured or expected and missing; None where there are none or that is not known."""
    counts = [(row["explicit"], row["captured"], row["not_captured"]) for row in coverage]
    if any(captured is None for _, captured, _ in counts):
        return None
    total = sum(captured + (missing or 0) for _, captured, missing in counts)
    return sum(explicit for explicit, _, _ in counts) / total if total else None


def _merged_with_others(before: Sequence[Any] | None, after: Sequence[Any] | None) -> int:
    """How many collectives that were not FSDP's went into one with FSDP's."""
    roles = {row.node: row.role for row in before or ()}
    found = 0
    for row in after or ():
        members = [is_fsdp(roles[name]) for name in row.members or () if name in roles]
        if any(members) or is_fsdp(row.role):
            found += members.count(False)
    return found


def _fusions(graphs: Sequence[Any]) -> dict[str, Any]:
    """How many collectives became part of a matrix product, of which roles, and why others of tensor parallelism did
    not; nothing where no pass ran, because every graph came from a compile cache."""
    plans = [(graph, one.summary) for graph in graphs for one in graph.passes if one.name == "fusion"]
    if not plans:
        return {}
    fused: Counter[str] = Counter()
    left: Counter[str] = Counter()
    for graph, plan in plans:
        roles = {row.node: str(row.role) for row in graph.before or ()}
        fused.update(str(fusion["role"]) for fusion in plan["fusions"])
        left.update(one["slug"] for one in plan["refusals"] if roles.get(one["node"], "").startswith(TP))
    return {"fused": fused.total(), "fused_roles": dict(fused), "not_fused": dict(left)}


def faults(ranks: Sequence[Sequence[Figures]], tolerance: float) -> tuple[list[str], list[str]]:
    """What went wrong on any rank: in variants of this package or its baselines, and in those of torch's own passes.

    Args:
        ranks: the figures of every rank, variants in the same order.
        tolerance: how far losses may be from the first variant's, relatively.
    """
    ours: list[str] = []
    upstreams: list[str] = []
    for rank, figures in enumerate(ranks):
        for one in figures:
            told = upstreams if VARIANTS[one.variant].upstream else ours
            told += [f"{one.variant}, rank {rank}: {text}" for text in _faults(one, figures[0], tolerance)]
    return ours, upstreams


def _faults(one: Figures, reference: Figures, tolerance: float) -> list[str]:
    if one.error is not None:
        return [one.error]
    texts = []
    if one is not reference and not VARIANTS[one.variant].bound and reference.error is None:
        worst = max(_distance(a, b) for a, b in zip(reference.losses, one.losses, strict=True))
        if not worst <= tolerance:
            texts.append(f"losses differ from {reference.variant}'s by {worst:.2e} > {tolerance}")
    if one.report_ok is False:
        texts.append(f"the report fails: {'; '.join(one.report_failures)}")
    if one.explicit_share not in (None, 1.0):
        texts.append(f"{one.explicit_share:.1%} of FSDP's collectives are explicit, expected all")
    if one.merged_with_others:
        texts.append(f"{one.merged_with_others} collectives that are not FSDP's were merged with FSDP's")
    strangers = sorted(role for role in one.fused_roles or () if not role.startswith(TP))
    if strangers:
        texts.append(f"fused for {', '.join(strangers)}, expected tp.* only")
    return texts


def _distance(expected: float, found: float) -> float:
    """Relative; a NaN, which no comparison finds, is as far as can be."""
    return abs(expected - found) / abs(expected) if found == found else float("inf")
