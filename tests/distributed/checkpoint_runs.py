"""What runs on each rank: activation checkpoints in every place, eager FSDP2 against an installed model."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

import collective_identity as ci
import fsdp_hooks
import inductor_passes  # noqa: F401  (makes the backend known)
from tests.distributed import capture_cases
from tests.distributed.capture_runs import local_state, prepared, train

WIDTH, HEADS = 16, 2


def save_products(context: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    """Keep matrix products, compute the rest again, scaled dot products among it."""
    products = torch.ops.aten.mm.default, torch.ops.aten.addmm.default
    return CheckpointPolicy.MUST_SAVE if operator in products else CheckpointPolicy.MUST_RECOMPUTE


SELECTIVE = functools.partial(create_selective_checkpoint_contexts, save_products)


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        parts = self.qkv(self.norm(x)).chunk(3, -1)
        q, k, v = (part.unflatten(-1, (HEADS, -1)).transpose(1, 2) for part in parts)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return x + self.out(mixed.transpose(1, 2).flatten(-2))


class Layer(nn.Module):
    """Attention and MLP; `inside` checkpoints the two together within the block."""

    def __init__(self, inside: bool) -> None:
        super().__init__()
        self.attention = Attention()
        self.mlp = capture_cases.Block(WIDTH)
        self.inside = inside

    def both(self, x: torch.Tensor) -> torch.Tensor:
        return self.mlp(self.attention(x))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(self.both, x, use_reentrant=False) if self.inside else self.both(x)


class Model(capture_cases.Model):
    """`around`: what the model does with a block and its input."""

    def __init__(self, *, inside: bool = False, around: Callable[..., Any] | None = None) -> None:
        super().__init__(width=WIDTH, blocks=0)
        self.blocks = nn.ModuleList(Layer(inside) for _ in range(2))
        self.around = around

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x) if self.around is None else self.around(block, x)
        return self.head(x)


def wrapped(**options: Any) -> nn.Module:
    model = Model()
    for block in model.blocks:
        block.attention = checkpoint_wrapper(block.attention, **options)
        block.mlp = checkpoint_wrapper(block.mlp, **options)
    return model


AROUND = functools.partial(checkpoint, use_reentrant=False)
BUILDS: dict[str, Callable[[], nn.Module]] = {
    "inside the block": lambda: Model(inside=True),
    "around the block": lambda: Model(around=AROUND),
    "selective, around the block": lambda: Model(around=functools.partial(AROUND, context_fn=SELECTIVE)),
    "wrappers": wrapped,
    "selective wrappers": lambda: wrapped(context_fn=SELECTIVE),
}


@dataclass(frozen=True)
class Run:
    """One comparison: where the checkpoint is, `reshard_after_forward`, and whether it is compiled."""

    build: str
    reshard: bool
    compiled: bool


RUNS = [
    *(Run(build, reshard=True, compiled=compiled) for build in BUILDS for compiled in (True, False)),
    *(Run(build, reshard=False, compiled=True) for build in ("around the block", "wrappers")),
]


def compare(rank: int, ranks: int) -> list[dict[str, Any]]:
    """The largest differences from eager FSDP2 after five AdamW steps, and the report of what was compiled."""
    warnings.simplefilter("ignore")
    torch._dynamo.config.skip_fwd_side_effects_in_bwd_under_checkpoint = True  # this process ends with the test
    return [one(run, rank) for run in RUNS]


def one(run: Run, rank: int) -> dict[str, Any]:
    torch._dynamo.reset()
    case = capture_cases.Case(
        build=BUILDS[run.build],
        shard=lambda model: capture_cases.shard_blocks(model, reshard_after_forward=run.reshard),
        steps=5,
    )
    eager = prepared(case)
    expected = train(eager, eager, case, rank)
    with ci.enable():
        model = fsdp_hooks.install(prepared(case))
        call: Any = model
        if run.compiled:
            call = torch.compile(
                model, backend="collective_identity", fullgraph=True, options={"inner": "aot_eager"}
            )
        found = train(model, call, case, rank)
        report = ci.report().to_dict()
    before, after = local_state(eager), local_state(model)
    return {
        "run": (run.build, run.reshard, run.compiled),
        "loss": max(abs(a - b) for a, b in zip(expected, found, strict=True)),
        "param": max((before[key] - after[key]).abs().max().item() for key in before if before[key].numel()),
        "report": report,
    }


def without_the_flag(rank: int, ranks: int) -> str:
    """What Dynamo says of a checkpoint around a block under its default configuration."""
    warnings.simplefilter("ignore")
    model = fsdp_hooks.install(prepared(capture_cases.Case(build=BUILDS["around the block"])))
    call = torch.compile(model, backend="collective_identity", fullgraph=True, options={"inner": "aot_eager"})
    try:
        call(torch.zeros(1, 2, dtype=torch.long))
    except torch._dynamo.exc.Unsupported as error:
        return str(error)
    return "compiled"
