"""Growth of our passes with the graph, and of what the report keeps.

``python -m benchmarks passes [--json] [--large 100000] [--only NAME ...]``. Processor seconds at a hundredth, a tenth
and the whole of so many collectives; at most 12 times the seconds for ten times the graph, or the benchmark fails. So
it does where the bytes a collective grow. ``manual_overlap`` is torch's own scheduler, up to 1000 collectives, made to
read identities first and put right: seconds are our share, without any work of torch's. Torch's bucketing and dedup
beside ours are in ``bucketing`` and ``dedup``, normalise and classify in ``classify``.

Seconds also grow with memory that no cache holds; ``--lines --large 10000`` counts the lines of Python that run
instead: at most 10.5 times as many, or it fails.
"""

from __future__ import annotations

import gc
import sys
import tracemalloc
from collections.abc import Callable, Container, Iterator
from contextlib import ExitStack
from typing import Any

import torch
from torch import fx

import collective_identity as ci
from collective_identity import lineage
from collective_identity.compat import collector_paused
from inductor_passes import metadata_first as first
from inductor_passes import reconcile as reconcile_module
from inductor_passes.bucketing import apply_plan, plan_buckets
from inductor_passes.contract import PassContext
from inductor_passes.fusion import apply_fusions, plan_fusions
from inductor_passes.lite_mode import LiteState, guarded
from inductor_passes.options import BackendOptions
from inductor_passes.overlap import apply_overlap, plan_overlap
from inductor_passes.reconcile import reconciled
from inductor_passes.reshard import RESHARD_KEY, Reshard
from inductor_passes.upstream_passes import upstream_passes

from . import dedup as deduplication
from . import synthetic
from .bucketing import gathers
from .measure import LARGE, Stopwatch, best_of, growing, lines_of, one_process, parser, show, too_fast

MANUAL = 1000
"""Collectives of the largest graph given to torch's manual scheduler."""

LINES_GROW = 10.5
"""Times the lines executed, at most, for ten times the collectives: sorting and heaps may take a little more."""

BYTES_GROW = 1.25
"""Times the bytes a collective, at most, for ten times the collectives: tables of names grow by doubling."""


def coalesce(gm: fx.GraphModule) -> int:
    """Units of 50 gathers, each sent where it lies."""
    with collector_paused():
        plan = plan_buckets(gm, coalesced=("all_gather",))
        assert apply_plan(gm, plan)
    return len(plan.buckets)


def take_apart(gm: fx.GraphModule) -> int:
    """Two units whose members take turns: every one is a part, and joins its neighbours."""
    with collector_paused():
        return len(plan_buckets(gm, apart=True).buckets)


def packed(gm: fx.GraphModule) -> int:
    """The same units, each packed and unpacked by one operator of ours."""
    with collector_paused():
        plan = plan_buckets(gm, kernels="triton")
        assert plan.buckets and all(bucket.pieces for bucket in plan.buckets) and apply_plan(gm, plan)
    return len(plan.buckets)


def dedup(gm: fx.GraphModule) -> int:
    """Sums of four reductions, scattered once each."""
    with collector_paused():
        before = len(ci.start_nodes(gm))
        deduplication.dedup(gm)
        return before - len(ci.start_nodes(gm))


def reshard(gm: fx.GraphModule) -> int:
    """Have every gathered parameter gathered again in backward."""
    context = PassContext(kind="joint", lite=LiteState.OFF, observe=False, options=BackendOptions(), log=None)
    marked: int = Reshard()(gm, context).summary["marked"]  # type: ignore[assignment]
    return marked


def overlap(gm: fx.GraphModule) -> int:
    """Every gather starts a unit ahead, every reduction is waited for a unit later."""
    with collector_paused():
        plan = plan_overlap(gm, ahead=1)
        assert apply_overlap(gm, plan)
    return len(plan.started) + len(plan.delayed)


