"""Growth of our passes with the graph: overlap, coalesced buckets, fusion, the guard, reconciling, the ledger.

``python -m benchmarks passes [--json] [--large 100000]``. Processor seconds at a hundredth, a tenth and the whole of
so many collectives; at most 12 times the seconds for ten times the graph, or the benchmark fails. Bucketing by copying
and dedup are measured in ``bucketing`` and ``dedup``, normalise and classify in ``classify``.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import fx

import collective_identity as ci
from collective_identity.compat import collector_paused
from inductor_passes.bucketing import apply_plan, plan_buckets
from inductor_passes.fusion import apply_fusions, plan_fusions
from inductor_passes.lite_mode import guarded
from inductor_passes.overlap import apply_overlap, plan_overlap
from inductor_passes.reconcile import reconciled

from . import synthetic
from .bucketing import gathers
from .measure import best_of, growing, one_process, parser, show, too_fast


def coalesce(gm: fx.GraphModule) -> int:
    """Units of 50 gathers, each sent where it lies."""
    with collector_paused():
        plan = plan_buckets(gm, coalesced=("all_gather",))
        assert apply_plan(gm, plan)
    return len(plan.buckets)


def overlap(gm: fx.GraphModule) -> int:
    """Every gather starts a unit ahead, every reduction is waited for a unit later."""
    with collector_paused():
        plan = plan_overlap(gm, ahead=1)
        assert apply_overlap(gm, plan)
    return len(plan.started) + len(plan.delayed)


def fuse(gm: fx.GraphModule) -> int:
    """Each gather of an activation becomes part of its product."""
    plan = plan_fusions(gm, enabled=lambda group: True)
    assert apply_fusions(gm, plan)
    return len(plan.fusions)


def guard(gm: fx.GraphModule) -> int:
    """Look at the graph before and after a pass that may change nothing."""
    with guarded((gm,), "benchmark"):
        return 0


def reconcile(gm: fx.GraphModule) -> int:
    """Watch passes that change nothing."""
    with reconciled(gm):
        return 0


def ledger(gm: fx.GraphModule) -> int:
    """The tables of a graph before and after, as the report keeps them."""
    with ci.enable(agreement_timeout=0):
        log = ci.session.ensure().begin_graph("forward", "benchmark", "benchmark")
        log.captured(ci.collective_table(gm))
        log.finish(ci.collective_table(gm))
    return 0


def trained(count: int, group: str) -> fx.GraphModule:
    """Forward and backward with so many collectives."""
    return synthetic.training(synthetic.PER_UNIT * count // 2, explicit=True)


def products(count: int, group: str) -> fx.GraphModule:
    """Activations gathered for a product each, as sequence parallelism does; backward is given every product."""
    made = synthetic.Nodes(shape=(4, 4))
    weight, made_products = made.placeholder("w"), []
    for index in range(count):
        start = made.all_gather(made.placeholder(f"x{index}"), group)
        ci.stamp(start, ci.Identity(1, "tp.activation_gather", ci.Source.EXPLICIT, "benchmark", group))
        full = made.call(synthetic.WAIT, start, like=start)
        made_products.append(made.call(synthetic.aten.mm.default, full, weight, like=start))
    return made.module(*made_products)


def units(count: int, group: str) -> fx.GraphModule:
    """Gathers in units of 50."""
    return gathers(count, group, per_unit=50)


Make = Callable[[int, str], fx.GraphModule]
PASSES: tuple[tuple[Callable[[fx.GraphModule], int], Make], ...] = (
    (overlap, trained), (coalesce, units), (fuse, products), (guard, trained), (reconcile, trained), (ledger, trained),
)  # fmt: skip


def row_of(run: Callable[[fx.GraphModule], int], make: Make, count: int, group: str) -> dict[str, Any]:
    """The least seconds of a pass on fresh graphs of so many collectives, and what it did."""
    seconds, done = [], 0
    for _ in range(3 if count <= 10_000 else 1):
        gm = make(count, group)
        taken, done = best_of(1, lambda gm=gm: run(gm))  # type: ignore[misc]
        seconds.append(taken)
    least = min(seconds)
    return {"collectives": count, "done": done, "seconds": least, "us_per_collective": least / count * 1e6}


def main() -> int:
    """Run the benchmark."""
    options = parser("growth of our passes with the graph")
    options.add_argument("--large", type=int, default=100_000, help="collectives of the largest graph (default 100000)")
    given = options.parse_args()
    rows: list[dict[str, Any]] = []
    with one_process(2) as group:
        show({"benchmark": "passes", "torch": torch.__version__, "seconds": "processor"}, as_json=given.json)
        for run, make in PASSES:
            row_of(run, make, 100, group)  # fill torch's caches
            for row in growing(given.large, lambda count, run=run, make=make: row_of(run, make, count, group)):  # type: ignore[misc]
                rows.append({"what": run.__name__, **row})
                show(rows[-1], as_json=given.json)
    wrong = too_fast(rows)
    print("".join(f"{line}\n" for line in wrong), end="", file=sys.stderr)
    return 1 if wrong else 0
