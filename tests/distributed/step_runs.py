"""What runs on each rank: whole-step graphs against eager FSDP2."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
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


class Twice(capture_cases.Model):
    """Its blocks run one after the other, twice over."""

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for block in (*self.blocks, *self.blocks):
            x = block(x)
        return self.head(x)


CASES = {**capture_cases.TWO_RANKS, **capture_cases.FOUR_RANKS, "twice": capture_cases.Case(build=Twice)}


def batch(rank: int, step: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return torch.randint(0, capture_cases.CLASSES, (4, 5), generator=generator)


def loss_fn(model: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(model(tokens).float().flatten(0, 1), tokens.roll(-1, 1).flatten())


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "adamw": lambda p: torch.optim.AdamW(p, lr=1e-2),
    "adamw foreach": lambda p: torch.optim.AdamW(p, lr=1e-2, foreach=True),
    "adamw fused": lambda p: torch.optim.AdamW(p, lr=1e-2, fused=True),
    "adam amsgrad": lambda p: torch.optim.Adam(p, lr=1e-2, amsgrad=True, weight_decay=0.1),
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True),
    "sgd foreach": lambda p: torch.optim.SGD(p, lr=0.1, foreach=True, maximize=True),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=1e-2, momentum=0.5, centered=True),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=1e-2, lr_decay=0.1),
}


@dataclass(frozen=True)
class Run:
    """One comparison: a set-up of capture_cases, an optimizer, and what is in the graph."""

    case: str
    optimizer: str
    inside: bool = True
    options: dict[str, Any] | None = None
    clip: bool = False

    @property
    def name(self) -> str:
        said = f"{self.case}, {self.optimizer}", self.inside and "in the graph", self.clip and "clipped"
        return ", ".join(one for one in (*said, self.options is not None and "compiled") if one)


def clip(model: nn.Module) -> None:
    torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)


def prepared(name: str) -> nn.Module:
    case = CASES[name]
    torch.manual_seed(0)
    model = case.build()
    case.shard(model)
    return model


class Rates:
    """A learning-rate schedule that changes at every step, and says so if it thinks that no step was taken."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.8)

    def step(self) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            self._schedule.step()


def eager(
    model: nn.Module, optimizer: torch.optim.Optimizer, rates: Rates, run: Run, rank: int, first: int = 0
) -> list[float]:
    losses = []
    for step in range(first, first + STEPS):
        loss = loss_fn(model, batch(rank, step))
        loss.backward()
        if run.clip:
            clip(model)
        optimizer.step()
        optimizer.zero_grad()
        rates.step()
        losses.append(loss.item())
    return losses


def difference(one: nn.Module, other: nn.Module) -> float:
    """Largest difference of parameters and buffers."""
    a, b = local_state(one), local_state(other)
    return max((a[key].float() - b[key].float()).abs().max().item() for key in a if a[key].numel())


def replay(rank: int, ranks: int, runs: list[Run]) -> dict[str, dict[str, Any]]:
    """5 steps replayed, then 5 eager ones, against 10 eager; the learning rate changes at each."""
    warnings.simplefilter("ignore")
    found = {}
    for run in runs:
        make = OPTIMIZERS[run.optimizer]
        reference = prepared(run.case)
        data = data_rank(rank, reference)
        reference_optimizer = make(reference.parameters())
        reference_rates = Rates(reference_optimizer)
        expected = eager(reference, reference_optimizer, reference_rates, run, data)
        model = prepared(run.case)
        optimizer = make(model.parameters())
        rates = Rates(optimizer)
        with ci.enable():
            step = fsdp_hooks.trace_train_step(
                model,
                loss_fn,
                (batch(data, 0),),
                optimizer=optimizer if run.inside else None,
                before_step=clip if run.inside and run.clip else None,
            )
            report = ci.report().to_dict()
            if run.options is not None:
                step.compile(options=run.options)
            after = ci.report().to_dict()["collectives"]["after_bucketing"]
            losses = []
            for number in range(STEPS):
                losses.append(step(batch(data, number)).item())
                if not run.inside:
                    optimizer.step()
                    optimizer.zero_grad()
                rates.step()
        replayed = difference(reference, model)
        again = (
            eager(reference, reference_optimizer, reference_rates, run, data, STEPS),
            eager(model, optimizer, rates, run, data, STEPS),
        )
        identities = [ci.identity_of(node) for node in ci.start_nodes(step.graph_module)]
        found[run.name] = {
            "loss": max(abs(a - b) for a, b in zip(expected, losses, strict=True)),
            "moved": losses[0] != losses[-1],
            "parameters": replayed,
            "eager afterwards": max(abs(a - b) for a, b in zip(*again, strict=True)),
            "roles": dict(Counter(i.role for i in identities if i is not None and i.source is ci.Source.EXPLICIT)),
            "unlabelled": sum(i is None for i in identities),
            "failures": report["failures"],
            "captured": report["collectives"]["captured"],
            "after": after,
        }
    return found


