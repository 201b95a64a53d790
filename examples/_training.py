"""Build, train, save and resume the example's model: what a script around FSDP2 does, with or without capture."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from fnmatch import fnmatch
from math import inf, isfinite
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from _cluster import Cluster
from _data import VOCABULARY, Text
from _model import Shape, Transformer
from _options import Options, Unusable
from _progress import progress
from _tensor_parallel import parallelize
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard


@dataclass(frozen=True, slots=True)
class Run:
    """What one training run gave. ``losses[step][rank]``; ``tokens_per_s`` over all ranks, first step left out."""

    losses: list[list[float]]
    tokens_per_s: float

    def means(self) -> list[float]:
        """Loss of each step, averaged over the ranks."""
        return [sum(step) / len(step) for step in self.losses]

    def finite(self) -> bool:
        """Is every loss a finite number?"""
        return all(isfinite(loss) for step in self.losses for loss in step)

    def difference(self, reference: Run) -> float:
        """Largest relative difference to ``reference`` over all steps and ranks; infinite if one is not finite."""
        worst = 0.0
        for mine, theirs in zip(self.losses, reference.losses, strict=True):
            for loss, expected in zip(mine, theirs, strict=True):
                gap = abs(loss - expected) / max(abs(expected), 1e-12)
                worst = max(worst, gap if isfinite(gap) else inf)
        return worst


def plain_model(options: Options, seed: int) -> Transformer:
    """Return the model before any sharding, on the CPU, its weights drawn from ``seed``."""
    torch.manual_seed(seed)
    model = Transformer(
        Shape(VOCABULARY, options.width, options.hidden, options.heads, options.layers, options.window, options.tied)
    )
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not any(fnmatch(name, pattern) for pattern in options.freeze))
    return model


def shard(
    model: Transformer, options: Options, cluster: Cluster, wrap: Callable[[nn.Module], nn.Module] | None = None
) -> None:
    """Shard ``model`` in place with FSDP2, each block and the root, over tensor parallelism if asked for.

    ``wrap`` is put around each block before it is sharded (the block-by-block compile of the bf16 tolerance).
    """
    model.to(cluster.device)
    if cluster.tensor is not None:
        parallelize(model, cluster.tensor, sequence=options.sequence_parallel)
    policy = MixedPrecisionPolicy()
    if options.precision == "bf16":
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    sharding: dict[str, Any] = {
        "mesh": cluster.data,
        "mp_policy": policy,
        "reshard_after_forward": options.reshard,
    }
    for name, block in list(model.layers.named_children()):
        if wrap is not None:
            block = wrap(block)
            model.layers.register_module(name, block)
        fully_shard(block, **sharding)
    fully_shard(model, **sharding)


def optimizer_of(model: nn.Module, options: Options) -> torch.optim.Optimizer:
    """Return AdamW over the parameters that are trained."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return torch.optim.AdamW(trained, lr=options.rate, weight_decay=0.1)


def train(
    forward: Callable[[Tensor], Tensor],
    model: nn.Module,
    options: Options,
    cluster: Cluster,
    *,
    title: str,
) -> Run:
    """Train ``model`` through ``forward`` (the model itself, or what ``torch.compile`` made of it).

    Starts from ``options.resume`` and ends in ``options.save`` where these are given.
    """
    optimizer = optimizer_of(model, options)
    first = resume(options.resume, model, optimizer) if options.resume is not None else 0
    if first >= options.steps:
        raise Unusable(f"--steps {options.steps}: the checkpoint {options.resume} already holds {first} steps")
    text = Text.load(options.window)
    losses: list[float] = []
    started = time.perf_counter()
    with progress(title, options.steps - first, shown=cluster.rank == 0) as advance:
        for step in range(first, options.steps):
            loss = _step(forward, model, optimizer, text, step, options, cluster)
            losses.append(loss)
            if len(losses) == 1:
                started, first_only = time.perf_counter(), time.perf_counter() - started
            advance(loss)
    seconds = time.perf_counter() - started if len(losses) > 1 else first_only
    tokens = max(len(losses) - 1, 1) * options.accumulate * cluster.parts * options.batch * options.window
    if options.save is not None:
        save(options.save, model, optimizer, options.steps)
    by_rank = cluster.everywhere(losses)
    return Run([list(step) for step in zip(*by_rank, strict=True)], tokens / seconds)


def _step(
    forward: Callable[[Tensor], Tensor],
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    text: Text,
    step: int,
    options: Options,
    cluster: Cluster,
) -> float:
    total = 0.0
    for micro in range(options.accumulate):
        number = step * options.accumulate + micro
        inputs, targets = text.batch(number, options.batch, part=cluster.part, parts=cluster.parts)
        logits = forward(inputs.to(cluster.device))
        loss = F.cross_entropy(logits.flatten(0, 1).float(), targets.to(cluster.device).flatten())
        loss = loss / options.accumulate
        loss.backward()
        total += loss.item()
    if options.clip is not None:
        torch.nn.utils.clip_grad_norm_(model.parameters(), options.clip)
    optimizer.step()
    optimizer.zero_grad()
    return total


def save(folder: Path, model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
    """Write sharded model and optimizer state, and the number of steps done, to ``folder``.

    A checkpoint that is there already stops being one before its files are overwritten.
    """
    if dist.get_rank() == 0:
        (folder / ".metadata").unlink(missing_ok=True)
    dist.barrier()
    weights, state = get_state_dict(model, optimizer)
    dcp.save({"model": weights, "optimizer": state, "step": torch.tensor(step)}, checkpoint_id=folder)


def resume(folder: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> int:
    """Load what ``save`` wrote into ``model`` and ``optimizer``; return the number of steps done."""
    weights, state = get_state_dict(model, optimizer)
    step = torch.tensor(0)
    dcp.load({"model": weights, "optimizer": state, "step": step}, checkpoint_id=folder)
    set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=state)
    return int(step)
