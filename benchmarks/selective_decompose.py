"""Selective decomposition: during the one trace (ours) against torch's second trace, in one run.

``python -m benchmarks selective_decompose [--layers 4 9] [--marked 0.5]``: captures forward and backward of the dense
model with part of its feed-forwards marked, stops before anything is compiled, and compares the two joint graphs node
by node. Timed, in processor seconds, are AOTAutograd's capture of the joint graph (``ratio``), and everything up to its
end (``whole_ratio``), of which Dynamo, the same for both, is a part that no table of decompositions can save. Torch's
second trace drops annotations at its default provenance level, so it is measured with them kept
(``trace.provenance_tracking_level=1``): otherwise there would be nothing to compare.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from typing import Any

import torch
import torch._functorch.aot_autograd as aot_autograd
import torch._functorch.config as functorch_config
import torch.compiler.config as compiler_config
import torch.fx.traceback as fx_traceback
from torch import fx
from torch.utils._pytree import tree_leaves

import inductor_passes
from benchmarks.measure import Stopwatch, parser, show
from benchmarks.models import Dense, Shape


class _Captured(Exception):
    """Ends a compile as soon as the joint graph is there."""


def main() -> int:
    """Run it."""
    options = parser(__doc__ or "")
    options.add_argument("--layers", type=int, nargs="+", default=[4, 9], help="depths of the model")
    options.add_argument("--marked", type=float, default=0.5, help="share of the layers whose feed-forward is marked")
    options.add_argument("--repeat", type=int, default=3, help="captures of each, of which the fastest counts")
    given = options.parse_args()
    ratio, failed = 0.0, False
    for layers in given.layers:
        torch_runs, our_runs = [], []
        for _ in range(given.repeat):  # by turns: what earlier graphs leave behind slows the collector for both
            torch_runs.append(capture(layers, given.marked, one_trace=False))
            our_runs.append(capture(layers, given.marked, one_trace=True))
        torch_seconds, our_seconds = (min(run[0] for run in runs) for runs in (torch_runs, our_runs))
        torch_whole, our_whole = (min(run[2] for run in runs) for runs in (torch_runs, our_runs))
        theirs, ours = torch_runs[-1][1], our_runs[-1][1]
        same = shape_of(theirs) == shape_of(ours)
        failed |= not same
        ratio = torch_seconds / our_seconds
        row = {
            "nodes": len(ours.graph.nodes),
            "marked": sum(1 for node in ours.graph.nodes if "compile_with_inductor" in (node.meta.get("custom") or {})),
            "torch_seconds": torch_seconds,
            "our_seconds": our_seconds,
            "identical": same,
            "torch_whole_seconds": torch_whole,
            "our_whole_seconds": our_whole,
            "whole_ratio": torch_whole / our_whole,
            "ratio": ratio,
        }
        show(row, as_json=given.json)
    return int(failed)


def capture(layers: int, marked: float, *, one_trace: bool) -> tuple[float, fx.GraphModule, float]:
    """Seconds of the joint graph's capture, that graph, and seconds up to its end, of the model in lite mode."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = Dense(Shape(vocabulary=64, width=32, heads=4, layers=layers))
    for index, block in enumerate(model.blocks):
        if index < marked * layers:
            block.forward = _marked(block)  # type: ignore[method-assign]
    found: list[fx.GraphModule] = []

    def keep(gm: fx.GraphModule, inputs: Any) -> fx.GraphModule:
        found.append(gm)
        raise _Captured

    options: Mapping[str, Any] = {
        **torch._inductor.list_mode_options("lite"),
        "trace.provenance_tracking_level": 0 if one_trace else 1,
    }
    compiled = torch.compile(model, options=dict(options))
    gc.collect()
    watch, start = Stopwatch(), time.process_time()
    with (
        watch.attached(aot_autograd, "aot_stage1_graph_capture"),
        functorch_config.patch(joint_custom_pass=keep),  # type: ignore[attr-defined]
        compiler_config.patch(force_disable_caches=True),  # type: ignore[attr-defined]
        inductor_passes.one_trace() if one_trace else nullcontext(),
    ):
        try:
            compiled(torch.zeros(2, 16, dtype=torch.long))
        except Exception:
            if not found:
                raise
    return watch.seconds, found[0], time.process_time() - start


def _marked(block: Any) -> Callable[[torch.Tensor], torch.Tensor]:
    def forward(x: torch.Tensor) -> torch.Tensor:
        x = x + block.attention(block.first_norm(x))
        with fx_traceback.annotate({"compile_with_inductor": 0}):
            y = block.feed_forward(block.second_norm(x))
        return x + y

    return forward


def shape_of(gm: fx.GraphModule) -> list[Any]:
    """Every node with its target, inputs by position, result and mark: equal for identical graphs."""
    at = {node: index for index, node in enumerate(gm.graph.nodes)}
    rows = []
    for node in gm.graph.nodes:
        args = fx.node.map_arg((node.args, node.kwargs), lambda one: f"%{at[one]}")
        tensors = [one for one in tree_leaves(node.meta.get("val")) if isinstance(one, torch.Tensor)]
        values = [(one.dtype, tuple(one.shape), one.stride()) for one in tensors]
        rows.append((node.op, str(node.target), str(args), str(values), "custom" in node.meta))
    return rows
