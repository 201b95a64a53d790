"""How does a unit's forward gather its parameters? By a function written for it, in which every argument is a constant.

Dynamo traces each call and guards whatever it reads, once for each place it is read from: a table of arguments costs a
captured forward more guards than all else. A constant of a function costs none, and a module that is reached as forward
reaches it is guarded once. A function belongs to its text: options that change and change back are the same code.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.distributed.tensor import DTensor  # noqa: F401  (a name in what is written)

from .operator import UnshardArgs
from .spec import ParamSpec

Source = tuple[nn.Module, str, ParamSpec]
"""A module, its attribute that holds the sharded parameter, and the plan of that."""

Gatherer = Callable[[nn.Module], dict[str, torch.Tensor] | None]
"""Gathers all parameters of the unit around a module, each by its name; None where one is no longer in its place.

So it is once a module below was wrapped (``torch.compile`` of a layer, a checkpoint wrapper) or replaced.
"""


class Place(NamedTuple):
    """A parameter as the unit's module reaches it: sub-modules, attribute, and the operator's arguments."""

    path: tuple[str, ...]
    name: str
    args: UnshardArgs


def gatherer_of(unit: str, within: nn.Module, sources: Iterable[Source], device: torch.device) -> Gatherer | None:
    """The function for a unit of one module.

    Args:
        unit: its name, for tracebacks.
        within: the module that was given to ``fully_shard``.
        sources: its parameters.
        device: where they are wanted in full.

    Returns:
        None where a parameter is not below the module, has a layout around it (tensor parallelism), or lies elsewhere.
    """
    paths = {id(module): tuple(name.split(".")) if name else () for name, module in within.named_modules()}
    places = []
    for module, name, spec in sources:
        path, param = paths.get(id(module)), module._parameters.get(name)
        if path is None or spec.model_parallel is not None or param is None or param.device.type != device.type:
            return None
        places.append(Place(path, name, spec.args))
    return _written(unit, tuple(places)) if places else None


@functools.lru_cache(maxsize=4096)
def _written(unit: str, places: tuple[Place, ...]) -> Gatherer:
    scope: dict[str, Any] = {}
    exec(compile(_text(places), f"<gathers of {unit or 'the root'}>", "exec"), globals(), scope)
    return scope["gather"]  # type: ignore[no-any-return]


def _text(places: Iterable[Place]) -> str:
    """The function's text. Its names are this module's."""
    lines = ["def gather(module):", "    unshard, full = torch.ops.fsdp_hooks.unshard, {}"]
    for path, name, args in places:
        holder = "module" + "".join(f"._modules[{part!r}]" for part in path)
        lines += [
            "    try:",
            f"        param = {holder}._parameters[{name!r}]",
            "    except KeyError:",
            "        return None",
            "    if not isinstance(param, DTensor):",
            "        return None",
            f"    full[{args.param!r}] = unshard(param.to_local(), None, None, None, {', '.join(map(_literal, args))})",
        ]
    return "\n".join([*lines, "    return full", ""])


def _literal(value: object) -> str:
    return str(value) if isinstance(value, torch.dtype) else repr(value)