def fuse(gm: fx.GraphModule) -> int:
    """Each gather of an activation becomes part of its product."""
    with collector_paused():
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


def manual_overlap(gm: fx.GraphModule) -> tuple[float, int]:
    """Torch's manual scheduler, as the backend runs it: our seconds, and the buckets that were put right."""
    watch = Stopwatch()
    with ExitStack() as timed:
        timed.enter_context(watch.attached(first, "_says", "launch_of"))
        timed.enter_context(watch.attached(reconcile_module._Reconciler, "__init__", "finish"))
        timed.enter_context(watch.attached(lineage.Watch, "_create", "_replace", "_erase", "settle"))
        with first.metadata_first(), reconciled(gm) as done:
            upstream_passes()["manual_overlap"](gm)
    return watch.seconds, done.merged


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


def turns(count: int, group: str) -> fx.GraphModule:
    """Gathers of two units in turn, all results read by one node."""
    made = synthetic.Nodes(shape=(4, 8))
    waits = []
    for index in range(count):
        start = made.all_gather(made.placeholder(f"w{index}"), group)
        unit = f"layers.{index % 2}"
        ci.stamp(start, ci.Identity(1, ci.PARAM_UNSHARD, ci.Source.EXPLICIT, "fsdp2", group, unit, (f"w{index}",)))
        waits.append(made.call(synthetic.WAIT, start, like=start))
    return made.module(made.call(synthetic.aten.cat.default, waits, like=waits[0]))


def resharding(count: int, group: str) -> fx.GraphModule:
    """Forward and backward, every gather marked by its producer."""
    gm = trained(count, group)
    for node in ci.start_nodes(gm):
        node.meta["custom"][RESHARD_KEY] = True
    return gm


def sums(count: int, group: str) -> fx.GraphModule:
    """Reductions added up by fours."""
    return deduplication.sums(count, group, per_sum=4)


Make = Callable[[int, str], fx.GraphModule]
PASSES: tuple[tuple[Callable[[fx.GraphModule], int], Make], ...] = (
    (overlap, trained), (coalesce, units), (packed, units), (take_apart, turns), (dedup, sums), (fuse, products),
    (reshard, resharding), (guard, trained), (reconcile, trained), (ledger, trained),
)  # fmt: skip


def fresh(make: Make, count: int, group: str) -> fx.GraphModule:
    """A graph; of a large one the collector knows already when a pass is timed."""
    with collector_paused():
        gm = make(count, group)
    if count >= LARGE // 10:
        gc.collect()
    return gm


def row_of(run: Callable[[fx.GraphModule], int], make: Make, count: int, group: str) -> dict[str, Any]:
    """The least seconds of a pass on fresh graphs of so many collectives, and what it did."""
    seconds, done = [], 0
    for _ in range(3 if count <= LARGE else 2):
        gm = fresh(make, count, group)
        taken, done = best_of(1, lambda gm=gm: run(gm))  # type: ignore[misc]
        seconds.append(taken)
    least = min(seconds)
    return {"collectives": count, "done": done, "seconds": least, "us_per_collective": least / count * 1e6}


