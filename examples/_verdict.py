"""Is what was captured what FSDP2 had to do? The verdict, the one line that says it, and faults to try it on."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from _cluster import Cluster
from _options import Options
from _training import Run
from torch import fx

if TYPE_CHECKING:
    from collective_identity import Report

COUNTS = ("explicit", "inferred", "malformed", "dropped", "not_captured", "other")
FAULTS = ("inferred", "malformed", "dropped", "not_captured")


@dataclass(frozen=True, slots=True)
class Outcome:
    """One rank's report, judged. The first four fields are those of the JSON line, ``folder`` is the run folder."""

    collectives: Mapping[str, Any]
    counts: Mapping[str, int]
    seconds: Mapping[str, float]
    agreement: str
    folder: Path | None = None
    failures: list[str] = field(default_factory=list)

    @staticmethod
    def of_eager() -> Outcome:
        """Return what there is to say of a run without capture: nothing."""
        kinds = ("expected", "captured", "before_bucketing", "after_bucketing")
        seconds = {"compile": 0.0, "passes": 0.0}
        return Outcome({kind: {} for kind in kinds}, dict.fromkeys(COUNTS, 0), seconds, "off")


def judge(report: Report, options: Options, folder: Path) -> Outcome:
    """Return this rank's outcome; any collective that is not as expected is among its ``failures``."""
    data = report.to_dict()
    failures = list(report.failures)
    failures += [f"{data['counts'][kind]} collectives are {kind}" for kind in FAULTS if data["counts"][kind]]
    expected, captured = data["collectives"]["expected"], data["collectives"]["captured"]
    failures += [
        f"{role}, {phase}: {captured[role][phase]} captured, {want} expected"
        for role, phases in expected.items()
        for phase, want in phases.items()
        if None not in (want, captured[role][phase]) and captured[role][phase] != want
    ]
    merges = options.bucketing and options.mode == "optimize"
    for row in data["coverage"]:
        want = row["buckets_expected"] if merges else row["captured"]
        if row["after"] is not None and want is not None and row["after"] != want:
            failures.append(f"{row['role']}, {row['phase']}: {row['after']} collectives after the passes, not {want}")
    for graph in data["graphs"]:
        before, after = (_foreign(graph[when]) for when in ("captured", "after"))
        if before is not None and after is not None and before != after:
            failures.append(f"{graph['phase']} graph: collectives that are not FSDP's were {before}, are {after}")
    return Outcome(data["collectives"], data["counts"], data["seconds"], data["agreement"], folder, failures)


def _foreign(roles: Mapping[str, int] | None) -> dict[str, int] | None:
    """Return the collectives of other owners in one graph (those of tensor parallelism, say), ``None`` if unknown."""
    return None if roles is None else {role: n for role, n in roles.items() if not role.startswith("fsdp.")}


def show(folder: Path) -> None:
    """Print the report of all ranks in a run folder to stderr."""
    import collective_identity

    report = collective_identity.report(folder)
    if find_spec("rich"):
        from collective_identity.reporting.terminal import render

        render(report, file=sys.stderr, run=folder)
    else:
        counts = ", ".join(f"{n} {kind}" for kind, n in report.to_dict()["counts"].items())
        print(f"collective identity: {'ok' if report.ok else 'NOT OK'}; {counts}", file=sys.stderr)
    print(f"run folder: {folder}", file=sys.stderr)


def result_line(
    options: Options, ranks: Cluster, run: Run, outcome: Outcome, difference: float | None, failures: list[str]
) -> dict[str, Any]:
    """Return the JSON line of a run; its keys are listed in ``docs/run-format.md``."""
    return {
        "schema": 1,
        "losses": run.means(),
        "max_rel_diff_to_eager": difference,
        "ranks": ranks.size,
        "mesh": "x".join(map(str, options.mesh)),
        "collectives": outcome.collectives,
        "counts": outcome.counts,
        "tokens_per_s": round(run.tokens_per_s, 1),
        "seconds": outcome.seconds,
        "agreement": outcome.agreement,
        "ok": not failures,
        "failures": failures,
    }


def plant(fault: str) -> Callable[[fx.GraphModule], None]:
    """Return a pass that breaks the first FSDP collective it meets, on every rank alike.

    ``remove`` takes the payload away. ``mislabel`` gives the collective another role, well-formed and explicit,
    so that only a comparison with what FSDP2 must do can find it out.
    """
    planted: list[fx.Node] = []

    def break_one(gm: fx.GraphModule) -> None:
        from collective_identity import clear, identity_of, stamp, start_nodes

        for node in start_nodes(gm):
            identity = identity_of(node)
            if planted or identity is None:
                continue
            planted.append(node)
            if fault == "remove":
                clear(node)
            else:
                stamp(node, dataclasses.replace(identity, role="user.mislabelled"))

    return break_one
