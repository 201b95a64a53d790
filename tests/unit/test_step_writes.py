"""What a forward changes in Python while a step is traced: refused where a next step would read it, never left fake."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import fsdp_hooks

pytestmark = pytest.mark.usefixtures("fake_world")

X = torch.ones(2, 8)


def loss_fn(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return model(x).square().mean()


class Changing(nn.Module):
    def __init__(self, change: Callable[[Any, torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.register_buffer("average", torch.zeros(8))
        self.seen, self.kept, self.calls, self.last = torch.zeros(8), [torch.zeros(8)], 0, None
        self.change = change

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.change(self, self.linear(x))


def sharded(change: Callable[[Any, torch.Tensor], torch.Tensor]) -> nn.Module:
    model = nn.Sequential(Changing(change))
    return fully_shard(model, mesh=init_device_mesh("cpu", (4,)))


def assigned(attribute: str, value: Callable[[Any, torch.Tensor], Any]) -> Callable[[Any, torch.Tensor], torch.Tensor]:
    def change(self: Any, x: torch.Tensor) -> torch.Tensor:
        setattr(self, attribute, value(self, x))
        return x

    return change


def first_kept(self: Any, x: torch.Tensor) -> torch.Tensor:
    self.kept[0] = self.kept[0] + x.detach().mean(0)
    return x


def data(self: Any, x: torch.Tensor) -> torch.Tensor:
    self.average.data = x.detach().mean(0)
    return x


REFUSED = {
    "another buffer": ("0.average", assigned("average", lambda self, x: self.average + x.detach().mean(0))),
    "a buffer's data": ("0.average", data),
    "an attribute": ("0.seen", assigned("seen", lambda self, x: self.seen + x.detach().mean(0))),
    "a list": ("0.kept", first_kept),
    "a number": ("0.calls", assigned("calls", lambda self, x: self.calls + 1)),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_a_next_step_would_read_is_refused_and_put_back(name: str) -> None:
    where, change = REFUSED[name]
    model = sharded(change)
    with pytest.raises(fsdp_hooks.UnsupportedOption, match=f"expects forward to leave '{where}' as it is, found"):
        fsdp_hooks.trace_train_step(model, loss_fn, (X,))
    inner = model[0]
    assert inner.calls == 0 and not any(isinstance(one, FakeTensor) for one in (inner.seen, *inner.kept, inner.average))
    loss_fn(model, X).backward()


def test_what_the_same_step_wrote_is_not() -> None:
    """As a loss of a router, left on its module for the loss function: read after it was written."""
    left = assigned("last", lambda self, x: x.mean())
    model = sharded(lambda self, x: left(self, x) + self.seen)
    model[0].last = torch.ones(())
    step = fsdp_hooks.trace_train_step(model, lambda m, x: loss_fn(m, x) + m[0].last, (X,))
    assert step(X).isfinite() and torch.equal(model[0].last, torch.ones(()))


def test_an_optimizer_of_a_part_of_the_model_is_refused() -> None:
    model = fully_shard(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)), mesh=init_device_mesh("cpu", (4,)))
    optimizer = torch.optim.SGD(model[1].parameters(), lr=0.1)
    with pytest.raises(fsdp_hooks.InstallError, match=r"found '0.weight' in none of its groups, whose gradient"):
        fsdp_hooks.trace_train_step(model, loss_fn, (X,), optimizer=optimizer)
    for parameter in model[0].parameters():
        parameter.requires_grad_(False)
    fsdp_hooks.trace_train_step(model, loss_fn, (X,), optimizer=optimizer)


@pytest.mark.parametrize("compiled", [False, True], ids=["as traced", "compiled"])
def test_a_batch_with_other_strides_is_laid_out_as_the_example(compiled: bool) -> None:
    model = fully_shard(nn.Linear(1, 1), mesh=init_device_mesh("cpu", (1,)))
    step = fsdp_hooks.trace_train_step(model, lambda m, x: (m(x).sum() * 0 + x.view(-1)[1]), (torch.ones(4, 6, 1),))
    if compiled:
        step.compile(options={"inner": "aot_eager"})
    batch = torch.arange(28.0).view(7, 4, 1).transpose(0, 1)
    assert step(batch[:, :-1]).item() == 4.0
