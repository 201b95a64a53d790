"""One recording of a step: what it reads, what it writes, and when a replay does what the step would do."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import nn
from torch.utils import _pytree as pytree

from . import compat_step
from .cuda_recorder import Recorder
from .errors import InstallError
from .recorded_facts import PLAIN, Facts, difference, say
from .recorded_watch import Watched
from .step_inputs import TENSOR, Batch

Gradients = tuple[torch.Tensor | None, ...]
ANY: Final = "any"


@dataclass(frozen=True, eq=False)
class Recording:
    """A step as it was recorded.

    Attributes:
        batch: the tensors that the recording reads; each replay copies its own into them.
        returned: what the step returned, taken apart; a replay fills its tensors.
        spec: how to put that together again.
        parameters: of the model and the optimizers.
        entry: the gradient that each has to have before a replay, or `ANY`: the step begins by dropping it.
        after: the gradients that a replay leaves.
        watched: what has to hold.
        run: replays.
    """

    batch: Batch
    returned: tuple[torch.Tensor | None, ...]
    spec: Any
    parameters: tuple[torch.Tensor, ...]
    entry: tuple[Any, ...]
    after: Gradients
    watched: Watched
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
        with torch.inference_mode(False), torch.no_grad():
            batch = Batch(tuple(one.clone() for one in given.tensors), given.fixed, given.spec)
        args, kwargs = batch.with_tensors(batch.tensors)
        parameters = _parameters(model, optimizers)
        before, held = _gradients(parameters), Facts.of(model, optimizers, in_words=True)
        versions = _versions(before)
        try:
            returned, run = _recorded(recorder, lambda: step(*args, **kwargs))
            changed = difference(held, model, optimizers)
            if changed:
                raise InstallError(
                    "record_step expects a step that changes tensors in place and nothing else, found one that changes "
                    f"the {changed}: do that around the step (a scheduler's step with a learning rate that is a tensor)"
                )
            _check_unwritten(batch)
            after = _gradients(parameters)
            written = [a != b for a, b in zip(versions, _versions(before), strict=True)]
            entry = tuple(map(_entry, _names(model, parameters), before, after, written))
            leaves, spec = pytree.tree_flatten(returned)
            _check_returned(leaves)
        except BaseException:
            for parameter, was in zip(parameters, before, strict=True):
                parameter.grad = was  # what recording put there holds nothing
            raise
        watched = Watched(held, model, optimizers)
        return cls(batch, tuple(leaves), spec, parameters, entry, after, watched, run)

    def takes(self, given: Batch) -> bool:
        """Whether a batch has the shapes, dtypes, devices and other arguments of the recorded one."""
        return self.batch.like(given) and not any(one.requires_grad for one in given.tensors)

    def difference(self, model: nn.Module) -> str | None:
        """What is not as it was when the step was recorded, in words; None if all is."""
        for number, (parameter, was) in enumerate(zip(self.parameters, self.entry, strict=True)):
            if parameter.grad is not was and was is not ANY:
                name = _names(model, self.parameters)[number]
                return f"gradient of {name}: {say(was)}, then {say(parameter.grad)}"
        return self.watched.difference()

    def replay(self, given: Batch) -> Any:
        """One step with the tensors of a batch."""
        for mine, one in zip(self.batch.tensors, given.tensors, strict=True):
            mine.copy_(one)
        self.run()
        for parameter, left in zip(self.parameters, self.after, strict=True):
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
        if one.layout is not torch.strided:
            raise InstallError(
                f"record_step expects strided tensors, found tensor {number} of the arguments in layout {one.layout}"
            )
        if one.requires_grad:
            raise InstallError(
                f"record_step expects data, found tensor {number} of the arguments with requires_grad: detach it"
            )
    for value in given.fixed:
        if value is not TENSOR and not isinstance(value, PLAIN):
            raise InstallError(
                "record_step expects arguments that are tensors, numbers or strings, in tuples, lists and dicts, found "
                f"a {type(value).__name__}, in which a change could not be seen: pass what is in it"
            )


def _parameters(model: nn.Module, optimizers: Sequence[torch.optim.Optimizer]) -> tuple[torch.Tensor, ...]:
    stepped = [one for optimizer in optimizers for group in optimizer.param_groups for one in group["params"]]
    return tuple({id(one): one for one in (*model.parameters(), *stepped)}.values())


def _gradients(parameters: Sequence[torch.Tensor]) -> Gradients:
    return tuple(one.grad for one in parameters)


def _versions(gradients: Gradients) -> list[int]:
    return [0 if one is None else compat_step.version_of(one) for one in gradients]


def _names(model: nn.Module, parameters: Sequence[torch.Tensor]) -> list[str]:
    names = {id(one): name for name, one in model.named_parameters()}
    return [names.get(id(one), f"parameter {number}") for number, one in enumerate(parameters)]


def _recorded(recorder: Recorder, run: Callable[[], Any]) -> tuple[Any, Callable[[], object]]:
    try:
        return recorder.record(run)
    except RuntimeError as error:
        raise InstallError(
            "record_step expects a step that reads no value back and waits for nothing, found one that cannot be "
            f"recorded ({str(error).splitlines()[0]}): leave .item(), printing of losses, checks for NaN and copies "
            "from the CPU to the code around the step, end what runs on other streams, asynchronous collectives too, "
            "inside it, and compile it in the warm-up (raise warmup)"
        ) from error


def _entry(name: str, was: torch.Tensor | None, left: torch.Tensor | None, written: bool) -> Any:
    """What a gradient has to be before a replay, from what it was before and after the recording."""
    if was is None or left is was:
        return was
    if left is None:
        raise InstallError(
            f"record_step expects no gradient before a step that leaves none, found one of {name!r}: call zero_grad() "
            "first"
        )
    if written:
        raise InstallError(
            f"record_step expects a step that keeps a gradient or drops it, found that of {name!r} written and then "
            "replaced by another tensor: change it in place (param.grad.mul_), or zero_grad(set_to_none=True)"
        )
    return ANY


def _check_unwritten(batch: Batch) -> None:
    for number, one in enumerate(batch.tensors):
        if one._version:
            raise InstallError(
                f"record_step expects a batch that is only read, found tensor {number} of the arguments written by the "
                "step: a replay would write a copy; return a new tensor, or keep what adds up in a buffer"
            )


def _check_returned(leaves: Sequence[Any]) -> None:
    for one in leaves:
        if one is not None and not isinstance(one, torch.Tensor):
            raise InstallError(
                f"record_step expects a step that returns tensors or None, found {one!r}, which no replay could renew: "
                "return a tensor, or keep it out"
            )