def scaled(rank: int, ranks: int) -> dict[str, dict[str, Any]]:
    """A gradient scaler in the graph: one rank's third batch overflows, the scale grows after two good steps."""
    warnings.simplefilter("ignore")

    def loss(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return model(x).square().mean()

    def data(step: int) -> torch.Tensor:
        x = torch.randn(4, 6, generator=torch.Generator().manual_seed(10 * step + rank))
        return x * float("inf") if step == 2 and rank == 1 else x

    def made(kind: str) -> tuple[nn.Module, torch.optim.Optimizer, torch.amp.GradScaler]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(6, 5), nn.Linear(5, 3))
        fully_shard(model[0])
        fully_shard(model)
        scaler = torch.amp.GradScaler("cpu", init_scale=48.0, growth_interval=2)
        return model, OPTIMIZERS[kind](model.parameters()), scaler

    found = {}
    for kind, clipped, inside, options in (
        ("adamw fused", False, True, None),
        ("adamw fused", True, True, {"inner": "aot_eager"}),
        ("adamw foreach", True, True, None),
        ("sgd", False, True, {"inner": "aot_eager"}),
        ("adamw", True, False, None),
    ):
        one, optimizer, scaler = made(kind)
        two, other, theirs = made(kind)
        step = fsdp_hooks.trace_train_step(
            two,
            loss,
            (data(0),),
            optimizer=other if inside else None,
            before_step=clip if clipped and inside else None,
            scaler=theirs,
        )
        if options is not None:
            step.compile(options=options)

        def finish(
            model: nn.Module, optimizer: torch.optim.Optimizer, scaler: torch.amp.GradScaler, clipped: bool
        ) -> None:
            if clipped:
                scaler.unscale_(optimizer)
                clip(model)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()

        losses, scales = [], []
        for number in range(6):
            value = loss(one, data(number))
            scaler.scale(value).backward()
            finish(one, optimizer, scaler, clipped)
            replayed = step(data(number))
            if not inside:
                finish(two, other, theirs, clipped)
            losses.append((value.item(), replayed.item()))
            scales.append((scaler.get_scale(), theirs.get_scale()))
        states = zip(optimizer.state.values(), other.state.values(), strict=True)
        name = f"{kind}{', clipped' * clipped}{', outside' * (not inside)}{', compiled' * (options is not None)}"
        found[name] = {
            "losses": all(a == b for number, (a, b) in enumerate(losses) if number != 2 or rank != 1),
            "scales": scales == [(a, a) for a in (48.0, 96.0, 48.0, 48.0, 96.0, 96.0)],
            "parameters": difference(one, two),
            "moved": losses[0][0] != losses[5][0],
            "state": all(torch.equal(whole(a[key]), whole(b[key])) for a, b in states for key in a),
        }
    return found


def whole(tensor: torch.Tensor) -> torch.Tensor:
    return getattr(tensor, "_local_tensor", tensor)


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
    optimizer = OPTIMIZERS["adamw fused"](model.parameters())
    step = trace(model, loss_fn, (tokens,), optimizer=optimizer)
    attempt("other shape", lambda: step(tokens[:2]))
    attempt("other structure", lambda: step(tokens, tokens))
    attempt("other dtype", lambda: step(tokens.int()))
    optimizer.param_groups[0]["weight_decay"] = 0.5
    attempt("other weight decay", lambda: step(tokens))
    optimizer.param_groups[0]["weight_decay"] = 1e-2
    loss_fn(model, tokens).backward()
    attempt("left-over gradient", lambda: step(tokens))
    optimizer.zero_grad()

    def refused(name: str, optimizer: torch.optim.Optimizer | None, **how: Any) -> None:
        attempt(name, lambda: trace(model, loss_fn, (tokens,), optimizer=optimizer, **how))

    parameters = list(model.parameters())
    refused("stale", torch.optim.SGD(capture_cases.Model().parameters(), lr=0.1))
    refused("adamax", torch.optim.Adamax(parameters))
    refused("dampening", torch.optim.SGD(parameters, lr=0.1, momentum=0.9, dampening=0.1))
    refused("tensor lr", torch.optim.AdamW(parameters, lr=torch.tensor(0.1)))
    refused("differentiable", torch.optim.SGD(parameters, lr=0.1, differentiable=True))
    hooked = torch.optim.SGD(parameters, lr=0.1)
    hooked.register_step_post_hook(lambda *args: None)
    refused("hooks", hooked)
    refused("fused sgd", torch.optim.SGD(parameters, lr=0.1, fused=True))
    refused("before_step alone", None, before_step=clip)
    attempt("not sharded", lambda: trace(nn.Linear(2, 2), loss_fn, (tokens,)))
    attempt("no scalar", lambda: trace(model, lambda m, t: m(t), (tokens,)))
    attempt("no gradient", lambda: trace(model, lambda m, t: m(t).detach().sum(), (tokens,)))
    fixed = trace(model, lambda m, t, scale: loss_fn(m, t) * scale, (tokens, 2.0))
    attempt("other constant", lambda: fixed(tokens, 3.0))
    said["eager still works"] = str(bool(torch.isfinite(loss_fn(model, tokens))))
    dist.barrier()
    return said
