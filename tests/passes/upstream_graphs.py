"""Graphs on which torch's passes over collectives have something to do, in the form Inductor's post-grad stage sees."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import MappingProxyType
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import fx
from torch.fx.passes.shape_prop import _extract_tensor_metadata

from tests.graphs import Builder, aten

SIZE = 4
ESTIMATES = ("estimate_roofline_runtime_ms", "estimate_runtime_analytical")  # 2.12 on; 2.11


@contextmanager
def as_on_gpus() -> Iterator[None]:
    """Passes estimate times from a GPU's bandwidth and ask for NCCL; graphs are only rewritten here."""
    import torch.utils._runtime_estimation as estimation
    from torch._inductor.fx_passes import overlap_scheduling

    (estimate,) = (name for name in ESTIMATES if hasattr(overlap_scheduling, name))
    with (
        patch.object(overlap_scheduling, estimate, lambda node: 1.0),
        patch.object(estimation, "get_gpu_dram_gbps", lambda: 1000.0),
        patch.object(dist, "is_nccl_available", lambda: True),
    ):
        yield


def world() -> str:
    """Name of the fake world's group."""
    return str(dist.group.WORLD.group_name)  # type: ignore[union-attr]


def gathers() -> fx.GraphModule:
    """Three parameters, one of them cast, and a fourth gather after computation."""
    b = Builder()
    shards = [b.placeholder(f"p{i}", (8, 8)) for i in range(3)]
    inputs: list[fx.Node] = [shards[0], b.cast(shards[1], torch.bfloat16), shards[2]]
    inputs.append(b.call(aten.relu.default, b.call(aten.mul.Tensor, shards[2], b.placeholder("x", (8, 8)))))
    return finished(b, *(b.all_gather(node, group=world(), size=SIZE).wait for node in inputs))


def gradients() -> fx.GraphModule:
    """Five reduce-scatters: two added up, the others outputs, one behind a cast."""
    b = Builder()
    waits = [b.reduce_scatter(b.placeholder(f"g{i}", (8, 8)), group=world(), size=SIZE).wait for i in range(5)]
    total = b.call(aten.add.Tensor, waits[0], waits[1])
    return finished(b, total, waits[2], waits[3], b.cast(waits[4], torch.bfloat16))


def replicated() -> fx.GraphModule:
    """DDP: three gradients divided, all-reduced, returned."""
    b = Builder()
    divided = [b.call(aten.div.Tensor, b.placeholder(f"g{i}", (8, 8)), 4) for i in range(3)]
    return finished(b, *(b.all_reduce(node, group=world()).wait for node in divided))


def hybrid() -> fx.GraphModule:
    """HSDP: reduce-scatter, then all-reduce of its result, twice; and a loss all-reduce."""
    b = Builder()
    outs = []
    for i in range(2):
        scattered = b.reduce_scatter(b.placeholder(f"g{i}", (8, 8)), group=world(), size=SIZE)
        outs.append(b.all_reduce(scattered.wait, group=world()).wait)
    outs.append(b.all_reduce(b.placeholder("loss", (1,)), group=world()).wait)
    return finished(b, *outs)


def step() -> fx.GraphModule:
    """A forward and backward of one layer: gathers, matrix products, reduce-scatters."""
    b = Builder()
    x = b.placeholder("x", (16, 32))
    outs = []
    for i in range(2):
        full = b.all_gather(b.placeholder(f"w{i}", (8, 32)), group=world(), size=SIZE).wait
        x = b.call(aten.mm.default, x, full)
        gradient = b.call(aten.mm.default, full, full)
        outs.append(b.reduce_scatter(gradient, group=world(), size=SIZE).wait)
    return finished(b, x, *outs)


def tensor_parallel() -> fx.GraphModule:
    """All-gather then matmul, matmul then reduce-scatter: what micro-pipelining fuses."""
    b = Builder()
    x, w, y = b.placeholder("x", (8, 16)), b.placeholder("w", (16, 16)), b.placeholder("y", (32, 16))
    gathered = b.all_gather(x, group=world(), size=SIZE).wait
    product = b.call(aten.mm.default, y, w)
    return finished(b, b.call(aten.mm.default, gathered, w), b.reduce_scatter(product, group=world(), size=SIZE).wait)


def gram() -> fx.GraphModule:
    """Gather, Newton-Schulz style products, then this rank's part: what decomposition rewrites."""
    b = Builder()
    full = b.all_gather(b.placeholder("w", (8, 16)), group=world(), size=SIZE).wait
    x = full
    for _ in range(2):
        product = b.call(aten.mm.default, b.call(aten.permute.default, x, [1, 0]), x)
        x = b.call(aten.mm.default, x, product)
    parts = b.call(aten.split.Tensor, x, 8)
    return finished(b, b.call(operator.getitem, parts, 0))


GRAPHS: MappingProxyType[str, Callable[[], fx.GraphModule]] = MappingProxyType(
    {
        "gathers": gathers,
        "gradients": gradients,
        "replicated": replicated,
        "hybrid": hybrid,
        "step": step,
        "tensor_parallel": tensor_parallel,
        "gram": gram,
    }
)


def finished(b: Builder, *outs: fx.Node) -> fx.GraphModule:
    """The graph with these outputs, and the metadata that passes of torch read."""
    b.output(*outs)
    for node in b.graph.nodes:
        value = node.meta.get("val")
        if isinstance(value, torch.Tensor):
            node.meta["tensor_meta"] = _extract_tensor_metadata(value)
        node.meta["nn_module_stack"] = {"layer": ("layer", torch.nn.Linear)}
    return b.module()
