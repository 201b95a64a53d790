"""Overlap scheduling after in-place bucketing: the gather runs before the copies that fill its buffer.

    python docs/upstream/inplace_bucket_overlap.py

No part of this project is used, and no GPU: the process group is torch's fake one, nothing is sent. Expected: the copy
into the bucket comes before the gather that reads it, after both passes. Seen: see the page beside this file.
"""

import inspect

import torch
import torch._inductor.fx_passes.overlap_scheduling as overlap
import torch.distributed as dist
import torch.utils._runtime_estimation as estimation
from torch._inductor.fx_passes.bucketing import bucket_all_gather
from torch._inductor.pattern_matcher import stable_topological_sort
from torch.fx.experimental.proxy_tensor import make_fx
from torch.testing._internal.distributed.fake_pg import FakeStore

dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
group = dist.group.WORLD.group_name
ops = torch.ops._c10d_functional


def gathered(x, *shards):
    for shard in shards:
        x = x @ ops.wait_tensor(ops.all_gather_into_tensor(shard, 2, group))
    return x


def said(gm, when):
    order = {node: place for place, node in enumerate(gm.graph.nodes)}
    (copy,) = (n for n in order if str(n.target) in ("aten._foreach_copy_.default", "aten.copy_.default"))
    (gather,) = (n for n in order if "all_gather_into_tensor_out" in str(n.target) or gather_inside(gm, n))
    verdict = "right" if order[copy] < order[gather] else "WRONG: the gather sends a buffer that nobody filled"
    print(f"torch {torch.__version__}, {when}: copy at {order[copy]}, gather at {order[gather]}: {verdict}")


def gather_inside(gm, node):
    """Dependencies are kept by wrapping an operator in ``control_deps``, with the operator in a sub-graph."""
    bodies = [getattr(gm, str(a.target)) for a in node.all_input_nodes if a.op == "get_attr"]
    return any("all_gather_into_tensor_out" in str(n.target) for b in bodies for n in b.graph.nodes)


gm = make_fx(gathered, tracing_mode="fake")(torch.ones(8, 8), *(torch.ones(4, 8) for _ in range(3)))
bucket_all_gather(gm, lambda index: 100.0, "default")
stable_topological_sort(gm.graph)
said(gm, "after bucketing")

estimation.get_gpu_dram_gbps = lambda: 1000.0  # times are estimated from a GPU's; there is none
for name in ("estimate_roofline_runtime_ms", "estimate_runtime_analytical"):
    if hasattr(overlap, name):
        setattr(overlap, name, lambda node: 1.0)
given = {
    "collective_bucketing": False,
    "insert_overlap_deps": True,
    "compute_estimator": "analytical",
    "custom_runtime_estimation": lambda node, *rest: 1.0,
}
known = inspect.signature(overlap.schedule_overlap_bucketing).parameters
overlap.schedule_overlap_bucketing(gm, **{name: value for name, value in given.items() if name in known})
said(gm, "after overlap scheduling")
dist.destroy_process_group()
