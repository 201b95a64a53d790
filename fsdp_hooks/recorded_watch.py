"""Is everything that a step was recorded with still the very same? In a third of the time that a full look takes.

The device waits for the answer at every call. So the dicts of modules, hooks and optimizer state are read through live
views, compared by identity and in one go. If anything is another object, `recorded_facts` says whether that matters.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, Final

import torch
from torch import nn

from . import compat, compat_step
from .recorded_facts import METHODS, Facts, difference, surroundings
from .runtime import BINDINGS, UNIT

_END: Final = (object(),)
"""Ends both sides of a comparison, so that one of them cannot be the beginning of the other."""


class Watched:
    """What a step was recorded with, and whether it still holds.

    Args:
        facts: what held when it was recorded.
        model: as ``record_step`` has it.
        optimizers: likewise.
    """

    def __init__(self, facts: Facts, model: nn.Module, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        self._facts, self._model, self._optimizers = facts, model, optimizers
        self._watch = _Watch.of(model, optimizers)

    def difference(self) -> str | None:
        """The first thing that is not as it was, in words; None if all is."""
        if self._watch.holds():
            return None
        found = difference(self._facts, self._model, self._optimizers)
        if found is None:
            self._watch = _Watch.of(self._model, self._optimizers)
        return found


@dataclass(frozen=True, slots=True, eq=False)
class _Watch:
    """The places of `Facts`, and what they held at one time.

    Attributes:
        views: live views, which show what a place holds now.
        held: what all of them showed.
        parameters: whose flags, memory and hooks are compared.
        buffers: other tensors of modules, whose memory and layout is.
        rest: what else has no view.
        flags: all of that, as it was.
    """

    views: tuple[Iterable[Any], ...]
    held: tuple[Any, ...]
    parameters: tuple[torch.Tensor, ...]
    buffers: tuple[torch.Tensor, ...]
    rest: _Rest
    flags: list[Any]

    @classmethod
    def of(cls, model: nn.Module, optimizers: Sequence[torch.optim.Optimizer]) -> _Watch:
        """What holds now."""
        views: list[Iterable[Any]] = []
        parameters: dict[int, torch.Tensor] = {}
        buffers: dict[int, torch.Tensor] = {}
        bindings: list[Any] = []
        accumulated: list[Any] = []
        for module in model.modules():
            held = module.__dict__
            views += (held.values(), held["_modules"].values(), held["_parameters"].values(), held["_buffers"].values())
            views += compat_step.hook_dicts_of(module)
            parameters.update((id(one), one) for one in held["_parameters"].values() if one is not None)
            tensors = (one for one in (*held.values(), *held["_buffers"].values()) if isinstance(one, torch.Tensor))
            buffers.update((id(one), one) for one in tensors)
            if BINDINGS in held:
                views.append(held[BINDINGS].values())
                bindings += held[BINDINGS].values()
            if UNIT in held:
                waiting = held[UNIT][0].accumulated
                views.append(waiting.values())
                accumulated += waiting.values()
        for optimizer in optimizers:
            views += compat_step.step_hook_dicts_of(optimizer)
            views += (optimizer.param_groups, optimizer.state.values())
            views += (state.values() for state in optimizer.state.values())
            for group in optimizer.param_groups:
                views += (group.values(), group["params"])
                parameters.update((id(one), one) for one in group["params"])
        for parameter in parameters.values():
            views += (hooks for hooks in compat.gradient_hook_dicts(parameter) if hooks is not None)
        rest = _Rest(tuple(bindings), tuple(accumulated), tuple(optimizers))
        given = tuple(views), (*chain.from_iterable(views), *_END), (*parameters.values(),), (*buffers.values(),), rest
        return cls(*given, _flags(*given[2:]))

    def holds(self) -> bool:
        """Whether nothing is another object, and no tensor elsewhere."""
        now = chain(chain.from_iterable(self.views), _END)
        return all(map(operator.is_, now, self.held)) and self.flags == _flags(self.parameters, self.buffers, self.rest)


@dataclass(frozen=True, slots=True, eq=False)
class _Rest:
    bindings: tuple[Any, ...]
    accumulated: tuple[Any, ...]
    optimizers: tuple[torch.optim.Optimizer, ...]


def _flags(parameters: Sequence[torch.Tensor], buffers: Sequence[torch.Tensor], rest: _Rest) -> list[Any]:
    flags: list[Any] = [*surroundings()]
    flags += [one.requires_grad for one in parameters]
    flags += map(compat_step.address_of, parameters)
    flags += map(id, chain.from_iterable(map(compat.gradient_hook_dicts, parameters)))
    flags += map(compat_step.layout_of, buffers)
    flags += [id(one.spec) for one in rest.bindings]
    flags += [bool(one.waits) for one in rest.accumulated]
    for one in rest.optimizers:
        flags += (id(one.state), id(one.param_groups), *map(id, map(one.__dict__.get, METHODS)))
    return flags
