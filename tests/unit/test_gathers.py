"""Neighbours in a unit that are gathered alike share their arguments, in order and without losing any."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from fsdp_hooks.gathers import Shared, Source, runs_of
from fsdp_hooks.operator import UnshardArgs
from fsdp_hooks.spec import ModelParallel, ParamSpec

ARGS = UnshardArgs(
    1, "fsdp2", "w", "blocks.0", 0, 8, "shard", 2, "shard", "avg", None, 1, "avg", None, None, None, torch.float32, True
)


def source(param: str, layout: ModelParallel | None = None, **changed: Any) -> Source:
    spec = ParamSpec(ARGS._replace(param=param, **changed), layout, True, torch.float32, (8,))
    return nn.Module(), param, spec


def test_each_parameter_has_the_arguments_of_its_plan() -> None:
    sources = [
        source("a"), source("b", dim=1, size=6), source("c", reduce_dtype=None), source("d", sync="shard"),
        source("e", sync="shard"), source("f"),
    ]  # fmt: skip
    found = []
    for shared, same, own in runs_of(sources):
        assert isinstance(shared, Shared)
        for (module, name, fqn, dim, size), one in zip(own, same, strict=True):
            assert (module, name) == one[:2]
            found.append((one, (*shared.head, fqn, *shared.param_group, dim, size, *shared.tail)))
    assert found == [(one, tuple(one[2].args)) for one in sources]
    assert [len(run.own) for run in runs_of(sources)] == [2, 1, 2, 1]


def test_a_layout_of_its_own_is_kept_apart() -> None:
    layout = ModelParallel(None, (), torch.Size([8]), (1,))  # type: ignore[arg-type]
    plain, parallel, last = source("a"), source("b", layout), source("c")
    first, second, third = runs_of([plain, parallel, last])
    assert (first.sources, second.sources, third.sources) == ((plain,), (parallel,), (last,))
    assert second.shared is None and first.shared == third.shared


def test_every_argument_is_shared_but_the_parameters_own() -> None:
    """A field added to the operator's arguments is carried as well."""
    (run,) = runs_of([source("a")])
    assert run.shared is not None
    assert sum(map(len, run.shared)) + 3 == len(UnshardArgs._fields)
