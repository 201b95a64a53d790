"""What a plain step would follow and a replay cannot: seen and recorded anew, or refused, never silent."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import fsdp_hooks
from fsdp_hooks import InstallError, RecordedStep

from .recorded_loop import STEPS, Loop, Step, same, warmed
from .replayer import Replayer

pytestmark = pytest.mark.usefixtures("one_rank")


def scaled(loop: Loop) -> None:
    loop.model.scale = 3.0


def another_forward(loop: Loop) -> None:
    loop.model.second.forward = lambda x: F.linear(x, loop.model.second.weight)


def shorter(loop: Loop) -> None:
    loop.model.runs = loop.model.runs[:0]


def wider(loop: Loop) -> None:
    loop.model.runs = loop.model.runs.expand(3).clone()


def hooked(loop: Loop) -> None:
    def hook(optimizer: torch.optim.Optimizer, args: object, kwargs: object) -> None:
        loop.model.runs.add_(100)

    loop.optimizer.register_step_pre_hook(hook)


def grouped(loop: Loop) -> None:
    loop.optimizer.param_groups[0]["weight_decay"] = 0.5


def watched(loop: Loop) -> None:
    def hook(parameter: torch.Tensor) -> None:
        parameter.grad.mul_(0.5)

    for parameter in loop.model.parameters():
        parameter.register_post_accumulate_grad_hook(hook)


def wrapped(loop: Loop) -> None:
    step = loop.optimizer.step
    loop.optimizer.step = lambda: (step(), loop.model.runs.add_(100))  # type: ignore[method-assign]


def rewatched(loop: Scaled) -> None:
    """As many hooks as before, another one."""
    loop.watching.remove()
    loop.model.first.weight.register_post_accumulate_grad_hook(halve)


def turned(loop: Loop) -> None:
    """Where it was, and of the same shape."""
    loop.model.square.t_()


def halve(parameter: torch.Tensor) -> None:
    parameter.grad.mul_(0.5)


class Scaled(Loop):
    """Its forward reads a number and a buffer of one element."""

    def __init__(self) -> None:
        super().__init__()
        self.model.scale = 1.0
        self.model.runs = torch.zeros(1)
        self.model.register_buffer("square", torch.arange(4.0).view(2, 2))
        self.watching = self.model.first.weight.register_post_accumulate_grad_hook(lambda one: None)

    def step(self, x: torch.Tensor, y: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
        return super().step(x, y, self.model.scale) + self.model.runs.sum() + self.model.square[0].sum()


CHANGES = (scaled, another_forward, shorter, wider, hooked, grouped, watched, rewatched, turned, wrapped)


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_a_change_between_two_steps_is_followed(change: Callable[[Any], None]) -> None:
    def between(loop: Loop, number: int) -> None:
        if number == 4:
            change(loop)

    recorded = Scaled().recorded()
    assert same(Scaled().train(between), recorded.train(between))
    assert recorded.run.replays == STEPS - 3


def carries(loop: Loop) -> Step:
    loop.model.memory = torch.zeros(())

    def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        loss = loop.step(x, y) + loop.model.memory
        loop.model.memory = loss
        return loss

    return step


def counts(loop: Loop) -> Step:
    loop.model.steps = 0

    def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        loop.model.steps += 1
        return loop.step(x, y)

    return step


def writes(loop: Loop) -> Step:
    return lambda x, y: y.add_(loop.step(x, y))


def replaces(loop: Loop) -> Step:
    loop.zero = "no"

    def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        loop.optimizer.zero_grad(set_to_none=False)
        loss = loop.step(x, y)
        for parameter in loop.model.parameters():
            parameter.grad = parameter.grad * 0.5
        return loss

    return step


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (carries, "changes the attribute memory of the model: a tensor of shape"),
        (counts, "changes the attribute steps of the model: 1, then 2"),
        (writes, "only read, found tensor 1 of the arguments written"),
        (replaces, r"found that of 'first\.weight' written and then replaced by another tensor"),
    ],
    ids=["carries", "counts", "writes", "replaces"],
)
def test_what_a_step_must_not_do(make: Callable[[Loop], Step], message: str) -> None:
    record = warmed(make)
    with pytest.raises(InstallError, match=message):
        record()


@dataclass
class Packed:
    """A batch that nobody can look into."""

    x: torch.Tensor


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (Packed(torch.ones(4, 6)), "found a Packed, in which a change could not be seen"),
        (torch.ones(4, 6).to_sparse(), "found tensor 0 of the arguments in layout torch.sparse_coo"),
    ],
    ids=["packed", "sparse"],
)
def test_arguments_that_cannot_be_compared_are_refused(given: Any, message: str) -> None:
    loop = Loop()
    run = RecordedStep(lambda x: None, loop.model, (loop.optimizer,), 1, Replayer())
    run(given)
    with pytest.raises(InstallError, match=message):
        run(given)


def test_another_grad_mode_is_followed() -> None:
    loop, batch = Loop().recorded(1), (torch.ones(4, 6), torch.ones(4, 4))
    for _ in range(3):
        loop.run(*batch)
    with torch.no_grad(), pytest.raises(RuntimeError, match="does not require grad"):
        loop.run(*batch)  # as the plain step


def test_recorded_in_inference_mode() -> None:
    loop, x = Loop(), torch.ones(4, 6)
    loop.model.eval()
    run = RecordedStep(lambda x: loop.model.second.weight.to_local().sum() + x.sum(), loop.model, (), 1, Replayer())
    for _ in range(3):
        with torch.inference_mode():
            run(x)
    with torch.no_grad():
        assert float(run(x)) == float(run(x * 1.0))


def test_a_batch_that_wants_a_gradient_gets_one() -> None:
    loop, y = Loop().recorded(1), torch.ones(4, 4)
    for _ in range(3):
        loop.run(torch.ones(4, 6), y)
    x = torch.ones(4, 6, requires_grad=True)
    loop.run(x, y)
    assert x.grad is not None and loop.run.plain == 2


def test_the_shape_that_stays_is_recorded_in_the_end(caplog: pytest.LogCaptureFixture) -> None:
    def rows(number: int) -> int:
        return 2 if number == 2 else 4  # the first after two plain ones is odd

    recorded = Loop().recorded()
    assert same(Loop().train(rows=rows), recorded.train(rows=rows))
    assert recorded.run.plain == 5 and recorded.run.replays == STEPS - 5
    assert "unlike the recorded one" in caplog.text


def test_shapes_that_differ_every_time_are_not_recorded() -> None:
    def rows(number: int) -> int:
        return 4 + max(0, number - 3)

    recorded = Loop().recorded()
    assert same(Loop().train(rows=rows), recorded.train(rows=rows))
    assert recorded.run.replays == 2


def test_a_model_that_is_given_back_is_not_recorded(caplog: pytest.LogCaptureFixture) -> None:
    loop, batch = Loop().recorded(1), (torch.ones(4, 6), torch.ones(4, 4))
    for _ in range(3):
        loop.run(*batch)
    fsdp_hooks.uninstall(loop.model)
    loop.run(*batch)  # eager FSDP2, plainly
    assert "recorded anew" in caplog.text
    with pytest.raises(InstallError, match=r"found a FSDPNet that is not: .* call install"):
        loop.run(*batch)


@pytest.mark.parametrize("warmup", [0, -1, True, 1.5])
def test_a_warm_up_is_a_number_of_steps(warmup: Any) -> None:
    loop = Loop()
    with pytest.raises(InstallError, match=f"at least 1 plain step as warm-up, found warmup={warmup}"):
        fsdp_hooks.record_step(loop.step, loop.model, loop.optimizer, warmup=warmup)


def test_optimizers_are_optimizers() -> None:
    loop = Loop()
    with pytest.raises(InstallError, match="expects optimizers, found a list"):
        fsdp_hooks.record_step(loop.step, loop.model, [[loop.optimizer]])
    run = fsdp_hooks.record_step(loop.step, loop.model, (one for one in [loop.optimizer]))
    assert float(run(torch.ones(4, 6), torch.ones(4, 4))) > 0
