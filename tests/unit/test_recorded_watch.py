"""The quick look at what a step was recorded with sees all that the full one sees, and leaves the rest to it."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import distributed_c10d
from torch.nn.modules.module import register_module_forward_hook
from torch.optim.optimizer import register_optimizer_step_pre_hook

from fsdp_hooks import recorded_watch
from fsdp_hooks.recorded_facts import Facts, difference
from fsdp_hooks.recorded_watch import Watched

from .recorded_loop import Loop

pytestmark = pytest.mark.usefixtures("one_rank")


def nothing(*_: object) -> None:
    """A hook."""


class Hooked(Loop):
    """With a hook of each kind, and tensors that are no parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.model.given = nn.Identity()
        self.model.plain = torch.zeros(())
        self.model.register_buffer("square", torch.zeros(2, 2))
        self.gradient = first(self).register_post_accumulate_grad_hook(nothing)
        self.module = self.model.second.register_forward_pre_hook(nothing)
        self.around = self.optimizer.register_step_pre_hook(nothing)
        self.undo: list[Callable[[], object]] = []


def first(loop: Loop) -> nn.Parameter:
    return loop.model.first.weight


def another_gradient_hook(loop: Hooked) -> None:
    loop.gradient.remove()
    first(loop).register_post_accumulate_grad_hook(lambda one: nothing())


def a_hook_behind_forward(loop: Hooked) -> None:
    """The very same one was before it, and the last of the list."""
    loop.module.remove()
    loop.model.second.register_forward_hook(nothing)


def a_hook_behind_the_step(loop: Hooked) -> None:
    loop.around.remove()
    loop.optimizer.register_step_post_hook(nothing)


def a_hook_of_all_modules(loop: Hooked) -> None:
    loop.undo.append(register_module_forward_hook(nothing).remove)


def a_hook_of_all_optimizers(loop: Hooked) -> None:
    loop.undo.append(register_optimizer_step_pre_hook(nothing).remove)


def precision(loop: Hooked) -> None:
    for one in (torch.backends.cuda.matmul, torch.backends.mkldnn.matmul):  # "highest" is not what they are at first
        loop.undo.append(partial(setattr, one, "fp32_precision", one.fp32_precision))
    torch.set_float32_matmul_precision("medium")


CHANGES: dict[str, Callable[[Hooked], object]] = {
    "attribute": lambda loop: setattr(loop.model, "extra", 1),
    "attribute of a child": lambda loop: setattr(loop.model.second, "extra", None),
    "attribute gone": lambda loop: delattr(loop.model, "given"),
    "training": lambda loop: loop.model.eval(),
    "training of a child": lambda loop: loop.model.first.eval(),
    "module": lambda loop: loop.model.add_module("third", nn.ReLU()),
    "module replaced": lambda loop: loop.model.add_module("given", nn.ReLU()),
    "buffer": lambda loop: loop.model.register_buffer("more", torch.zeros(1)),
    "buffer replaced": lambda loop: setattr(loop.model, "runs", torch.zeros(())),
    "buffer turned": lambda loop: loop.model.square.t_(),
    "tensor moved": lambda loop: loop.model.plain.set_(torch.zeros(())),
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
    "another gradient hook": another_gradient_hook,
    "a hook behind forward": a_hook_behind_forward,
    "a hook behind the step": a_hook_behind_the_step,
    "a hook of all modules": a_hook_of_all_modules,
    "a hook of all optimizers": a_hook_of_all_optimizers,
    "precision": precision,
    "zero_grad": lambda loop: setattr(loop.optimizer, "zero_grad", nothing),
    "step": lambda loop: setattr(loop.optimizer, "step", lambda: None),
    "step hook": lambda loop: loop.optimizer.register_step_post_hook(lambda *_: None),
    "reshard": lambda loop: loop.model.set_reshard_after_forward(False),
    "grad mode": lambda loop: torch.set_grad_enabled(False),
}


@pytest.fixture
def loop() -> Hooked:
    loop = Hooked()
    loop.step(torch.ones(4, 6), torch.ones(4, 4))
    return loop


@pytest.mark.parametrize("name", CHANGES)
def test_every_change_is_seen(name: str, loop: Hooked) -> None:
    facts = Facts.of(loop.model, (loop.optimizer,), in_words=True)
    watched = Watched(facts, loop.model, (loop.optimizer,))
    assert watched.difference() is None
    try:
        CHANGES[name](loop)
        found = watched.difference()
        assert found == difference(facts, loop.model, (loop.optimizer,))
    finally:
        torch.set_grad_enabled(True)
        for undo in loop.undo:
            undo()
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


def test_a_recording_is_given_up_before_what_else_is_finalized() -> None:
    """With torchcomms the communicators themselves, which were there first."""
    loop, found = Loop().recorded(), []

    class Communicator:
        def finalize(self) -> None:
            found.append(loop.run.recorded)

    distributed_c10d._world.comms.append(Communicator())
    loop.train()
    assert loop.run.recorded
    dist.destroy_process_group()
    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    assert found == [False]


def test_a_step_that_is_gone_is_no_hindrance() -> None:
    loop = Loop().recorded()
    loop.train()
    del loop
    dist.destroy_process_group()
    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
