"""Builds one variant, steps it, and says what that took."""

from __future__ import annotations

import gc
import itertools
import statistics
import time
from argparse import Namespace
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch._inductor.utils import clear_caches, fresh_cache  # the same in 2.11.0 to 2.15.0
from torch.distributed.fsdp import MixedPrecisionPolicy

import collective_identity as ci
import fsdp_hooks
import inductor_passes  # noqa: F401  (makes the backend known)
from benchmarks import train_checks
from benchmarks.models import SHAPES, build
from benchmarks.step_profile import profile_steps
from benchmarks.train_layouts import Layout
from benchmarks.train_variants import Variant

BATCHES = 3
"""Different ones in turn, so that a step that reads an old one shows in its loss."""


@dataclass(frozen=True, slots=True)
class Figures:
    """What one variant gave on this rank; None is what it has not, or what is not known.

    Attributes:
        step_ms, step_ms_min, step_ms_max: milliseconds of a step: median, least, most.
        tokens_per_s_per_rank: of the tokens that this rank works on; a tensor-parallel group shares its batch.
        peak_gib, reserved_gib: most memory allocated, and held by the allocator, until the last step.
        first_step_s: seconds of the first step, compiles included.
        warm_step_s: the same of a second build that finds the first one's code in the compile caches.
        cache_hits: what was found in AOTAutogradCache and FxGraphCache by the first build and by the second.
        losses: of the first steps.
        gathers, reductions, replica_reductions: FSDP's collectives that are left, by role.
        passes_s: seconds of this package's passes.
        report_ok, report_failures: the verdict of the report.
        explicit_share: of FSDP's collectives, those whose producer named them.
        tp_collectives: collectives of tensor parallelism as captured.
        merged_with_others: collectives that are not FSDP's, merged with FSDP's.
        fused, fused_roles, not_fused: collectives that became part of a matrix product, by role, and how many did not
            for which reason. No graph taken from a compile cache counts.
        profile: where the device's time goes.
        error: what ended the variant.
    """

    variant: str
    step_ms: float | None = None
    step_ms_min: float | None = None
    step_ms_max: float | None = None
    tokens_per_s_per_rank: float | None = None
    peak_gib: float | None = None
    reserved_gib: float | None = None
    first_step_s: float | None = None
    warm_step_s: float | None = None
    cache_hits: Mapping[str, tuple[int, int]] | None = None
    losses: tuple[float, ...] = ()
    gathers: int | None = None
    reductions: int | None = None
    replica_reductions: int | None = None
    passes_s: float | None = None
    report_ok: bool | None = None
    report_failures: tuple[str, ...] = ()
    explicit_share: float | None = None
    tp_collectives: int | None = None
    merged_with_others: int | None = None
    fused: int | None = None
    fused_roles: Mapping[str, int] | None = None
    not_fused: Mapping[str, int] | None = None
    profile: dict[str, Any] | None = None
    error: str | None = None


def measure(name: str, variant: Variant, args: Namespace, layout: Layout) -> Figures:
    """The figures of one variant; one that raises gives its error instead."""
    with fresh_cache() if args.fresh_caches and variant.compiles else nullcontext():
        try:
            figures = _measure(name, variant, args, layout)
            if args.warm and variant.compiles:
                seconds, hits = _again(variant, args, layout)
                figures = replace(figures, warm_step_s=seconds, cache_hits={**(figures.cache_hits or {}), "warm": hits})
            return figures
        except Exception as error:  # told in the row; the other variants go on
            text = f"{type(error).__name__}: {str(error).strip()}"
            return Figures(name, error=text.splitlines()[0][:400])


