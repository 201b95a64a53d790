"""Classification: ours against torch's own, the cost of an all-explicit graph, growth with size, networkx's share.

``python -m benchmarks classify [--json] [--deep C] [--nodes N]``. Processor seconds; a million nodes take three
minutes, most of it spent in making the graphs, and 4 GB. Fails if ten times as many nodes, the larger graph of 100,000
or more, take over 12 times the seconds; if a graph of 100,000 or more where every identity is explicit takes over 5 us
a node; if a deep ancestry of 5000 collectives or more is read less than 100 times as fast as torch reads it.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import Any

import torch
from torch import fx

from collective_identity import classify_report, normalize, start_nodes
from collective_identity.compat import torch_version

from . import synthetic
from .measure import Stopwatch, best_of, parser, show

US_PER_NODE, DEEP, TIMES_TORCH = 5, 5000, 100
AT_MOST, LARGE = 12, 100_000
"""Times the seconds for ten times the nodes, on graphs that large; smaller ones are too quick to tell."""


def grows_too_fast(rows: Iterable[dict[str, Any]]) -> list[str]:
    """What is wrong with the growth from each row to the next, which has ten times its nodes."""
    wrong, before = [], None
    for row in rows:
        growth = 0.0 if before is None else row["classify_s"] / before
        before = row["classify_s"]
        if growth > AT_MOST and row["nodes"] >= 0.99 * LARGE:
            wrong.append(f"{row['nodes']} nodes took {growth:.1f} times a tenth's seconds, at most {AT_MOST} expected")
    return wrong


def too_slow(all_explicit: dict[str, Any], deep: dict[str, Any]) -> list[str]:
    """What is wrong with the seconds of a full run, in a row each; torch below 2.12 looks no further than one cast."""
    wrong = []
    if all_explicit["nodes"] >= LARGE and all_explicit["us_per_node"] > US_PER_NODE:
        wrong.append(f"all explicit: {all_explicit['us_per_node']:.2f} us a node, at most {US_PER_NODE} expected")
    if deep["collectives"] >= DEEP and deep["ratio"] < TIMES_TORCH and torch_version() >= (2, 12):
        wrong.append(f"deep ancestry: {deep['ratio']:.0f} times as fast as torch, at least {TIMES_TORCH} expected")
    return wrong


def torchs_gathers(gm: fx.GraphModule) -> int:
    """How many all-gathers torch itself takes for FSDP's, asked one by one as its passes do."""
    from torch._inductor.fx_passes import fsdp

    if hasattr(fsdp, "is_fsdp_all_gather"):
        return sum(fsdp.is_fsdp_all_gather(node) for node in start_nodes(gm))
    return sum(fsdp.is_fsdp_all_gather_wait(next(iter(node.users))) for node in start_nodes(gm))


def explicit(nodes: int) -> dict[str, Any]:
    """Normalise and classify where every collective has an explicit identity."""
    gm = synthetic.training(nodes, explicit=True)
    count = len(gm.graph.nodes)
    normalise_s, changed = best_of(5, lambda: normalize(gm))
    classify_s, report = best_of(5, lambda: classify_report(gm))
    assert not changed and not report.structure_built and None not in report.identities.values()
    return {
        "what": "all explicit",
        "nodes": count,
        "collectives": len(report.identities),
        "normalise_s": normalise_s,
        "classify_s": classify_s,
        "us_per_node": (normalise_s + classify_s) / count * 1e6,
        "networkx_imported": "networkx" in sys.modules,
    }


def structural(gm: fx.GraphModule, rules: Any = "extended") -> dict[str, Any]:
    """Classify a graph without identities: seconds in all, and inside networkx."""
    import networkx

    classify_s, report = best_of(5, lambda: classify_report(gm, rules=rules))
    assert report.structure_built
    with (
        Stopwatch().attached(networkx.DiGraph, "add_nodes_from", "add_edges_from") as building,
        Stopwatch().attached(networkx, "topological_sort") as sorting,
    ):
        timed_s, _ = best_of(1, lambda: classify_report(gm, rules=rules))
    return {
        "nodes": len(gm.graph.nodes),
        "collectives": len(report.identities),
        "fsdp": sum(identity is not None for identity in report.identities.values()),
        "classify_s": classify_s,
        "us_per_node": classify_s / len(gm.graph.nodes) * 1e6,
        "networkx_share": (building.seconds + sorting.seconds) / timed_s,
    }


def main() -> int:
    """Run the benchmark."""
    options = parser("classification against torch's own")
    options.add_argument("--deep", type=int, default=5000, help="collectives of the deep ancestry (default 5000)")
    options.add_argument("--nodes", type=int, default=1_000_000, help="nodes of the largest graph (default 1000000)")
    given = options.parse_args()

    show({"benchmark": "classify", "torch": torch.__version__, "seconds": "processor"}, as_json=given.json)
    all_explicit = explicit(min(given.nodes, 150_000))
    show(all_explicit, as_json=given.json)
    before, rows = None, []
    for nodes in (given.nodes // 100, given.nodes // 10, given.nodes):
        row = structural(synthetic.training(nodes, explicit=False))
        growth = {} if before is None else {"times_the_seconds_for_10_times_the_nodes": row["classify_s"] / before}
        before = row["classify_s"]
        rows.append(row)
        show({"what": "no identity", **row, **growth}, as_json=given.json)

    show({"what": "joins", **structural(synthetic.joins(given.nodes // 40))}, as_json=given.json)
    gm = synthetic.deep_ancestry(given.deep)
    compatible, extended = structural(gm, "compatible"), structural(gm)
    torch_s, found = best_of(1, lambda: torchs_gathers(gm))
    assert found == compatible["fsdp"], "the compatible rules are torch's verdict"
    show({"what": "deep ancestry", "rules": "compatible", **compatible}, as_json=given.json)
    last = {"what": "deep ancestry", "rules": "extended", **extended, "torch_s": torch_s}
    last["ratio"] = torch_s / max(compatible["classify_s"], extended["classify_s"])
    show(last, as_json=given.json)
    wrong = grows_too_fast(rows) + too_slow(all_explicit, last)
    print("".join(f"{line}\n" for line in wrong), end="", file=sys.stderr)
    return 1 if wrong else 0
