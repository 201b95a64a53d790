"""The function that gathers a unit's parameters: each with the arguments of its plan, reached as forward reaches it."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable
from functools import partial
from types import FunctionType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import fsdp_hooks
from fsdp_hooks.errors import InstallError
from fsdp_hooks.gathers import Source, gatherer_of
from fsdp_hooks.operator import UnshardArgs
from fsdp_hooks.runtime import BINDINGS, UNIT
from fsdp_hooks.spec import ModelParallel, ParamSpec

ARGS = UnshardArgs(
    1, "fsdp2", "w", "blocks.0", 0, 8, "shard", 2, "shard", "avg", None, 1, "avg", 2.0, None, None, torch.float32, True
)
CPU = torch.device("cpu")


class Inner(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.own = nn.Parameter(torch.ones(8))
        self.below = nn.ModuleList([nn.Linear(8, 8, bias=False)])


def sources(module: Inner, **changed: Any) -> list[Source]:
    specs = [ParamSpec(ARGS._replace(param=name, **changed), None, True, torch.float32, (8,)) for name in ("a", "b")]
    return [(module, "own", specs[0]), (module.below[0], "weight", specs[1])]


def test_what_is_written() -> None:
    module = Inner()
    gather = gatherer_of("blocks.0", module, sources(module, param_dtype=torch.bfloat16), CPU)
    assert gather is not None and gather.__code__.co_filename == "<gathers of blocks.0>"
    given: list[Any] = []

    def unshard(*args: Any) -> torch.Tensor:
        given.append(args)
        return args[0]

    for param in module.parameters():
        param.to_local = partial(torch.Tensor.view_as, param, param)  # type: ignore[attr-defined]
    ops = SimpleNamespace(fsdp_hooks=SimpleNamespace(unshard=unshard))
    fake = SimpleNamespace(ops=ops, float32=torch.float32, bfloat16=torch.bfloat16)
    ran = FunctionType(gather.__code__, {**gather.__globals__, "torch": fake, "DTensor": nn.Parameter})
    full = ran(module)
    assert list(full) == ["a", "b"]
    assert [one.shape for one in full.values()] == [module.own.shape, module.below[0].weight.shape]
    wanted = [tuple(ARGS._replace(param=name, param_dtype=torch.bfloat16)) for name in ("a", "b")]
    assert [args[4:] for args in given] == wanted and all(args[1:4] == (None, None, None) for args in given)


def test_options_that_change_back_are_the_same_code() -> None:
    module = Inner()
    one, other, again = (gatherer_of("u", module, sources(module, sync=sync), CPU) for sync in ("all", "shard", "all"))
    assert one is again and one is not other


def elsewhere(module: Inner, held: list[Source]) -> list[Source]:
    return [(Inner(), "own", held[0][2])]


def around(module: Inner, held: list[Source]) -> list[Source]:
    layout = ModelParallel(None, (), torch.Size([8]), (1,))  # type: ignore[arg-type]
    return [held[0], (*held[1][:2], dataclasses.replace(held[1][2], model_parallel=layout))]


def gone(module: Inner, held: list[Source]) -> list[Source]:
    module.own = None  # type: ignore[assignment]
    return held


@pytest.mark.parametrize("change", [elsewhere, around, gone])
def test_where_no_function_is_written(change: Callable[[Inner, list[Source]], list[Source]]) -> None:
    module = Inner()
    assert gatherer_of("", module, change(module, sources(module)), CPU) is None


def test_shards_that_lie_elsewhere_are_moved_first() -> None:
    module = Inner()
    assert gatherer_of("", module, sources(module), torch.device("cuda")) is None


@pytest.mark.usefixtures("fake_world")
def test_a_parameter_taken_away_is_named() -> None:
    model = nn.Sequential(nn.Linear(8, 8))
    fully_shard(model, mesh=init_device_mesh("cpu", (4,)))
    fsdp_hooks.install(model)
    assert model.__dict__[UNIT][0].gatherer is not None
    model[0]._parameters["bias"] = None
    with pytest.raises(InstallError, match=r"parameter '0.bias': expected the one that was sharded, found none"):
        model(torch.ones(2, 8))


def wrapped(model: nn.Sequential) -> nn.Module:
    model[0] = checkpoint_wrapper(model[0])
    return model


def compiled(model: nn.Sequential) -> nn.Module:
    model[0] = torch.compile(model[0], backend="eager")
    return model


def exchanged(model: nn.Sequential) -> nn.Module:
    model[0] = nn.Sequential(nn.Linear(8, 8), nn.ReLU())
    return model


def plain(model: nn.Sequential) -> nn.Module:
    model[1] = nn.Linear(8, 8)
    return model


@pytest.mark.usefixtures("fake_world")
@pytest.mark.parametrize("whole", [False, True], ids=["eager", "captured"])
@pytest.mark.parametrize("change", [wrapped, compiled, exchanged, plain])
def test_a_module_that_is_wrapped_or_exchanged_afterwards(
    change: Callable[[nn.Sequential], nn.Module], whole: bool
) -> None:
    """What FSDP2 sharded is gathered, wherever it is now."""
    torch._dynamo.reset()
    model = nn.Sequential(nn.Sequential(nn.Linear(8, 8), nn.ReLU()), nn.Linear(8, 8))
    fully_shard(model, mesh=init_device_mesh("cpu", (4,)))
    fsdp_hooks.install(model)
    last = model[1]._parameters["weight"]
    call = change(model)
    if whole:
        call = torch.compile(call, backend="aot_eager", fullgraph=True)
    call(torch.ones(2, 8)).sum().backward()
    grads = [param.grad for param in model.parameters()]
    assert all(grad is not None for grad in grads)
    assert (last.grad is None) == (change is plain)


@pytest.mark.usefixtures("fake_world")
def test_a_copied_unit_is_open_by_itself() -> None:
    """Bindings and their unit share one variable; those of a copy share another."""
    model = nn.Sequential(nn.Linear(8, 8))
    fsdp_hooks.data_parallel(model, init_device_mesh("cpu", (4,)))
    other = copy.deepcopy(model)
    units, bindings = (
        [one.__dict__[UNIT][0] for one in (model, other)],
        [one[0].__dict__[BINDINGS]["weight"] for one in (model, other)],
    )
    assert [binding.unit for binding in bindings] == units and units[0] is not units[1]
    full = {"0.weight": torch.ones(8, 8)}
    units[0].keep(full)
    assert [binding.opened() for binding in bindings] == [full, None]
    assert model[0].weight is full["0.weight"] and other[0].weight is other[0]._parameters["weight"]
    half_open = copy.deepcopy(units[0])
    units[0].close()
    assert units[0].opened() is None and list(half_open.opened()) == ["0.weight"]
