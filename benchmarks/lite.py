"""The models in lite mode: equal to ``aot_eager`` bit for bit, and how fast; and what the guard costs.

``python -m benchmarks lite [--device cuda] [--model tiny]``: the dense model's forward and backward under
``aot_eager``, plain lite mode and this package's backend; and, on CUDA, a marked flex attention, which is compiled and
therefore compared within a tolerance. ``ratio`` is the step time of ``aot_eager`` over our backend's. The rows
``guard`` are the processor time of the guard around a pass that does nothing, the first of a row of passes and each
that follows, on graphs of forward and backward in which every collective has its role, and with every node marked too.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.fx.traceback as fx_traceback
import torch.nn.functional as F
from torch import Tensor

import collective_identity as ci
import inductor_passes
from benchmarks.measure import best_of, parser, show
from benchmarks.models import SHAPES, build
from benchmarks.synthetic import training
from inductor_passes.lite_mode import Guard, guarded

WAYS: dict[str, dict[str, Any]] = {
    "aot_eager": {"backend": "aot_eager"},
    "plain_lite": {"mode": "lite"},
    "ours": {"backend": "collective_identity", "mode": "lite"},
    "ours_strict": {"backend": "collective_identity", "options": {"strict_lite": True}},
}
TOLERANCE = 1e-3  # float32 flex attention, compiled, against the dense eager form: largest difference


def main() -> int:
    """Run it; 1 when anything differs from aot_eager by more than it may."""
    options = parser(__doc__ or "")
    options.add_argument("--device", default="cpu", help="cpu or cuda")
    options.add_argument("--model", default="tiny", choices=sorted(SHAPES))
    options.add_argument("--steps", type=int, default=5, help="timed steps")
    given = options.parse_args()
    device = torch.device(given.device)
    torch.backends.cuda.matmul.allow_tf32 = False
    failed = False
    for nodes, marked in ((1000, False), (1000, True), (10_000, False), (10_000, True)):
        show(guard_cost(nodes, marked=marked), as_json=given.json)
    with ci.enable(agreement_timeout=0):
        if device.type == "cuda":
            failed |= compare("flex_attention", flex(device), TOLERANCE, given.steps, as_json=given.json)
        failed |= compare("dense", dense(given.model, device), 0.0, given.steps, as_json=given.json)
    return int(failed)


def guard_cost(nodes: int, *, marked: bool) -> dict[str, Any]:
    """Milliseconds per 1000 nodes: snapshot, hooks and comparison; hooks and comparison. ``marked``: every node is."""
    gm = training(nodes, explicit=True)
    for node in gm.graph.nodes:
        if marked:
            node.meta["custom"] = {**node.meta.get("custom", {}), "compile_with_inductor": 0}

    guard = Guard()

    def first() -> None:
        with guarded([gm], "nothing"):
            pass

    def following() -> None:
        with guard.around([gm], "nothing"):
            pass

    following()
    found, times = len(gm.graph.nodes), 50 if nodes < 5000 else 20
    costs = {
        name: 1e6 * best_of(times, run)[0] / found
        for name, run in (("ms_per_1000_nodes", first), ("following_ms_per_1000_nodes", following))
    }
    return {"case": "guard", "nodes": found, "marked": marked, **costs}


Step = Callable[[], list[Tensor]]
Make = Callable[[dict[str, Any]], Step]


def dense(name: str, device: torch.device) -> Make:
    """Loss and gradients of one step of the dense model."""

    def make(how: dict[str, Any]) -> Step:
        model = build(name, device)
        compiled = torch.compile(model, fullgraph=True, **how)
        tokens = torch.arange(2 * 64, device=device).view(2, 64) % SHAPES[name].vocabulary

        def step() -> list[Tensor]:
            model.zero_grad(set_to_none=True)
            loss = F.cross_entropy(compiled(tokens).flatten(0, 1), tokens.roll(-1, 1).flatten())
            loss.backward()
            return [loss.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]

        return step

    return make


def flex(device: torch.device) -> Make:
    """A marked flex attention between two operators that are not; output and gradient."""
    from torch.nn.attention.flex_attention import flex_attention

    def attend(q: Tensor) -> Tensor:
        q, k, v = q.sin(), q.roll(1, 2), q.cos()  # apart: torch 2.11 cannot take one tensor thrice on a CPU
        with fx_traceback.annotate({"compile_with_inductor": 0}):
            y = flex_attention(q, k, v, score_mod=lambda score, b, h, i, j: score + 0.01 * (i - j))
        return y.cos()  # type: ignore[no-any-return, union-attr]

    def make(how: dict[str, Any]) -> Step:
        torch.manual_seed(0)
        start = torch.randn(1, 2, 256, 64, device=device)
        compiled = torch.compile(attend, fullgraph=True, **how)

        def step() -> list[Tensor]:
            q = start.clone().requires_grad_()
            out = compiled(q)
            out.sum().backward()
            assert q.grad is not None
            return [out.detach(), q.grad]

        return step

    return make


def compare(name: str, make: Make, tolerance: float, steps: int, *, as_json: bool) -> bool:
    """Print one row per way; True when one differs by more than ``tolerance``."""
    expected: list[Tensor] = []
    base, failed = 0.0, False
    for way, how in WAYS.items():
        torch._dynamo.reset()
        step = make(how)
        context: AbstractContextManager[Any] = inductor_passes.one_trace() if way == "plain_lite" else nullcontext()
        start = time.perf_counter()
        with context:
            found = step()
        compile_seconds = time.perf_counter() - start
        milliseconds = 1e3 * statistics.median(_timed(step) for _ in range(steps))
        if way == "aot_eager":
            expected, base = found, milliseconds
        difference = max((a - b).abs().max().item() for a, b in zip(expected, found, strict=True))
        failed |= difference > tolerance
        show(
            {
                "case": name,
                "way": way,
                "bitwise": all(map(torch.equal, expected, found)),
                "difference": difference,
                "compile_seconds": compile_seconds,
                "step_ms": milliseconds,
                "ratio": base / milliseconds,
            },
            as_json=as_json,
        )
    return failed


def _timed(step: Step) -> float:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    start = time.perf_counter()
    step()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter() - start
