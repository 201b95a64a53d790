"""Step time, tokens/s, peak memory and losses of each way to run FSDP2, in one run.

``torchrun --nproc-per-node N -m benchmarks train [--model 1b] [--batch 4] [--window 2048]``: eager FSDP2, FSDP2
with per-block compile (what people run), and captured whole, unbucketed, bucketed by parameter group, bucketed in
graph order up to a cap, with overlap. ``bound`` is the same compute without any collective: full bfloat16 weights,
AdamW on a shard of them; its losses are its own. Every other variant starts from the same weights and data; one whose
losses are not within ``--tolerance`` of eager FSDP2's counts as failed whatever its speed. ``ratio`` is the step time
of per-block compile over the variant's.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from types import MappingProxyType
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import collective_identity as ci
import fsdp_hooks
import inductor_passes  # noqa: F401  (makes the backend known)
from benchmarks.models import SHAPES, build
from benchmarks.step_profile import profile_steps


@dataclass(frozen=True, slots=True)
class Variant:
    """One way to run: eager, each block compiled, captured whole with these backend options, or without FSDP."""

    blocks: bool = False
    bound: bool = False
    captured: bool = False
    recorded: bool = False
    options: Mapping[str, Any] = field(default_factory=dict)


GATHERS, BOTH = ("all_gather",), ("all_gather", "reduce_scatter")
VARIANTS = MappingProxyType(
    {
        "eager": Variant(),
        "per_block": Variant(blocks=True),
        "captured": Variant(captured=True, options={"bucketing": False}),
        "not_resharded": Variant(captured=True, options={"bucketing": False, "reshard": False}),
        "bucketed": Variant(captured=True, options={}),
        "overlapped": Variant(captured=True, options={"overlap": 1}),
        "overlapped_2": Variant(captured=True, options={"overlap": 2}),
        "coalesced": Variant(captured=True, options={"overlap": 1, "coalesced": GATHERS}),
        "coalesced_2": Variant(captured=True, options={"overlap": 2, "coalesced": GATHERS}),
        "coalesced_all": Variant(captured=True, options={"overlap": 1, "coalesced": BOTH}),
        "coalesced_all_2": Variant(captured=True, options={"overlap": 2, "coalesced": BOTH}),
        "recorded": Variant(captured=True, recorded=True, options={"overlap": 1}),
        "recorded_coalesced": Variant(captured=True, recorded=True, options={"overlap": 1, "coalesced": GATHERS}),
        "recorded_kernels": Variant(captured=True, recorded=True, options={"overlap": 1, "kernels": "triton"}),
        "recorded_packed": Variant(
            captured=True, recorded=True, options={"overlap": 1, "coalesced": GATHERS, "kernels": "triton"}
        ),
        "recorded_graph": Variant(captured=True, recorded=True, options={"order": "graph", "cap_mb": 500.0}),
        "kernels": Variant(captured=True, options={"overlap": 1, "kernels": "triton"}),
        "bound": Variant(bound=True),
        "bucketed_graph": Variant(captured=True, options={"order": "graph", "cap_mb": 500.0}),
    }
)


@dataclass(frozen=True, slots=True)
class Figures:
    """What one variant gave on this rank; times in milliseconds, memory in GiB, losses of the first steps."""

    variant: str
    step_ms: float
    step_ms_min: float
    step_ms_max: float
    tokens_per_s_per_rank: float
    peak_gib: float | None
    first_step_s: float
    losses: tuple[float, ...]
    gathers: int | None
    reductions: int | None
    passes_s: float | None
    report_ok: bool | None
    profile: dict[str, Any] | None = None


def main() -> int:
    """Measure every variant; rank 0 prints a line each and the last line is JSON."""
    args = _arguments()
    device = start()
    results = []
    for name in args.variants:
        results.append(_measure(name, VARIANTS[name], args, device))
        if dist.get_rank() == 0:
            print(json.dumps(asdict(results[-1])) if args.json else _line(results[-1]), flush=True)
    failed = _failures(results, args.tolerance)
    if dist.get_rank() == 0:
        base = next((r.step_ms for r in results if r.variant == "per_block"), results[0].step_ms)
        ratio = {r.variant: round(base / r.step_ms, 3) for r in results}
        print(
            json.dumps(
                {
                    "benchmark": "train",
                    "torch": torch.__version__,
                    "device": torch.cuda.get_device_name() if device.type == "cuda" else "cpu",
                    "ranks": dist.get_world_size(),
                    **{k: getattr(args, k) for k in ("model", "batch", "window", "precision")},
                    "ratio": ratio,
                    "failed": failed,
                }
            ),
            flush=True,
        )
    dist.destroy_process_group()
    return 1 if failed else 0


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="torchrun -m benchmarks train", description=__doc__.splitlines()[0])
    parser.add_argument("--model", choices=sorted(SHAPES), default="tiny")
    parser.add_argument("--batch", type=int, default=2, help="sequences a rank")
    parser.add_argument("--window", type=int, default=64, help="tokens a sequence")
    parser.add_argument("--precision", choices=("fp32", "bf16"), default="bf16")
    parser.add_argument("--warmup", type=int, default=5)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--tolerance", type=float, default=2e-3, help="relative loss difference to eager FSDP2")
    parser.add_argument("--variants", nargs="+", choices=list(VARIANTS), default=list(VARIANTS))
    parser.add_argument("--profile", action="store_true", help="where each variant's time goes (CUDA), in its line")
    parser.add_argument("--json", action="store_true", help="a JSON line for each variant")
    args = parser.parse_args()
    if not dist.is_torchelastic_launched():
        parser.error("start it with torchrun: torchrun --nproc-per-node 2 -m benchmarks train")
    return args


def start() -> torch.device:
    """Join the default group that torchrun describes: NCCL on this rank's GPU, or gloo."""
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
        dist.init_process_group("nccl", device_id=device)
        return device
    dist.init_process_group("gloo")
    return torch.device("cpu")


