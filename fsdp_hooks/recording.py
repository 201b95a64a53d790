"""One recording of a step: what it reads, what it writes, and when a replay does what the step would do."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from .cuda_recorder import Recorder
from .errors import InstallError
from .recorded_facts import Facts, difference
from .step_inputs import Batch

Gradients = tuple[torch.Tensor | None, ...]


@dataclass(frozen=True, eq=False)
class Recording:
    """A step as it was recorded.

    Attributes:
        batch: the tensors that the recording reads; each replay copies its own into them.
        returned: what the step returned, taken apart; a replay fills its tensors.
        spec: how to put that together again.
        parameters: of the model and the optimizers.
        before: their gradients when recording began.
        after: their gradients when it ended.
        facts: what has to hold.
        run: replays.
    """

    batch: Batch
    returned: tuple[torch.Tensor | None, ...]
    spec: Any
    parameters: tuple[torch.Tensor, ...]
    before: Gradients
    after: Gradients
    facts: Facts
    run: Callable[[], object]

    @classmethod
    def of(
        cls,
        step: Callable[..., Any],
        model: nn.Module,
        optimizers: Sequence[torch.optim.Optimizer],
        given: Batch,
        recorder: Recorder,
    ) -> Recording:
        """Record a step with a batch like ``given``; nothing runs.

        Raises:
            InstallError: see ``record_step``.
        """
        _check_batch(given, model)
        batch = Batch(tuple(one.clone() for one in given.tensors), given.fixed, given.spec)
        args, kwargs = batch.with_tensors(batch.tensors)
        parameters = _parameters(model, optimizers)
        before, held = _gradients(parameters), Facts.of(model, optimizers)
        try:
            returned, run = recorder.record(lambda: step(*args, **kwargs))
        except (RuntimeError, torch.AcceleratorError) as error:
            raise InstallError(
                "record_step expects a step that reads no value back and waits for nothing, found one that cannot be "
                f"recorded ({str(error).splitlines()[0]}): leave .item(), printing of losses, checks for NaN and "
                "copies from the CPU to the code around the step, and compile it in the warm-up (raise warmup)"
            ) from error
        changed = difference(held, model, optimizers)
        if changed:
            raise InstallError(
                f"record_step expects a step that changes tensors in place and nothing else, found one that changes "
                f"the {changed}: do that around the step (a scheduler's step with a learning rate that is a tensor)"
            )
        after = _gradients(parameters)
        for (name, _), was, now in zip(_named(model, parameters), before, after, strict=True):
            if was is not None and now is None:
                raise InstallError(
                    f"record_step expects no gradient before a step that leaves none, found one of {name!r}: call "
                    "zero_grad() first"
                )
        leaves, spec = pytree.tree_flatten(returned)
        for one in leaves:
            if one is not None and not isinstance(one, torch.Tensor):
                raise InstallError(
                    f"record_step expects a step that returns tensors or None, found {one!r}, which no replay could "
                    "renew: return a tensor, or keep it out"
                )
        return cls(batch, tuple(leaves), spec, parameters, before, after, held, run)

    def takes(self, given: Batch) -> bool:
        """Whether a batch has the shapes, dtypes, devices and other arguments of the recorded one."""
        return self.batch.like(given)

    def difference(self, model: nn.Module, optimizers: Sequence[torch.optim.Optimizer]) -> str | None:
        """What is not as it was when the step was recorded, in words; None if all is."""
        for number, (parameter, was, left) in enumerate(zip(self.parameters, self.before, self.after, strict=True)):
            zeroed_inside = was is not None and left is not was
            if parameter.grad is not was and not zeroed_inside:
                name, _ = _named(model, self.parameters)[number]
                return f"gradient of {name}: {_say(was)}, then {_say(parameter.grad)}"
        return difference(self.facts, model, optimizers)

    def replay(self, given: Batch) -> Any:
        """One step with the tensors of a batch."""
        for mine, one in zip(self.batch.tensors, given.tensors, strict=True):
            mine.copy_(one)
        self.run()
        for parameter, was, left in zip(self.parameters, self.before, self.after, strict=True):
            if left is not was:
                parameter.grad = left
        with torch.no_grad():
            kept = [None if one is None else one.detach().clone() for one in self.returned]
        return pytree.tree_unflatten(kept, self.spec)


def _check_batch(given: Batch, model: nn.Module) -> None:
    device = next(model.parameters()).device
    for number, one in enumerate(given.tensors):
        if one.device != device:
            raise InstallError(
                f"record_step expects the batch on {device}, found tensor {number} of the arguments on {one.device}: "
                "move it before the step, a recording cannot copy from there"
            )
        if one.requires_grad:
            raise InstallError(
                f"record_step expects data, found tensor {number} of the arguments with requires_grad: detach it"
            )


def _parameters(model: nn.Module, optimizers: Sequence[torch.optim.Optimizer]) -> tuple[torch.Tensor, ...]:
    stepped = [one for optimizer in optimizers for group in optimizer.param_groups for one in group["params"]]
    return tuple({id(one): one for one in (*model.parameters(), *stepped)}.values())


def _gradients(parameters: Sequence[torch.Tensor]) -> Gradients:
    return tuple(one.grad for one in parameters)


def _named(model: nn.Module, parameters: Sequence[torch.Tensor]) -> list[tuple[str, torch.Tensor]]:
    names = {id(one): name for name, one in model.named_parameters()}
    return [(names.get(id(one), f"parameter {number}"), one) for number, one in enumerate(parameters)]


def _say(gradient: torch.Tensor | None) -> str:
    return "none" if gradient is None else f"a tensor of shape {list(gradient.shape)}"
