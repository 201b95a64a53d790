"""What runs on each rank: whole-step graphs against eager FSDP2."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import fully_shard

import collective_identity as ci
import fsdp_hooks
import inductor_passes  # noqa: F401  (makes the backend known)
from tests.distributed import capture_cases
from tests.distributed.capture_runs import data_rank, local_state

STEPS = 5


def batch(rank: int, step: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return torch.randint(0, capture_cases.CLASSES, (4, 5), generator=generator)


def loss_fn(model: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(model(tokens).float().flatten(0, 1), tokens.roll(-1, 1).flatten())


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)


def momentum(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, nesterov=True)


def prepared(name: str) -> nn.Module:
    case = {**capture_cases.TWO_RANKS, **capture_cases.FOUR_RANKS}[name]
    torch.manual_seed(0)
    model = case.build()
    case.shard(model)
    return model


def eager(model: nn.Module, optimizer: torch.optim.Optimizer, rank: int, first: int = 0) -> list[float]:
    losses = []
    for step in range(first, first + STEPS):
        loss = loss_fn(model, batch(rank, step))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def difference(one: nn.Module, other: nn.Module) -> float:
    """Largest difference of parameters and buffers."""
    a, b = local_state(one), local_state(other)
    return max((a[key].float() - b[key].float()).abs().max().item() for key in a if a[key].numel())


def replay(
    rank: int, ranks: int, cases: list[tuple[str, str, bool, dict[str, Any] | None]]
) -> dict[str, dict[str, Any]]:
    """`(case, optimizer, in the graph, backend options)`: 5 steps replayed, then 5 eager ones, against 10 eager."""
    warnings.simplefilter("ignore")
    found = {}
    for name, make, inside, options in cases:
        make_optimizer: Callable[[nn.Module], torch.optim.Optimizer] = globals()[make]
        reference = prepared(name)
        data = data_rank(rank, reference)
        reference_optimizer = make_optimizer(reference)
        expected = eager(reference, reference_optimizer, data)
        model = prepared(name)
        optimizer = make_optimizer(model)
        with ci.enable():
            step = fsdp_hooks.trace_train_step(
                model, loss_fn, (batch(data, 0),), optimizer=optimizer if inside else None
            )
            report = ci.report().to_dict()
            if options is not None:
                step.compile(options=options)
            losses = []
            for number in range(STEPS):
                losses.append(step(batch(data, number)).item())
                if not inside:
                    optimizer.step()
                    optimizer.zero_grad()
        replayed = difference(reference, model)
        again = eager(reference, reference_optimizer, data, STEPS), eager(model, optimizer, data, STEPS)
        identities = [ci.identity_of(node) for node in ci.start_nodes(step.graph_module)]
        found[f"{name}, {make}{', in the graph' if inside else ''}{', compiled' if options is not None else ''}"] = {
            "loss": max(abs(a - b) for a, b in zip(expected, losses, strict=True)),
            "parameters": replayed,
            "eager afterwards": max(abs(a - b) for a, b in zip(*again, strict=True)),
            "roles": dict(Counter(i.role for i in identities if i is not None and i.source is ci.Source.EXPLICIT)),
            "unlabelled": sum(i is None for i in identities),
            "failures": report["failures"],
            "captured": report["collectives"]["captured"],
        }
    return found


class Noisy(nn.Module):
    """Dropout, a buffer that every step changes, a tied weight, a frozen parameter, and an unused one."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 8)
        self.norm = nn.BatchNorm1d(8)
        self.tied = nn.Linear(8, 6, bias=False)
        self.tied.weight = nn.Parameter(self.first.weight.detach().t().contiguous())
        self.frozen = nn.Parameter(torch.ones(6), requires_grad=False)
        self.unused = nn.Parameter(torch.ones(6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.tied(F.dropout(self.norm(self.first(x)), 0.3)) * self.frozen


def noisy(rank: int, ranks: int) -> dict[str, Any]:
    """Random numbers, buffers, dict inputs and a loss that returns more, in the graph as in eager."""

    def loss(model: nn.Module, sample: dict[str, torch.Tensor], *, scale: float) -> tuple[torch.Tensor, dict[str, Any]]:
        out = model(sample["x"])
        return (out - sample["y"]).square().mean() * scale, {"mean": out.mean(), "scale": scale}

    def made() -> nn.Module:
        torch.manual_seed(0)
        model = Noisy()
        fully_shard(model)
        return model

    def sample(step: int) -> dict[str, torch.Tensor]:
        generator = torch.Generator().manual_seed(10 * step + rank)
        return {"x": torch.randn(4, 6, generator=generator), "y": torch.randn(4, 6, generator=generator)}

    one, two = made(), made()
    step = fsdp_hooks.trace_train_step(two, loss, (sample(0),), {"scale": 2.0})
    same = []
    for number in range(3):
        torch.manual_seed(number)
        value, extra = loss(one, sample(number), scale=2.0)
        value.backward()
        torch.manual_seed(number)
        replayed, also = step(sample(number), scale=2.0)
        same.append(bool(torch.equal(value, replayed) and torch.equal(extra["mean"], also["mean"])))
        same.append(also["scale"] == 2.0)
    for a, b in zip(one.parameters(), two.parameters(), strict=True):
        same.append((a.grad is None) == (b.grad is None))
        if a.grad is not None and b.grad is not None:
            same.append(bool(torch.equal(a.grad.to_local(), b.grad.to_local())))
    same += [bool(torch.equal(a, b)) for a, b in zip(one.buffers(), two.buffers(), strict=True)]
    return {"same": same, "batches": int(two.norm.num_batches_tracked)}


def wrong(rank: int, ranks: int) -> dict[str, str]:
    """What is refused, and how it is said."""
    said = {}

    def attempt(name: str, run: Callable[[], object]) -> None:
        try:
            run()
            said[name] = ""
        except Exception as error:
            said[name] = f"{type(error).__name__}: {error}"

    model = prepared("uneven")
    tokens = batch(rank, 0)
    trace = fsdp_hooks.trace_train_step
    optimizer = adamw(model)
    step = trace(model, loss_fn, (tokens,), optimizer=optimizer)
    attempt("other shape", lambda: step(tokens[:2]))
    attempt("other structure", lambda: step(tokens, tokens))
    attempt("other dtype", lambda: step(tokens.int()))
    optimizer.param_groups[0]["lr"] = 0.5
    attempt("other lr", lambda: step(tokens))
    attempt("not sharded", lambda: trace(nn.Linear(2, 2), loss_fn, (tokens,)))
    attempt("fused in a compile", step.compile)
    attempt("no scalar", lambda: trace(model, lambda m, t: m(t), (tokens,)))
    attempt("no gradient", lambda: trace(model, lambda m, t: m(t).detach().sum(), (tokens,)))
    attempt("not fused", lambda: trace(model, loss_fn, (tokens,), optimizer=torch.optim.AdamW(model.parameters())))
    attempt("adagrad", lambda: trace(model, loss_fn, (tokens,), optimizer=torch.optim.Adagrad(model.parameters())))
    fixed = trace(model, lambda m, t, scale: loss_fn(m, t) * scale, (tokens, 2.0))
    attempt("other constant", lambda: fixed(tokens, 3.0))
    said["eager still works"] = str(bool(torch.isfinite(loss_fn(model, tokens))))
    dist.barrier()
    return said
