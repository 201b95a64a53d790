"""The quick look at what a step was recorded with sees all that the full one sees, and leaves the rest to it."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import nn

from fsdp_hooks import recorded_watch
from fsdp_hooks.recorded_facts import Facts, difference
from fsdp_hooks.recorded_watch import Watched

from .recorded_loop import Loop

pytestmark = pytest.mark.usefixtures("one_rank")


def first(loop: Loop) -> nn.Parameter:
    return loop.model.first.weight


CHANGES: dict[str, Callable[[Loop], object]] = {
    "attribute": lambda loop: setattr(loop.model, "extra", 1),
    "attribute of a child": lambda loop: setattr(loop.model.second, "extra", None),
    "attribute gone": lambda loop: delattr(loop.model, "given"),
    "training": lambda loop: loop.model.eval(),
    "training of a child": lambda loop: loop.model.first.eval(),
    "module": lambda loop: loop.model.add_module("third", nn.ReLU()),
    "module replaced": lambda loop: loop.model.add_module("given", nn.ReLU()),
    "buffer": lambda loop: loop.model.register_buffer("more", torch.zeros(1)),
    "buffer replaced": lambda loop: setattr(loop.model, "runs", torch.zeros(())),
    "buffer moved": lambda loop: loop.model.runs.set_(torch.zeros(())),
    "trained": lambda loop: first(loop).requires_grad_(False),
    "moved": lambda loop: first(loop)._local_tensor.set_(first(loop)._local_tensor.clone()),
    "gradient hook": lambda loop: first(loop).register_hook(lambda grad: grad),
    "accumulation hook": lambda loop: first(loop).register_post_accumulate_grad_hook(lambda one: None),
    "forward hook": lambda loop: loop.model.second.register_forward_hook(lambda *_: None),
    "backward hook": lambda loop: loop.model.register_full_backward_hook(lambda *_: None),
    "learning rate": lambda loop: loop.optimizer.param_groups[0].update(lr=0.5),
    "another key": lambda loop: loop.optimizer.param_groups[0].update(other=1),
    "group": lambda loop: loop.optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(2))]}),
    "state": lambda loop: loop.optimizer.state[first(loop)].update(momentum_buffer=torch.zeros_like(first(loop))),
    "state of one": lambda loop: loop.optimizer.state.pop(first(loop)),
    "all state": lambda loop: loop.optimizer.load_state_dict(copy.deepcopy(loop.optimizer.state_dict())),
    "step": lambda loop: setattr(loop.optimizer, "step", lambda: None),
    "step hook": lambda loop: loop.optimizer.register_step_post_hook(lambda *_: None),
    "reshard": lambda loop: loop.model.set_reshard_after_forward(False),
    "grad mode": lambda loop: torch.set_grad_enabled(False),
}


@pytest.fixture
def loop() -> Loop:
    loop = Loop()
    loop.model.given = nn.Identity()
    loop.step(torch.ones(4, 6), torch.ones(4, 4))
    return loop


@pytest.mark.parametrize("name", CHANGES)
def test_every_change_is_seen(name: str, loop: Loop) -> None:
    facts = Facts.of(loop.model, (loop.optimizer,), in_words=True)
    watched = Watched(facts, loop.model, (loop.optimizer,))
    assert watched.difference() is None
    try:
        CHANGES[name](loop)
        found = watched.difference()
        assert found == difference(facts, loop.model, (loop.optimizer,))
    finally:
        torch.set_grad_enabled(True)
    assert found is not None


def test_nothing_is_gathered_anew_while_all_is_the_same(loop: Loop, monkeypatch: pytest.MonkeyPatch) -> None:
    facts = Facts.of(loop.model, (loop.optimizer,), in_words=True)
    watched = Watched(facts, loop.model, (loop.optimizer,))
    looks: list[object] = []
    monkeypatch.setattr(recorded_watch, "difference", lambda *given: looks.append(given))
    assert watched.difference() is None and not looks
    loop.optimizer.param_groups[0]["lr"] = float("0.1")  # an equal number, but another object
    assert watched.difference() is None and len(looks) == 1
    assert watched.difference() is None and len(looks) == 1, "what was found equal is known from then on"


def test_a_recording_is_given_up_before_communicators_go() -> None:
    """NCCL's wait for graphs that hold their launches, for ever: seen with two H200, torch 2.11.0, NCCL 2.28."""
    loop = Loop().recorded()
    loop.train()
    assert loop.run.recorded
    dist.destroy_process_group()
    recorded = loop.run.recorded
    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    assert not recorded


def test_a_step_that_is_gone_is_no_hindrance() -> None:
    loop = Loop().recorded()
    loop.train()
    del loop
    dist.destroy_process_group()
    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
