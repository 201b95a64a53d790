"""How many kernels does a bucket of many small tensors take? Ours beside torch's own bucketing, one model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from collective_identity import PARAM_UNSHARD, Identity, Source, enable, role_scope, stamp
from collective_identity.transports import WAIT, Transport, default_overload, is_start, is_wait
from inductor_passes import bucket_collectives

from . import synthetic
from .measure import one_process

RANKS = 4
_NO_KERNEL = ("aten.empty.memory_format", "aten._unsafe_view.default", "aten.sym_size.int")


def count(tensors: int, device: str) -> dict[str, Any]:
    """Kernels of one bucket of gathers: on CUDA those that a compiled step really launches, else those in the graph."""
    with one_process(RANKS) as group:
        ours, torchs = _launched(tensors, group) if device == "cuda" else _in_graph(tensors, group)
    how = "launched, compiled" if device == "cuda" else "operators that write memory, in the graph"
    row = {"what": "kernels per bucket", "tensors": tensors, "counted": how, "ours": ours, "torch": torchs}
    return {**row, "ratio": torchs / ours}


def _in_graph(tensors: int, group: str) -> tuple[int, int]:
    from torch._inductor.fx_passes.bucketing import bucket_all_gather

    ours, torchs = _gathers(tensors, group), _gathers(tensors, group)
    bucket_collectives(ours, kernels="triton")
    bucket_all_gather(torchs, lambda index: 1e6, "default")
    return _operators(ours), _operators(torchs)


def _gathers(tensors: int, group: str) -> fx.GraphModule:
    made = synthetic.Nodes(shape=(4, 8))
    outputs = []
    for index in range(tensors):
        start = made.all_gather(made.placeholder(f"w{index}"), group)
        stamp(start, Identity(1, PARAM_UNSHARD, Source.EXPLICIT, "fsdp2", group, "model", (f"w{index}",)))
        outputs.append(made.call(synthetic.WAIT, start, like=start))
    return made.module(*outputs)


def _operators(gm: fx.GraphModule) -> int:
    """Nodes besides the collective that write memory: operators that are no views, and reshapes that have to copy."""
    return sum(_writes(node) for node in gm.graph.nodes if not is_start(node) and not is_wait(node))


def _writes(node: fx.Node) -> bool:
    if not isinstance(node.target, torch._ops.OpOverload) or str(node.target) in _NO_KERNEL:
        return False
    if node.target is torch.ops.aten.reshape.default:
        return not node.all_input_nodes[0].meta["val"].is_contiguous()
    return not node.target.is_view


def _launched(tensors: int, group: str) -> tuple[int, int]:
    gather = default_overload(Transport.ALL_GATHER)

    def gathered(*shards: torch.Tensor) -> list[torch.Tensor]:
        full = []
        for index, shard in enumerate(shards):
            with role_scope(PARAM_UNSHARD, producer="fsdp2", group=group, param_group="model", params=[f"w{index}"]):
                start = gather(shard.bfloat16(), RANKS, group)
            full.append(WAIT(start))
        return full

    shards = [torch.randn(4 + index % 5, 8, device="cuda") for index in range(tensors)]
    theirs = {"bucket_all_gathers_fx": "all", "bucket_all_gathers_fx_bucket_size_determinator": _one_bucket}
    with enable(agreement_timeout=0):
        ours = _kernels(torch.compile(
            gathered, backend="collective_identity", fullgraph=True, options={"kernels": "triton"}
        ), shards)  # fmt: skip
    torch._dynamo.reset()
    return ours, _kernels(torch.compile(gathered, fullgraph=True, options=theirs), shards)


def _one_bucket(index: int) -> int:
    return 10**6


def _kernels(run: Callable[..., Any], shards: list[torch.Tensor]) -> int:
    """Kernels and copies of one call, the third."""
    from .step_profile import profile_steps

    for _ in range(2):
        run(*shards)
    return round(profile_steps(lambda: run(*shards), 1).launches)
