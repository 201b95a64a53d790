"""Which parameters does a unit gather with the same arguments?

Dynamo guards whatever it reads, once for each place it is read from. Arguments that neighbours in a unit share are
therefore kept once for all of them: most of the operator's arguments, most of the guards of a captured forward.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from typing import Any, NamedTuple

from torch import nn

from .spec import ParamSpec

Source = tuple[nn.Module, str, ParamSpec]
"""A module, its attribute that holds the sharded parameter, and the plan of that."""


class Shared(NamedTuple):
    """The arguments that neighbours have in common, in schema order, without what is the parameter's own."""

    head: tuple[Any, ...]
    param_group: tuple[str]
    tail: tuple[Any, ...]


class Run(NamedTuple):
    """Neighbours gathered alike.

    Attributes:
        shared: their common arguments; None where each has a layout of its own around it (tensor parallelism).
        sources: all of it.
        own: of each the module, the attribute, and its own arguments: name, dimension and size.
    """

    shared: Shared | None
    sources: tuple[Source, ...]
    own: tuple[tuple[nn.Module, str, str, int, int], ...]


def runs_of(sources: Iterable[Source]) -> tuple[Run, ...]:
    """A unit's parameters in their order, neighbours with equal arguments together."""
    runs = []
    for shared, members in itertools.groupby(sources, key=lambda source: _shared(source[2])):
        same = tuple(members)
        own = tuple((m, name, spec.args.param, spec.args.dim, spec.args.size) for m, name, spec in same)
        runs.append(Run(shared, same, own))
    return tuple(runs)


def _shared(spec: ParamSpec) -> Shared | None:
    if spec.model_parallel is not None:
        return None
    version, producer, _, param_group, _, _, *tail = spec.args
    return Shared((version, producer), (param_group,), tuple(tail))