def counted(large: int, group: str, only: Container[str]) -> Iterator[dict[str, Any]]:
    """Lines executed at a tenth and the whole, with the growth: what is left of the growth of seconds is memory."""
    for run, make in PASSES:
        if run.__name__ not in only:
            continue
        row_of(run, make, 100, group)
        before = None
        for count in (large // 10, large):
            gm = fresh(make, count, group)
            lines = lines_of(lambda run=run, gm=gm: run(gm))  # type: ignore[misc]
            growth = {} if before is None else {"times_the_lines": lines / before}
            before = lines
            yield {"what": run.__name__, "collectives": count, "lines_per_collective": lines / count, **growth}


def manual_row(count: int, group: str) -> dict[str, Any]:
    """Our share of torch's manual scheduler on so many gathers, and the seconds of all."""
    least, everything, done = float("inf"), 0.0, 0
    for _ in range(2 if count < MANUAL else 1):
        gm = gathers(count, group, per_unit=4, inputs_first=True)
        everything, (seconds, done) = best_of(1, lambda gm=gm: manual_overlap(gm))  # type: ignore[misc]
        least = min(least, seconds)
    row = {"collectives": count, "done": done, "seconds": least, "us_per_collective": least / count * 1e6}
    return {**row, "with_torchs_seconds": everything}


def kept_row(count: int, group: str) -> dict[str, Any]:
    """Bytes that the report keeps of a graph in which units of 50 gathers became one each, members and all."""
    gm = fresh(units, count, group)
    with ci.enable(agreement_timeout=0):
        log = ci.session.ensure().begin_graph("forward", "benchmark", "benchmark")
        kept = _kept(lambda: log.captured(ci.collective_table(gm)))
        coalesce(gm)
        kept += _kept(lambda: log.finish(ci.collective_table(gm)))
    return {"collectives": count, "bytes_per_collective": kept / count}


def _kept(run: Callable[[], object]) -> int:
    tracemalloc.start()
    try:
        run()
        gc.collect()
        return tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()


def provenance(large: int, group: str) -> Iterator[dict[str, Any]]:
    """`kept_row` at a hundredth, a tenth and the whole, with the growth."""
    before = None
    for count in (large // 100, large // 10, large):
        row = kept_row(count, group)
        growth = {} if before is None else {"times_the_bytes": row["bytes_per_collective"] / before}
        before = row["bytes_per_collective"]
        yield {**row, **growth}


def main() -> int:
    """Run the benchmark."""
    options = parser("growth of our passes with the graph")
    options.add_argument("--large", type=int, default=100_000, help="collectives of the largest graph (default 100000)")
    names = [*(run.__name__ for run, _ in PASSES), "manual_overlap", "provenance"]
    options.add_argument("--only", nargs="+", choices=names, default=names, metavar="NAME", help=", ".join(names))
    options.add_argument("--lines", action="store_true", help="count the lines that run instead of seconds")
    given = options.parse_args()
    timed: list[dict[str, Any]] = []
    wrong: list[str] = []
    with one_process(2) as group:
        show({"benchmark": "passes", "torch": torch.__version__, "seconds": "processor"}, as_json=given.json)
        for row in counted(given.large, group, given.only) if given.lines else ():
            show(row, as_json=given.json)
            if row.get("times_the_lines", 0) > LINES_GROW:
                lines = f"{row['times_the_lines']:.2f} times the lines for 10 times the graph"
                wrong.append(f"{row['what']}: {lines}, at most {LINES_GROW} expected")
        if given.lines:
            given.only = ()
        for run, make in PASSES:
            if run.__name__ not in given.only:
                continue
            row_of(run, make, 100, group)  # fill torch's caches
            for row in growing(given.large, lambda count, run=run, make=make: row_of(run, make, count, group)):  # type: ignore[misc]
                timed.append({"what": run.__name__, **row})
                show(timed[-1], as_json=given.json)
        wrong += too_fast(timed)
        if "manual_overlap" in given.only:
            manual_row(20, group)
            shares = []
            for row in growing(min(MANUAL, given.large), lambda count: manual_row(count, group)):
                shares.append({"what": "manual_overlap", **row})
                show(shares[-1], as_json=given.json)
            wrong += too_fast(shares, at_least=MANUAL)
        for row in provenance(given.large, group) if "provenance" in given.only else ():
            show({"what": "provenance", **row}, as_json=given.json)
            if row.get("times_the_bytes", 0) > BYTES_GROW:
                times = f"{row['times_the_bytes']:.2f} times the bytes a collective"
                wrong.append(f"provenance: {times} at {row['collectives']}, at most {BYTES_GROW} expected")
    print("".join(f"{line}\n" for line in wrong), end="", file=sys.stderr)
    return 1 if wrong else 0