def _measure(name: str, variant: Variant, args: argparse.Namespace, device: torch.device) -> Figures:
    torch._dynamo.reset()
    model = build(args.model, device)
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32) if args.precision == "bf16" else MixedPrecisionPolicy()
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    if not variant.bound:
        for block in model.blocks:
            if variant.blocks:
                block.compile(fullgraph=True)
            fully_shard(block, mesh=mesh, mp_policy=policy)
        fully_shard(model, mesh=mesh, mp_policy=policy)
    with ci.enable() as handle:
        call: Callable[[Tensor], Tensor] = model
        if variant.captured:
            fsdp_hooks.install(model)
            call = torch.compile(model, backend="collective_identity", fullgraph=True, options=dict(variant.options))
        if variant.bound:
            call = torch.compile(model.to(torch.bfloat16) if args.precision == "bf16" else model, fullgraph=True)
        step = _step(model, call, args, device, shards=variant.bound, recorded=variant.recorded)
        if device.type == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
        start = time.perf_counter()
        losses = [step()]
        first = time.perf_counter() - start
        losses += [step() for _ in range(args.warmup - 1)]
        times = [_timed(step, device) for _ in range(args.steps)]
        peak = torch.cuda.max_memory_allocated() if device.type == "cuda" else None
        profile = profile_steps(step, 3).to_dict() if args.profile and device.type == "cuda" else None
        report = handle.report().to_dict() if variant.captured else None
    median = statistics.median(times)
    after = report["collectives"]["after_bucketing"] if report else {}
    return Figures(
        variant=name,
        step_ms=round(1e3 * median, 2),
        step_ms_min=round(1e3 * min(times), 2),
        step_ms_max=round(1e3 * max(times), 2),
        tokens_per_s_per_rank=round(args.batch * args.window / median),
        peak_gib=None if peak is None else round(peak / 2**30, 2),
        first_step_s=round(first, 2),
        losses=tuple(losses),
        gathers=after.get(ci.PARAM_UNSHARD),
        reductions=after.get(ci.GRAD_REDUCE_SHARD),
        passes_s=report["seconds"]["passes"] if report else None,
        report_ok=report["ok"] if report else None,
        profile=profile,
    )


def _step(
    model: nn.Module,
    call: Callable[[Tensor], Tensor],
    args: argparse.Namespace,
    device: torch.device,
    *,
    shards: bool,
    recorded: bool,
) -> Callable[[], float]:
    vocabulary = SHAPES[args.model].vocabulary
    data = torch.Generator(device=device).manual_seed(dist.get_rank() + 1)
    tokens = torch.randint(0, vocabulary, (args.batch, args.window), device=device, generator=data)
    trained = _shards(model) if shards else list(model.parameters())
    optimizer = torch.optim.AdamW(trained, lr=1e-4, fused=True, capturable=recorded)

    def step(tokens: Tensor) -> Tensor:
        loss = F.cross_entropy(call(tokens).float().flatten(0, 1), tokens.roll(-1, 1).flatten())
        loss.backward()
        optimizer.step()
        if shards:
            model.zero_grad()
        else:
            optimizer.zero_grad()
        return loss.detach()

    run = fsdp_hooks.record_step(step, model, optimizer, warmup=2) if recorded else step
    return lambda: run(tokens).item()


def _shards(model: nn.Module) -> list[nn.Parameter]:
    """What a rank's optimizer holds of each parameter, with gradients that stay."""
    made = []
    for parameter in model.parameters():
        shard = nn.Parameter(parameter.detach().chunk(dist.get_world_size())[0].float())
        shard.grad = torch.zeros_like(shard)
        made.append(shard)
    return made


def _timed(step: Callable[[], float], device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize()
    start = time.perf_counter()
    step()  # reads the loss back, so the device is done with the forward; the rest ends below
    if device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - start


def _failures(results: list[Figures], tolerance: float) -> list[str]:
    reference = results[0].losses
    failed = []
    for result in (r for r in results[1:] if not VARIANTS[r.variant].bound):
        worst = max(abs(a - b) / abs(a) for a, b in zip(reference, result.losses, strict=True))
        if not worst <= tolerance:
            failed.append(f"{result.variant}: losses differ from {results[0].variant}'s by {worst:.2e} > {tolerance}")
    return failed


def _line(figures: Figures) -> str:
    memory = "" if figures.peak_gib is None else f"{figures.peak_gib:7.2f} GiB"
    return (
        f"{figures.variant:15s} {figures.step_ms:9.2f} ms [{figures.step_ms_min}-{figures.step_ms_max}] "
        f"{figures.tokens_per_s_per_rank:9.0f} tokens/s/rank {memory} first step {figures.first_step_s:6.2f} s "
        f"loss {figures.losses[0]:.5f} -> {figures.losses[-1]:.5f} gathers {figures.gathers} "
        f"reductions {figures.reductions} passes {figures.passes_s}"
    )
