"""A recorded step trains as the plain one does, bit for bit, whatever the loop does around it, or says why not.

On the CPU, in a real group of one rank, with `replayer.Replayer` in the place of a CUDA graph.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import fsdp_hooks
from fsdp_hooks import InstallError, RecordedStep

from .recorded_loop import STEPS, Loop, Net, Step, same, warmed
from .replayer import Replayer

pytestmark = pytest.mark.usefixtures("one_rank")


def zero_outside(loop: Loop, number: int) -> None:
    loop.optimizer.zero_grad()


@pytest.mark.parametrize("micro", [1, 2])
@pytest.mark.parametrize("zero", ["after", "after, in place", "before", "before, in place", "never"])
def test_trains_as_the_plain_step(zero: str, micro: int) -> None:
    recorded = Loop(zero, micro=micro).recorded()
    assert same(Loop(zero, micro=micro).train(), recorded.train())
    assert isinstance(recorded.run, RecordedStep) and recorded.run.recorded
    assert recorded.run.plain >= 2 and recorded.run.replays + recorded.run.plain == STEPS and recorded.run.replays >= 5


def test_gradients_that_the_loop_zeroes_around_it() -> None:
    recorded = Loop("outside").recorded()
    assert same(Loop("outside").train(zero_outside), recorded.train(zero_outside))
    assert recorded.run.replays == STEPS - 2


def test_clipping_is_part_of_the_step() -> None:
    def clipped(loop: Loop) -> Loop:
        step = loop.optimizer.step
        loop.optimizer.step = lambda: (torch.nn.utils.clip_grad_norm_(loop.model.parameters(), 0.5), step())  # type: ignore[method-assign]
        return loop

    recorded = clipped(Loop()).recorded()
    found = recorded.train()
    assert same(clipped(Loop()).train(), found) and recorded.run.replays == STEPS - 2
    assert not same(Loop().train(), found)


def test_gradients_that_are_read_after_a_step() -> None:
    def sums(loop: Loop) -> list[torch.Tensor]:
        seen: list[torch.Tensor] = []
        loop.train(lambda of, _: seen.append(sum(p.grad.to_local().abs().sum() for p in of.model.parameters())))
        return seen

    assert same(sums(Loop("before")), sums(Loop("before").recorded()))


def test_a_learning_rate_that_is_a_tensor_follows_its_schedule() -> None:
    def train(loop: Loop) -> list[torch.Tensor]:
        schedule = torch.optim.lr_scheduler.ExponentialLR(loop.optimizer, 0.7)
        return loop.train(lambda *_: schedule.step())

    def loop() -> Loop:
        made = Loop()
        made.optimizer = torch.optim.AdamW(made.model.parameters(), lr=torch.tensor(0.1), fused=True)
        return made

    recorded = loop().recorded()
    assert same(train(loop()), train(recorded))
    assert recorded.run.replays == STEPS - 2


def test_a_learning_rate_that_is_a_number_and_changes_every_time_is_refused() -> None:
    loop = Loop().recorded()
    schedule = torch.optim.lr_scheduler.ExponentialLR(loop.optimizer, 0.7)
    with pytest.raises(InstallError, match=r"another lr of optimizer 0, group 0: 0\.\d+, then 0\.\d+, the 4th change"):
        for _ in range(3):
            loop.train(lambda *_: schedule.step())


def faster(loop: Loop) -> None:
    loop.optimizer.param_groups[0]["lr"] = 0.02


def evaluated(loop: Loop) -> None:
    loop.model.eval()


def frozen(loop: Loop) -> None:
    loop.model.first.bias.requires_grad_(False)


def loaded(loop: Loop) -> None:
    loop.optimizer.load_state_dict(copy.deepcopy(loop.optimizer.state_dict()))


def hooked(loop: Loop) -> None:
    loop.model.second.register_forward_hook(lambda module, args, out: out * 2)


def kept(loop: Loop) -> None:
    loop.model.set_reshard_after_forward(False)


def forgotten(loop: Loop) -> None:
    loop.optimizer.state.clear()


def moved(loop: Loop) -> None:
    loop.model.runs = loop.model.runs.clone()


CHANGES = (faster, evaluated, frozen, loaded, hooked, kept, forgotten, moved)


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_what_a_plain_step_would_follow_is_recorded_anew(
    change: Callable[[Loop], None], caplog: pytest.LogCaptureFixture
) -> None:
    def between(loop: Loop, number: int) -> None:
        if number == 4:
            change(loop)

    recorded = Loop().recorded()
    with caplog.at_level(logging.WARNING, "collective_identity.fsdp_hooks"):
        found = recorded.train(between)
    assert same(Loop().train(between), found)
    assert recorded.run.replays == STEPS - 3 and "the step is recorded anew, for another " in caplog.text


def test_a_batch_of_another_shape_runs_plainly() -> None:
    def rows(number: int) -> int:
        return 2 if number in (0, 4, 8) else 4

    for zero in ("after", "before", "before, in place"):
        recorded = Loop(zero).recorded()
        assert same(Loop(zero).train(rows=rows), recorded.train(rows=rows))
        assert recorded.run.replays == STEPS - 4 and recorded.run.plain == 4


def test_other_arguments_run_plainly() -> None:
    batch = torch.ones(4, 6), torch.ones(4, 4)

    def losses(loop: Loop) -> list[torch.Tensor]:
        return [loop.run(*batch, scale=scale) for scale in (1.0, 1.0, 1.0, 2.0, 1.0)]

    plain, recorded = losses(Loop()), Loop().recorded()
    assert same(plain, losses(recorded))
    assert (recorded.run.replays, recorded.run.plain) == (2, 3)


def test_results_are_the_callers() -> None:
    loop, batch = Loop().recorded(), (torch.ones(4, 6), torch.ones(4, 4))
    losses = [loop.run(*batch) for _ in range(5)]
    assert len({float(one) for one in losses}) == 5 and not any(one.requires_grad for one in losses)


def test_reset_records_again() -> None:
    loop, batch = Loop().recorded(), (torch.ones(4, 6), torch.ones(4, 4))
    for _ in range(4):
        loop.run(*batch)
    loop.run.reset()
    assert not loop.run.recorded
    for _ in range(3):
        loop.run(*batch)
    assert loop.run.recorded and (loop.run.plain, loop.run.replays) == (4, 3)


def test_on_a_cpu_nothing_is_recorded() -> None:
    loop = Loop()
    loop.run = fsdp_hooks.record_step(loop.step, loop.model, loop.optimizer)
    assert same(Loop().train(), loop.train()) and not loop.run.recorded and loop.run.plain == STEPS


def reads(loop: Loop) -> Step:
    return lambda x, y: loop.step(x, y).item()


def returns(loop: Loop) -> Step:
    return lambda x, y: (loop.step(x, y), 3)


def schedules(loop: Loop) -> Step:
    schedule = torch.optim.lr_scheduler.ExponentialLR(loop.optimizer, 0.7)

    def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        loss = loop.step(x, y)
        schedule.step()
        return loss

    return step


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (reads, r"reads no value back .* not permitted when stream is capturing\): leave \.item\(\)"),
        (returns, "returns tensors or None, found 3"),
        (schedules, r"changes the lr of optimizer 0, group 0: 0\.\d+, then"),
    ],
    ids=["reads", "returns", "schedules"],
)
def test_a_step_that_cannot_be_recorded_is_refused(make: Callable[[Loop], Step], message: str) -> None:
    record = warmed(make)
    with pytest.raises(InstallError, match=message):
        record()


def test_a_batch_that_cannot_be_recorded_is_refused() -> None:
    for batch, message in (
        ((torch.ones(4, 6, requires_grad=True), torch.ones(4, 4)), "tensor 0 of the arguments with requires_grad"),
        ((torch.ones(4, 6), torch.ones(4, 4, device="meta")), "batch on cpu, found tensor 1 of the arguments on meta"),
    ):
        loop = Loop()
        run = RecordedStep(lambda x, y: None, loop.model, (loop.optimizer,), 1, Replayer())
        run(*batch)
        with pytest.raises(InstallError, match=message):
            run(*batch)


def test_a_gradient_that_waits_before_a_step_that_leaves_none_is_refused() -> None:
    loop, batch = Loop().recorded(1), (torch.ones(4, 6), torch.ones(4, 4))
    loop.run(*batch)
    loop.model(batch[0]).sum().backward()
    with pytest.raises(InstallError, match=r"no gradient before a step that leaves none, found one of 'first\.weight'"):
        loop.run(*batch)


def test_a_model_that_is_not_captured_is_refused() -> None:
    model = fully_shard(Net(), mesh=init_device_mesh("cpu", (1,)))
    with pytest.raises(InstallError, match=r"found a FSDPNet that is not: .* call install\(model\) first"):
        fsdp_hooks.record_step(lambda x: x, model, torch.optim.SGD(model.parameters()))


@pytest.mark.parametrize("make", [reads, returns, schedules], ids=lambda make: make.__name__)
def test_gradients_are_what_they_were_when_recording_fails(make: Callable[[Loop], Step]) -> None:
    loop, batch = Loop("before"), (torch.ones(4, 6), torch.ones(4, 4))
    run = RecordedStep(make(loop), loop.model, (loop.optimizer,), 1, Replayer())
    run(*batch)
    held = [p.grad for p in loop.model.parameters()]
    values = [one.to_local().clone() for one in held]
    with pytest.raises(InstallError):
        run(*batch)
    assert all(p.grad is one for p, one in zip(loop.model.parameters(), held, strict=True))
    assert same(values, [one.to_local() for one in held])
