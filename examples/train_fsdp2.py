"""Train a small transformer with FSDP2 under torchrun, every collective captured, named, bucketed and reported.

    torchrun --standalone --nproc-per-node 2 examples/train_fsdp2.py --check-against-eager

What a training script adds to use this project is in ``captured`` below: three lines around ``fully_shard``. The
rest of the folder is an ordinary FSDP2 job. It trains on Python's own standard library (see ``_data.py``), ends
with a report on stderr, one ``rank*.jsonl`` per rank in the run folder and exactly one JSON line on stdout, and
exits 1 when a collective is not what FSDP2's parameter groups, mesh and options say it must be, or when
``--check-against-eager`` finds other losses than eager FSDP2's.
"""

from __future__ import annotations

import dataclasses
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(1, str(Path(__file__).resolve().parents[1]))  # the checkout, for a Python with nothing installed

import torch
from _cluster import Cluster, cluster
from _options import Options, Unusable, parse, refuse
from _probe import parameters_saved_for_backward
from _training import Run, plain_model, shard, train
from _verdict import Outcome, judge, plant, result_line, show
from torch import nn

FP32_TOLERANCE = 1e-5


def eager(options: Options, ranks: Cluster, seed: int) -> Run:
    """Train with plain FSDP2."""
    model = plain_model(options, seed)
    shard(model, options, ranks)
    return train(model, model, options, ranks, title=f"eager FSDP2, seed {seed}")


def compiled_by_block(options: Options, ranks: Cluster, seed: int) -> Run:
    """Train with FSDP2 around blocks compiled one by one: the compile stock torch offers."""
    torch._dynamo.reset()
    model = plain_model(options, seed)

    def compiled(block: nn.Module) -> nn.Module:
        return torch.compile(block, backend=options.inner)  # type: ignore[return-value]  # a module for a module

    shard(model, options, ranks, wrap=compiled)
    return train(model, model, options, ranks, title=f"compiled by block, seed {seed}")


def captured(options: Options, ranks: Cluster) -> tuple[Run, Outcome]:
    """Train with FSDP2's collectives captured in the compiled graph."""
    import collective_identity
    import fsdp_hooks
    import inductor_passes  # noqa: F401  (brings the backend with it)

    torch._dynamo.reset()
    folder = options.run_dir or Path("runs", ranks.from_first(time.strftime("%Y%m%d-%H%M%S")))
    with collective_identity.enable(mode=options.mode, run_dir=folder) as handle:
        model = plain_model(options, options.seed)
        tokens = torch.zeros(options.batch, options.window, dtype=torch.long)
        needed = parameters_saved_for_backward(model, tokens)
        shard(model, options, ranks)
        fsdp_hooks.install(model)
        handle.session.declare(fsdp_hooks.expected_collectives(model, saved_for_backward=needed))
        passes: dict[str, Any] = {"inner": options.inner, "bucketing": options.bucketing}
        if options.plant is not None:
            passes["pre_passes"] = [plant(options.plant)]
        compiled = torch.compile(model, backend="collective_identity", fullgraph=True, options=passes)
        run = train(compiled, model, options, ranks, title="captured")
        return run, judge(collective_identity.report(), options, folder)


def tolerance(options: Options, ranks: Cluster, reference: Run) -> float:
    """Return the largest relative loss difference to eager FSDP2 that is no fault.

    In bf16 it is twice what compiling block by block changes, the largest of three seeds. ``reference`` is the
    eager run with ``options.seed``.
    """
    if options.tolerance is not None:
        return options.tolerance
    if options.precision == "fp32":
        return FP32_TOLERANCE
    scratch = dataclasses.replace(options, save=None, resume=None)
    worst = 0.0
    for seed in range(options.seed, options.seed + 3):
        plain = reference if seed == options.seed and options.resume is None else eager(scratch, ranks, seed)
        worst = max(worst, compiled_by_block(scratch, ranks, seed).difference(plain))
    return 2 * worst


def job(options: Options, ranks: Cluster) -> bool:
    """Run what was asked for, print the result on rank 0, and return whether it is right on every rank."""
    reference, allowed, outcome, failures = None, 0.0, Outcome.of_eager(), []
    if options.eager:
        run = eager(options, ranks, options.seed)
    else:
        if options.check_against_eager:
            reference = eager(dataclasses.replace(options, save=None), ranks, options.seed)
            allowed = tolerance(options, ranks, reference)
        run, outcome = captured(options, ranks)
    difference = None
    if reference is not None:
        difference = run.difference(reference)
        if not difference <= allowed:
            failures.append(f"losses differ from eager FSDP2's by {difference:.3g}, more than {allowed:.3g}")
    if not run.finite():
        failures.append("a loss is not a finite number")
    for rank, found in enumerate(ranks.everywhere(outcome.failures)):
        failures += [f"rank {rank}: {failure}" for failure in found]
    if ranks.rank == 0:
        if outcome.folder is not None:
            show(outcome.folder)
        if difference is not None:
            print(
                f"largest relative loss difference to eager FSDP2: {difference:.3g}, {allowed:.3g} allowed",
                file=sys.stderr,
            )
        for failure in failures:
            print(f"train_fsdp2.py: failed: {failure}", file=sys.stderr)
        print(json.dumps(result_line(options, ranks, run, outcome, difference, failures)), flush=True)
    return not failures


def main() -> int:
    """Return the process's exit status: 0 right, 1 not right, 2 options that cannot be used."""
    world = os.environ.get("WORLD_SIZE")
    options = parse(sys.argv[1:], world=int(world) if world else None)
    try:
        with cluster(options) as ranks:
            return 0 if job(options, ranks) else 1
    except Unusable as reason:
        refuse(str(reason))


if __name__ == "__main__":
    status = main()
    sys.stdout.flush()
    sys.stderr.flush()
    # DTensor's caches keep meshes, and so gloo's threads, alive past destroy_process_group. One that drops its last
    # tensor while the interpreter shuts down aborts the process: leave without that.
    os._exit(status)