def _measure(name: str, variant: Variant, args: Namespace, layout: Layout) -> Figures:
    cuda = layout.device.type == "cuda"
    before = _hits()
    with _built(variant, args, layout) as (step, handle):
        if cuda:
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
        start = time.perf_counter()
        losses = [step()]
        first = time.perf_counter() - start
        losses += [step() for _ in range(args.warmup - 1)]
        times = [_timed(step, layout.device) for _ in range(args.steps)]
        peak = torch.cuda.max_memory_allocated() if cuda else None
        reserved = torch.cuda.max_memory_reserved() if cuda else None
        profile = profile_steps(step, 3).to_dict() if args.profile and cuda else None
        told = train_checks.read(handle.report(), fusion="fusion" in variant.options) if handle is not None else {}
    median = statistics.median(times)
    return Figures(
        variant=name,
        step_ms=round(1e3 * median, 2),
        step_ms_min=round(1e3 * min(times), 2),
        step_ms_max=round(1e3 * max(times), 2),
        tokens_per_s_per_rank=round(args.batch * args.window / median / layout.ranks_a_batch),
        peak_gib=_gib(peak),
        reserved_gib=_gib(reserved),
        first_step_s=round(first, 2),
        cache_hits={"first": _hits(before)} if variant.compiles else None,
        losses=tuple(losses),
        profile=profile,
        **told,
    )


def _again(variant: Variant, args: Namespace, layout: Layout) -> tuple[float, tuple[int, int]]:
    """Seconds of the first step of the same variant, built anew from the compile caches on disk alone."""
    clear_caches()
    before = _hits()
    with _built(variant, args, layout) as (step, _):
        return round(_timed(step, layout.device), 2), _hits(before)


@contextmanager
def _built(
    variant: Variant, args: Namespace, layout: Layout
) -> Iterator[tuple[Callable[[], float], ci.Handle | None]]:
    """One step of the variant as a call; of a captured one, in a session."""
    torch._dynamo.reset()
    gc.collect()  # nothing of the variant before may count in the memory of this one
    if layout.device.type == "cuda":
        torch._C._cuda_clearCublasWorkspaces()  # one for each stream that it ran on; the same in 2.11.0 to 2.15.0
    model = build(args.model, layout.device)
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32) if args.precision == "bf16" else MixedPrecisionPolicy()
    if not variant.bound:
        blocks = args.inner if variant.blocks else None
        layout.shard(model, policy, blocks=blocks, expert_units=args.expert_units)
    with ci.enable() if variant.captured else nullcontext() as handle:
        call: Callable[[Tensor], Tensor] = model
        if variant.captured:
            fsdp_hooks.install(model)
            options = {**variant.options, "pre_passes": layout.pre_passes}
            if args.inner != "inductor":
                options["inner"] = args.inner
            call = torch.compile(model, backend="collective_identity", fullgraph=True, options=options)
        if variant.bound:
            call = torch.compile(model.to(torch.bfloat16) if args.precision == "bf16" else model, fullgraph=True)
        yield _step(model, call, args, layout, shards=variant.bound, recorded=variant.recorded), handle


def _step(
    model: nn.Module,
    call: Callable[[Tensor], Tensor],
    args: Namespace,
    layout: Layout,
    *,
    shards: bool,
    recorded: bool,
) -> Callable[[], float]:
    vocabulary = SHAPES[args.model].vocabulary
    data = torch.Generator(device=layout.device).manual_seed(layout.batch + 1)
    shape = (BATCHES, args.batch, args.window)
    batches = itertools.cycle(torch.randint(0, vocabulary, shape, device=layout.device, generator=data).unbind())
    trained = _shards(model) if shards else list(model.parameters())
    optimizer = torch.optim.AdamW(trained, lr=1e-4, fused=True, capturable=recorded and layout.device.type == "cuda")

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
    return lambda: run(next(batches)).item()


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


def _hits(before: tuple[int, int] = (0, 0)) -> tuple[int, int]:
    """Graphs taken from AOTAutogradCache, and from FxGraphCache, since ``before``."""
    found = counters["aot_autograd"]["autograd_cache_hit"], counters["inductor"]["fxgraph_cache_hit"]
    return found[0] - before[0], found[1] - before[1]


def _gib(size: int | None) -> float | None:
    return None if size is None else round(size / 2**30, 2)
