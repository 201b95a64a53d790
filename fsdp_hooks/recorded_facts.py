"""What was a step recorded with, that a plain step would follow and a CUDA graph cannot?

Everything is taken when the step is recorded and compared at every call, so it has to be cheap. Tensors and other
objects are compared by identity, and kept alive by being held here.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

from . import compat_step
from .runtime import BINDINGS, UNIT

_NONE = object()


class Fact(NamedTuple):
    """One thing, where it is, and its value."""

    place: tuple[str, ...]
    what: str
    value: Any


def facts(model: nn.Module, optimizers: Sequence[torch.optim.Optimizer]) -> list[Fact]:
    """What holds now, in an order that only changes of the model's structure change."""
    return [*_of_model(model), *_of_optimizers(optimizers)]


def difference(before: Sequence[Fact], now: Sequence[Fact]) -> str | None:
    """The first thing that is not as it was, in words; None if all is."""
    if len(before) == len(now) and all(_same(a.value, b.value) for a, b in zip(before, now, strict=True)):
        return None
    held = {(fact.place, fact.what): fact.value for fact in before}
    for fact in now:
        was = held.get((fact.place, fact.what), _NONE)
        if not _same(was, fact.value):
            return _sentence(fact, was, fact.value)
    found = {(fact.place, fact.what) for fact in now}
    gone = next(fact for fact in before if (fact.place, fact.what) not in found)
    return _sentence(gone, gone.value, None)


def _sentence(fact: Fact, was: Any, now: Any) -> str:
    return f"{fact.what} of {'.'.join(filter(None, fact.place)) or 'the model'}: {_say(was)}, then {_say(now)}"


def _of_model(model: nn.Module) -> Iterator[Fact]:
    for name, module in model.named_modules():
        yield Fact((name,), "train() or eval()", module.training)
        yield Fact((name,), "hooks", compat_step.hooks_of(module))
        for unit in module.__dict__.get(UNIT, ())[:1]:
            waiting = tuple(fqn for fqn, held in unit.accumulated.items() if held.waits)
            yield Fact((name,), "gradients that wait for communication", waiting)
        bindings = module.__dict__.get(BINDINGS, {})
        for attribute, parameter in module._parameters.items():
            if parameter is None:
                continue
            place = (name, attribute)
            yield Fact(place, "tensor", parameter)
            yield Fact(place, "memory", compat_step.address_of(parameter))
            yield Fact(place, "requires_grad", parameter.requires_grad)
            if attribute in bindings:
                yield Fact(place, "FSDP2's options", bindings[attribute].spec)
        for attribute, buffer in module._buffers.items():
            if buffer is not None:
                yield Fact((name, attribute), "memory", compat_step.address_of(buffer))


def _of_optimizers(optimizers: Sequence[torch.optim.Optimizer]) -> Iterator[Fact]:
    for number, optimizer in enumerate(optimizers):
        for index, group in enumerate(optimizer.param_groups):
            place = (f"optimizer {number}", f"group {index}")
            for option, value in group.items():
                if option != "params":
                    yield Fact(place, option, value)
            for position, parameter in enumerate(group["params"]):
                for key, value in optimizer.state.get(parameter, {}).items():
                    yield Fact((*place, f"parameter {position}"), key, value)


def _same(a: Any, b: Any) -> bool:
    if a is b:
        return True
    return type(a) is type(b) and not isinstance(a, torch.Tensor) and bool(a == b)


def _say(value: Any) -> str:
    if value is _NONE or value is None:
        return "none"
    if isinstance(value, torch.Tensor):
        return f"a tensor of shape {list(value.shape)}"
    return repr(value)
