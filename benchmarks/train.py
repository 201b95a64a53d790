"""Step time, tokens/s, memory, compile seconds and losses of each way to run FSDP2, in one run.

``torchrun --nproc-per-node N -m benchmarks train [--model 1b] [--layout hsdp] [--batch 4] [--window 2048]``: eager
FSDP2, FSDP2 with per-block compile (what people run), and captured whole: unbucketed, bucketed by parameter group,
bucketed in graph order up to a cap, with overlap, with tensor parallelism's products fused, and with torch's own
bucketing and overlap instead of ours; ``recorded*``: on CUDA, the whole captured step replayed as a CUDA graph
(`fsdp_hooks.record_step`). ``bound`` is the same compute without any collective: full bfloat16 weights,
AdamW on a shard of them; its losses are its own. Every other variant starts from the same weights and data.

A variant fails whatever its speed when its losses are not within ``--tolerance`` of the first one's on every rank, when
its report does, when an FSDP collective is not explicit or merged with another's, or when something is fused that is
not tensor parallelism's. The exit status is 1 if one fails; torch's own passes (``upstream_*``) are told apart and
fail nothing. ``ratio`` is the step time of per-block compile over the variant's.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict

import torch
import torch.distributed as dist

from benchmarks.models import SHAPES
from benchmarks.train_checks import faults
from benchmarks.train_layouts import LAYOUTS, Layout, LayoutError, layout_of, start
from benchmarks.train_measure import Figures, measure
from benchmarks.train_variants import VARIANTS

TOLD = ("model", "layout", "batch", "window", "precision")


def main() -> int:
    """Run what the command line asks for; 0, or 1 if a variant of this package or a baseline failed."""
    args = arguments()
    device = start()
    try:
        return run(args, layout_of(args, device))
    except LayoutError as error:
        raise SystemExit(f"benchmarks train: {error}") from None
    finally:
        dist.destroy_process_group()


def run(args: argparse.Namespace, layout: Layout) -> int:
    """Measure every variant; rank 0 prints a line each and the last line is JSON. The exit status."""
    ranks: list[list[Figures]] = [[] for _ in range(dist.get_world_size())]
    for name in args.variants:
        everyone: list[Figures | None] = [None] * len(ranks)
        dist.all_gather_object(everyone, measure(name, VARIANTS[name], args, layout))
        for results, figures in zip(ranks, everyone, strict=True):
            assert figures is not None
            results.append(figures)
        if dist.get_rank() == 0:
            print(json.dumps(asdict(ranks[0][-1])) if args.json else _line(ranks[0][-1]), flush=True)
    failed, failed_upstream = faults(ranks, args.tolerance)
    if dist.get_rank() == 0:
        print(
            json.dumps(
                {
                    "benchmark": "train",
                    "torch": torch.__version__,
                    "device": torch.cuda.get_device_name() if layout.device.type == "cuda" else "cpu",
                    "ranks": len(ranks),
                    "mesh": list(layout.data.shape) + ([layout.ranks_a_batch] if layout.tensor is not None else []),
                    **{k: getattr(args, k) for k in TOLD},
                    "ratio": _ratios(ranks[0]),
                    "failed": failed,
                    "failed_upstream": failed_upstream,
                }
            ),
            flush=True,
        )
    return 1 if failed else 0


def arguments() -> argparse.Namespace:
    """The command line; what does not go together ends the program with a sentence."""
    parser = argparse.ArgumentParser(
        prog="torchrun -m benchmarks train", description=__doc__.splitlines()[0],
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )  # fmt: skip
    parser.add_argument("--model", choices=sorted(SHAPES), default="tiny")
    parser.add_argument("--layout", choices=LAYOUTS, default="fsdp")
    parser.add_argument("--tp", type=int, default=2, help="ranks of a tensor-parallel group, for --layout fsdp_tp")
    parser.add_argument("--replicas", type=int, default=2, help="replicas of the shards, for --layout hsdp")
    parser.add_argument("--expert-units", action="store_true", help="the experts of a block are a unit of their own")
    parser.add_argument("--batch", type=int, default=2, help="sequences a rank, or a tensor-parallel group")
    parser.add_argument("--window", type=int, default=64, help="tokens a sequence")
    parser.add_argument("--precision", choices=("fp32", "bf16"), default="bf16")
    parser.add_argument("--warmup", type=int, default=5, help="steps before the timed ones, whose losses are compared")
    parser.add_argument("--steps", type=int, default=12, help="timed steps")
    parser.add_argument("--tolerance", type=float, help="relative loss difference to eager FSDP2; 2e-3, in fp32 1e-4")
    parser.add_argument("--variants", nargs="+", choices=list(VARIANTS), help="all that the layout allows by default")
    parser.add_argument("--inner", choices=("inductor", "aot_eager"), default="inductor", help="instead of Inductor")
    parser.add_argument("--fresh-caches", action="store_true", help="a new compile cache for each variant")
    parser.add_argument("--warm", action="store_true", help="build each variant a second time, from the compile caches")
    parser.add_argument("--profile", action="store_true", help="where each variant's time goes (CUDA), in its line")
    parser.add_argument("--json", action="store_true", help="a JSON line for each variant")
    args = parser.parse_args()
    if not dist.is_torchelastic_launched():
        parser.error("start it with torchrun: torchrun --nproc-per-node 2 -m benchmarks train")
    _complete(parser, args)
    return args


def _complete(parser: argparse.ArgumentParser, args: argparse.Namespace) -> None:
    """Refuse what does not go together, in a sentence each; put in what depends on other arguments."""
    if args.warmup < 2:
        parser.error(f"--warmup expects 2 steps or more, the second of which shows an update, found {args.warmup}")
    mixture = SHAPES[args.model].mixture
    if mixture is not None and args.layout == "fsdp_tp":
        parser.error(f"--layout fsdp_tp expects a dense model, whose products it splits, found --model {args.model}")
    if mixture is not None and args.batch * args.window % mixture.group:
        parser.error(f"--model {args.model} expects batch times window to be a multiple of {mixture.group}")
    if args.layout == "fsdp_tp" and args.window % args.tp:
        parser.error(f"--layout fsdp_tp expects --window to be a multiple of --tp, found {args.window} and {args.tp}")
    possible = [
        name for name, one in VARIANTS.items()
        if args.layout in one.layouts and not (one.upstream and args.inner != "inductor")
    ]
    args.variants = args.variants or possible
    args.tolerance = args.tolerance or {"bf16": 2e-3, "fp32": 1e-4}[args.precision]
    for name in args.variants:
        if name not in possible:
            parser.error(f"variant {name} expects --layout {' or '.join(VARIANTS[name].layouts)} "
                         f"and, of torch's own passes, --inner inductor, found {args.layout} and {args.inner}")


def _ratios(results: list[Figures]) -> dict[str, float]:
    base = next((one.step_ms for one in results if one.variant == "per_block" and one.step_ms), results[0].step_ms)
    return {one.variant: round(base / one.step_ms, 3) for one in results if base and one.step_ms}


def _line(one: Figures) -> str:
    if one.error is not None:
        return f"{one.variant:17s} failed: {one.error}"
    memory = "" if one.peak_gib is None else f", peak {one.peak_gib:.2f} GiB, {one.reserved_gib:.2f} reserved"
    text = (
        f"{one.variant:17s} {one.step_ms:9.2f} ms [{one.step_ms_min}-{one.step_ms_max}] "
        f"{one.tokens_per_s_per_rank:9.0f} tokens/s/rank{memory}, first step {one.first_step_s:.2f} s, "
        f"loss {one.losses[0]:.5f} -> {one.losses[-1]:.5f}"
    )
    if one.warm_step_s is not None:
        text += f", warm {one.warm_step_s} s"
    if one.cache_hits is not None:
        hits = [f"{aot} AOTAutograd and {fx} FxGraph ({build} build)" for build, (aot, fx) in one.cache_hits.items()]
        text += f", cache hits {', '.join(hits)}"
    if one.report_ok is not None:
        told = {
            "gathers": one.gathers, "shard reductions": one.reductions, "replica reductions": one.replica_reductions,
            "explicit": one.explicit_share, "of tensor parallelism": one.tp_collectives,
            "merged with others": one.merged_with_others, "seconds of our passes": one.passes_s,
        }  # fmt: skip
        text += "".join(f", {what} {value}" for what, value in told.items() if value is not None)
    if one.fused is not None:
        text += f", fused {one.fused} {dict(one.fused_roles or {})}, not fused {dict(one.not_fused or {})}"
    return text
