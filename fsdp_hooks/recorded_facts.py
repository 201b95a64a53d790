"""What was a step recorded with, that a plain step would follow and a CUDA graph cannot?

Taken when the step is recorded, and compared where `recorded_watch` sees that something is another object: objects are
compared by identity and kept alive by being held, the rest by value. Words are for a difference only.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, Final

import torch
from torch import nn

from . import compat, compat_step
from .runtime import BINDINGS, UNIT

PLAIN: Final = (int, float, complex, str, bytes, type(None), Enum, torch.dtype, torch.device, torch.memory_format)


METHODS: Final = ("step", "zero_grad")
"""Of an optimizer, which may hold others than its class has."""

SURROUNDINGS: Final = (
    "grad mode", "inference mode", "autocast", "deterministic algorithms", "precision of float32 products",
    "default dtype", "hooks of all modules and optimizers",
)  # fmt: skip


def surroundings() -> tuple[Any, ...]:
    """What the process has set that a plain step would follow, by `SURROUNDINGS`."""
    return (
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
        torch.is_autocast_enabled("cuda") and torch.get_autocast_dtype("cuda"),
        torch.are_deterministic_algorithms_enabled(),
        torch.get_float32_matmul_precision(),
        torch.get_default_dtype(),
        compat_step.global_hooks(),
    )


@dataclass(slots=True)
class Facts:
    """What holds at one time, in an order that only the model's structure decides.

    Attributes:
        objects: modules and whatever their attributes hold, optimizer state, FSDP2's options.
        values: flags, hooks, addresses, hyperparameters, grad mode and autocast.
        words: for each of the objects, then for each of the values, what it is; empty unless asked for.
    """

    objects: list[Any] = field(default_factory=list)
    values: list[Any] = field(default_factory=list)
    words: tuple[list[str], list[str]] = field(default_factory=lambda: ([], []))

    @classmethod
    def of(
        cls, model: nn.Module, optimizers: Sequence[torch.optim.Optimizer], *, in_words: bool = False
    ) -> Facts:
        """What holds now."""
        made = cls()
        made._surroundings(in_words)
        for name, module in model.named_modules():
            made._module(module, name, in_words)
        for number, optimizer in enumerate(optimizers):
            made._optimizer(optimizer, f"optimizer {number}", in_words)
        return made

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, Facts)
            and len(self.objects) == len(other.objects)
            and (
                all(map(operator.is_, self.objects, other.objects))
                or all(map(_same, self.objects, other.objects))
            )
            and self.values == other.values
        )

    __hash__ = None  # type: ignore[assignment]

    def told(self) -> dict[str, Any]:
        """What was taken in words, by its words."""
        objects, values = self.words
        return dict(zip((*objects, *values), (*self.objects, *self.values), strict=True))

    def _surroundings(self, in_words: bool) -> None:
        self.values += surroundings()
        if in_words:
            self.words[1].extend(SURROUNDINGS)

    def _module(self, module: nn.Module, name: str, in_words: bool) -> None:
        held = module.__dict__
        bindings = held.get(BINDINGS, {})
        parameters, buffers = held["_parameters"], held["_buffers"]
        self.objects.append(module)
        self.objects += held.values()
        self.objects += parameters.values()
        self.objects += buffers.values()
        self.objects += [bindings[attribute].spec for attribute in parameters if attribute in bindings]
        self.values += (held["training"], compat_step.hooks_of(module))
        if UNIT in held:
            accumulated = held[UNIT][0].accumulated
            self.values.append([fqn for fqn, one in accumulated.items() if one.waits])
        for parameter in parameters.values():
            if parameter is not None:
                self.values += (
                    parameter.requires_grad, compat_step.address_of(parameter), compat.gradient_hooks(parameter)
                )  # fmt: skip
        tensors = {key: one for key, one in (*held.items(), *buffers.items()) if isinstance(one, torch.Tensor)}
        self.values += map(compat_step.layout_of, tensors.values())
        if in_words:
            objects, values = self.words
            place = f" of {name or 'the model'}"
            objects.append(f"module{place}")
            objects += [f"attribute {attribute}{place}" for attribute in held]
            objects += [f"parameter {attribute}{place}" for attribute in parameters]
            objects += [f"buffer {attribute}{place}" for attribute in buffers]
            objects += [f"FSDP2's options for {attribute}{place}" for attribute in parameters if attribute in bindings]
            values += (f"train() or eval(){place}", f"hooks{place}")
            if UNIT in held:
                values.append(f"gradients that wait for communication{place}")
            for attribute in [key for key, one in parameters.items() if one is not None]:
                values += [f"{what} of {attribute}{place}" for what in ("requires_grad", "memory", "gradient hooks")]
            values += [f"memory of {attribute}{place}" for attribute in tensors]

    def _optimizer(self, optimizer: torch.optim.Optimizer, name: str, in_words: bool) -> None:
        objects, values = self.words
        self.objects += map(optimizer.__dict__.get, METHODS)  # schedulers put a step there, which counts
        self.values.append(compat_step.step_hooks_of(optimizer))
        if in_words:
            objects += [f"{method} method of {name}" for method in METHODS]
            values.append(f"step hooks of {name}")
        for index, group in enumerate(optimizer.param_groups):
            place = f" of {name}, group {index}"
            given = {key: value for key, value in group.items() if key != "params"}
            tensors = {key: value for key, value in given.items() if isinstance(value, torch.Tensor)}
            self.objects += tensors.values()
            self.values += [value for key, value in given.items() if key not in tensors]
            if in_words:
                objects += [f"{key}{place}" for key in tensors]
                values += [f"{key}{place}" for key in given if key not in tensors]
            for position, parameter in enumerate(group["params"]):
                state = optimizer.state.get(parameter, {})
                self.objects.append(parameter)
                self.objects += state.values()
                self.values += (parameter.requires_grad, compat_step.address_of(parameter))
                if in_words:
                    objects.append(f"parameter {position}{place}")
                    which = f"parameter {position}{place}"
                    values += (f"requires_grad of {which}", f"memory of {which}")
                    objects += [f"{key} of parameter {position}{place}" for key in state]


def difference(
    before: Facts, model: nn.Module, optimizers: Sequence[torch.optim.Optimizer]
) -> str | None:
    """The first thing that is not as it was, in words; None if all is."""
    if before == Facts.of(model, optimizers):
        return None
    now = Facts.of(model, optimizers, in_words=True).told()
    was = before.told()
    for word, value in now.items():
        if word not in was:
            return f"{word}: none, then {say(value)}"
        if not _same(was[word], value) and not (word in before.words[1] and was[word] == value):
            return f"{word}: {say(was[word])}, then {say(value)}"
    gone = next((word for word in was if word not in now), None)
    return "order of the modules" if gone is None else f"{gone}: {say(was[gone])}, then none"


def _same(a: Any, b: Any) -> bool:
    """The same object, or equal values of a type that cannot change."""
    return a is b or (type(a) is type(b) and isinstance(a, PLAIN) and a == b)


def say(value: Any) -> str:
    if value is None:
        return "none"
    if isinstance(value, torch.Tensor):
        return f"a tensor of shape {list(value.shape)}"
    return f"a {type(value).__name__}" if isinstance(value, nn.Module) else repr(value)
