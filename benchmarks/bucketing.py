"""Bucketing: ours against torch's own in one run, memory, and growth with the graph.

``python -m benchmarks bucketing [--json] [--gathers N] [--large N]``. Processor seconds of finding what merges and of
rewriting the graph, on both sides, with fake values on every new node; generating code is on neither, since Inductor
does it once for all passes. Memory is the growth of the process's peak. Torch's own takes half a minute and 2.4 GB
for 1000 gathers.
"""

from __future__ import annotations

import gc
import sys
from typing import Any

import torch
from torch import fx

from collective_identity import PARAM_UNSHARD, Identity, Source, stamp, start_nodes
from collective_identity.compat import collector_paused
from inductor_passes.bucketing import apply_plan, plan_buckets

from . import synthetic
from .measure import best_of, growing, on_fresh_graphs, one_process, parser, peak_mb, show, too_fast


def gathers(count: int, group: str, *, per_unit: int | None = None, inputs_first: bool = False) -> fx.GraphModule:
    """Parameter gathers, each used once; units of ``per_unit``, one for all where it is None."""
    made = synthetic.Nodes(shape=(4, 8))
    inputs = (made.placeholder(f"w{index}") for index in range(count))
    outputs = []
    for index, sent in enumerate(list(inputs) if inputs_first else inputs):
        start = made.all_gather(sent, group)
        unit = f"layers.{index // per_unit}" if per_unit else "model"
        stamp(start, Identity(1, PARAM_UNSHARD, Source.EXPLICIT, "fsdp2", group, unit, (f"w{index}",)))
        outputs.append(made.call(synthetic.WAIT, start, like=start))
    return made.module(*outputs)


def bucket(gm: fx.GraphModule) -> None:
    """Plan and rewrite the graph, as torch's `bucket_all_gather` does: no code is generated."""
    with collector_paused():
        apply_plan(gm, plan_buckets(gm))


def ours(count: int, group: str, *, per_unit: int | None = None, times: int = 1) -> dict[str, Any]:
    """Bucket a fresh graph each time; the least seconds, and the growth of the peak in the first run."""
    left = -(-count // per_unit) if per_unit else 1
    figures = on_fresh_graphs(lambda: gathers(count, group, per_unit=per_unit), bucket, times=times, left=left)
    return {"collectives": count, "buckets": left, **figures, "us_per_collective": figures["seconds"] / count * 1e6}


def torchs(count: int, group: str) -> dict[str, Any]:
    """The same graph given to torch's own bucketing, all into one bucket."""
    from torch._inductor.fx_passes.bucketing import bucket_all_gather

    gm = gathers(count, group)
    gc.collect()
    before = peak_mb()
    seconds, _ = best_of(1, lambda: bucket_all_gather(gm, lambda index: 1e6, "default"))
    left = len([n for n in start_nodes(gm) if "all_gather" in str(n.target)])
    assert left == 1, f"torch left {left}"
    return {"collectives": count, "buckets": left, "torch_s": seconds, "torch_extra_mb": peak_mb() - before}


def main() -> int:
    """Run the benchmark."""
    options = parser("bucketing against torch's own")
    options.add_argument("--gathers", type=int, default=1000, help="gathers in one bucket (default 1000)")
    options.add_argument("--large", type=int, default=100_000, help="collectives of the largest graph (default 100000)")
    given = options.parse_args()
    with one_process(2) as group:
        show({"benchmark": "bucketing", "torch": torch.__version__, "seconds": "processor"}, as_json=given.json)
        ours(50, group)  # fill torch's caches
        mine = ours(given.gathers, group, times=3)
        show({"what": "one bucket", **mine}, as_json=given.json)
        rows = []
        for row in growing(given.large, lambda count: ours(count, group, per_unit=50)):
            rows.append({"what": "units of 50", **row})
            show(rows[-1], as_json=given.json)
        theirs = torchs(given.gathers, group)
        last = {"what": "one bucket, torch beside ours", **mine, **theirs}
        show({**last, "ratio": theirs["torch_s"] / mine["seconds"]}, as_json=given.json)
    wrong = too_fast(rows)
    print("".join(f"{line}\n" for line in wrong), end="", file=sys.stderr)
    return 1 if wrong else 0
