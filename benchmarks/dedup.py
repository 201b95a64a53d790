"""Reduce-scatter dedup: ours against torch's own in one run, and growth with the graph.

``python -m benchmarks dedup [--json] [--chain N] [--large N]``. Processor seconds of finding what merges and of
rewriting the graph, on both sides; generating code is on neither, except that torch's own does it for each pair, to
trace it again: a minute for a chain of 1000 additions.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import fx

from collective_identity import GRAD_REDUCE_SHARD, Identity, Source, stamp, start_nodes
from collective_identity.compat import collector_paused
from inductor_passes.dedup import apply_dedup, plan_dedup

from . import synthetic
from .measure import best_of, growing, on_fresh_graphs, one_process, parser, show, too_fast


def sums(count: int, group: str, *, per_sum: int) -> fx.GraphModule:
    """Gradient reduce-scatters, added up in chains of ``per_sum``."""
    made = synthetic.Nodes(shape=(8, 8))
    waits, outputs = [], []
    for index in range(count):
        start = made.reduce_scatter(made.placeholder(f"g{index}"), group)
        stamp(start, Identity(1, GRAD_REDUCE_SHARD, Source.EXPLICIT, "fsdp2", group))
        waits.append(made.call(synthetic.WAIT, start, like=start))
    for first in range(0, count, per_sum):
        total, *more = waits[first : first + per_sum]
        for wait in more:
            total = made.call(synthetic.aten.add.Tensor, total, wait, like=total)
        outputs.append(total)
    return made.module(*outputs)


def dedup(gm: fx.GraphModule) -> None:
    """Plan and rewrite the graph, as torch's pass does: no code is generated."""
    with collector_paused():
        apply_dedup(gm, plan_dedup(gm))


def ours(count: int, group: str, *, per_sum: int, times: int = 1) -> dict[str, Any]:
    """Dedup a fresh graph each time; the least seconds, and the growth of the peak in the first run."""
    left = -(-count // per_sum)
    figures = on_fresh_graphs(lambda: sums(count, group, per_sum=per_sum), dedup, times=times, left=left)
    return {"collectives": count, "left": left, **figures, "us_per_collective": figures["seconds"] / count * 1e6}


def torchs(count: int, group: str, *, per_sum: int) -> dict[str, Any]:
    """The same graph given to torch's own dedup; torch 2.11 and 2.12 have none."""
    from torch._inductor.fx_passes import fsdp

    run = getattr(fsdp, "dedup_fsdp_reduce_scatter", None)
    if run is None:
        return {}
    gm = sums(count, group, per_sum=per_sum)
    seconds, _ = best_of(1, lambda: run(gm))
    return {"torch_left": len(start_nodes(gm)), "torch_s": seconds}


def main() -> int:
    """Run the benchmark."""
    options = parser("reduce-scatter dedup against torch's own")
    options.add_argument("--chain", type=int, default=1000, help="addends of one sum (default 1000)")
    options.add_argument("--large", type=int, default=100_000, help="collectives of the largest graph (default 100000)")
    given = options.parse_args()
    with one_process(2) as group:
        show({"benchmark": "dedup", "torch": torch.__version__, "seconds": "processor"}, as_json=given.json)
        ours(50, group, per_sum=50)  # fill torch's caches
        mine = ours(given.chain, group, per_sum=given.chain, times=3)
        show({"what": "one chain", **mine}, as_json=given.json)
        rows = []
        for row in growing(given.large, lambda count: ours(count, group, per_sum=4)):
            rows.append({"what": "sums of 4", **row})
            show(rows[-1], as_json=given.json)
        theirs = torchs(given.chain, group, per_sum=given.chain)
        last = {"what": "one chain, torch beside ours", **mine, **theirs}
        ratio = {"ratio": theirs["torch_s"] / mine["seconds"]} if theirs else {}
        show({**last, **ratio}, as_json=given.json)
    wrong = too_fast(rows)
    print("".join(f"{line}\n" for line in wrong), end="", file=sys.stderr)
    return 1 if wrong else 0
