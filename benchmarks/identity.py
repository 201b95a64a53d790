"""What identities cost at compile time: seconds and bytes of metadata per collective.

``python -m benchmarks identity [--json] [--nodes N] [--layers L]``. First on the graphs of a captured FSDP2 model
(typical), then on one of N nodes. Processor seconds; the default million nodes take two minutes and 4 GB.
"""

from __future__ import annotations

import time
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import fx, nn

import collective_identity as ci
from collective_identity.store import put, raw_payloads

from . import synthetic
from .measure import best_of, parser, show

Graphs = list[fx.GraphModule]


def captured(layers: int, run_dir: Path | None = None) -> tuple[Graphs, float]:
    """Forward and backward graph of an FSDP2 model in a pretended world of 4 ranks, and the seconds to get them."""
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.testing._internal.distributed.fake_pg import FakeStore

    import fsdp_hooks
    from benchmarks.models import Block, Shape
    from inductor_passes.backend import collective_identity

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=4)
    mesh = init_device_mesh("cpu", (4,))
    shape = Shape(vocabulary=64, width=32, heads=2, layers=layers)
    model = nn.Sequential(*(Block(shape) for _ in range(layers)))
    for layer in model:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    fsdp_hooks.install(model)
    graphs: Graphs = []
    with ci.enable(agreement_timeout=0, run_dir=run_dir):
        options = {"inner": "aot_eager", "bucketing": False, "pre_passes": [graphs.append]}
        run = torch.compile(model, backend=collective_identity, fullgraph=True, options=options)
        start = time.process_time()
        run(torch.ones(2, 8, 32, requires_grad=True)).sum().backward()
        seconds = time.process_time() - start
    dist.destroy_process_group()
    return graphs, seconds


def torchs_answer(graphs: Graphs) -> None:
    """The same question put to torch: which collectives are FSDP's, one by one as its passes ask."""
    from torch._inductor.fx_passes import fsdp

    for gm in graphs:
        if hasattr(fsdp, "identify_fsdp_groups"):
            fsdp.identify_fsdp_groups(gm)
        for node in ci.start_nodes(gm):
            launch = ci.launch_of(node)
            for wait in node.users:
                if launch is not None and launch.transport is ci.Transport.ALL_GATHER:
                    fsdp.is_fsdp_all_gather_wait(wait)
                elif launch is not None and launch.transport is ci.Transport.REDUCE_SCATTER:
                    fsdp.is_fsdp_reduce_scatter_wait(wait)


def metadata_bytes(graphs: Graphs) -> int:
    """Bytes that the payloads of the graphs take, measured by writing each again."""
    starts = [node for gm in graphs for node in ci.start_nodes(gm)]
    payloads = [raw_payloads(node) for node in starts]
    for node in starts:
        put(node, {})
    tracemalloc.start()
    try:
        for node, raw in zip(starts, payloads, strict=True):
            put(node, raw)
        return tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()


def costs(graphs: Graphs, times: int) -> dict[str, Any]:
    """Seconds of each step, by name, and what they come to per collective."""
    steps: dict[str, Callable[[], Any]] = {
        "normalise_s": lambda: [ci.normalize(gm) for gm in graphs],
        "classify_s": lambda: [ci.classify_report(gm) for gm in graphs],
        "table_s": lambda: [ci.collective_table(gm, ci.classify_report(gm)) for gm in graphs],
        "digest_s": lambda: [ci.payload_digest(gm) for gm in graphs],
    }
    starts = [node for gm in graphs for node in ci.start_nodes(gm)]
    explicit = sum(ci.identity_of(node) is not None for node in starts)
    assert explicit == len(starts), "every collective of these graphs has a payload"
    row: dict[str, Any] = {"nodes": sum(len(gm.graph.nodes) for gm in graphs), "collectives": len(starts)}
    row |= {name: best_of(times, step)[0] for name, step in steps.items()}
    row["table_s"] = max(0.0, row["table_s"] - row["classify_s"])
    ours = sum(row[name] for name in steps)
    return row | {
        "ours_s": ours,
        "us_per_collective": ours / len(starts) * 1e6,
        "bytes_per_collective": metadata_bytes(graphs) / len(starts),
    }


def main() -> int:
    """Run the benchmark."""
    options = parser("what identities cost at compile time")
    options.add_argument("--nodes", type=int, default=1_000_000, help="nodes of the large graph (default 1000000)")
    options.add_argument("--layers", type=int, default=8, help="layers of the captured model (default 8)")
    given = options.parse_args()

    show({"benchmark": "identity", "torch": torch.__version__, "seconds": "processor"}, as_json=given.json)
    graphs, compile_s = captured(given.layers)
    for gm in graphs:
        ci.normalize(gm)
    typical = costs(graphs, 5)
    show({"what": "typical: captured FSDP2", **typical, "aot_eager_compile_s": compile_s}, as_json=given.json)

    large = [synthetic.training(given.nodes, explicit=True)]
    row = costs(large, 2)
    heuristics_s, _ = best_of(1, lambda: torchs_answer(large))
    show({"what": "large: forward and backward in one", **row, "torchs_heuristics_s": heuristics_s}, as_json=given.json)
    summary = {"what": "seconds torch compiles the typical graphs (without Inductor) / seconds identities add to them"}
    show({**summary, "ratio": (compile_s - typical["ours_s"]) / typical["ours_s"]}, as_json=given.json)
    return 0
