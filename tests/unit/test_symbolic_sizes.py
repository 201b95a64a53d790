"""Reading a graph of symbolic sizes never guards on one and never raises: what a symbol leaves open stays open."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import fx
from torch._dynamo.source import ConstantSource
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext

from collective_identity import GRAD_REDUCE_SHARD, classify, collective_table, digest, payload_digest
from tests.graphs import Builder, aten


def _unbacked(env: ShapeEnv, fake: FakeTensorMode) -> Callable[[int], Any]:
    sizes: dict[int, Any] = {}

    def make(number: int) -> Any:
        if number not in sizes:
            sizes[number] = env.create_unbacked_symint()
        with fake:
            return torch.empty(sizes[number], 8)

    return make


def _backed(env: ShapeEnv, fake: FakeTensorMode) -> Callable[[int], Any]:
    """Each number a symbol of its own, whose hint is that number."""
    made: dict[int, Any] = {}

    def make(number: int) -> Any:
        if number not in made:
            context = StatelessSymbolicContext([DimDynamic.DYNAMIC, DimDynamic.STATIC])
            source = ConstantSource(f"x{number}")
            made[number] = fake.from_tensor(torch.empty(number, 8), symbolic_context=context, source=source)
        return made[number]

    return make


def _accumulated(shard: Any, state: Any, target: Any) -> fx.GraphModule:
    """A reduced gradient of one shape that meets a value of another."""
    b = Builder()
    g, acc = b.placeholder("g"), b.placeholder("acc")
    scattered = b.reduce_scatter(g)
    added = b.graph.call_function(target, (scattered.wait, acc))
    for node in (scattered.start, scattered.wait, added):
        node.meta["val"] = shard
    acc.meta["val"] = state
    b.output(added)
    return b.module()


@pytest.mark.parametrize("target", [aten.add.Tensor, aten.sub.Tensor], ids=str)
@pytest.mark.parametrize("sizes", [_unbacked, _backed], ids=lambda f: f.__name__)
def test_shapes_that_may_differ_are_left_open(sizes: Any, target: Any) -> None:
    env = ShapeEnv()
    make = sizes(env, FakeTensorMode(shape_env=env))
    one, other = make(6), make(7)
    with FakeTensorMode(shape_env=env):
        fixed = torch.empty(6, 8)
    before = len(env.guards), dict(env.deferred_runtime_asserts)
    for shard, state, role in ((one, other, None), (one, fixed, None), (one, one, GRAD_REDUCE_SHARD)):
        gm = _accumulated(shard, state, target)
        assert [i and i.role for i in classify(gm).values()] == [role]
        assert collective_table(gm)[0].numel == 32 and len({digest(gm), payload_digest(gm)}) == 2
    assert (len(env.guards), env.deferred_runtime_asserts) == before


def test_equal_expressions_of_one_symbol_are_equal() -> None:
    env = ShapeEnv()
    make = _backed(env, FakeTensorMode(shape_env=env))
    with FakeTensorMode(shape_env=env):
        one, other = torch.empty(make(6).shape[0] * 2, 8), torch.empty(make(6).shape[0] + make(6).shape[0], 8)
    guards = len(env.guards)
    gm = _accumulated(one, other, aten.add.Tensor)
    assert [i and i.role for i in classify(gm).values()] == [GRAD_REDUCE_SHARD] and len(env.guards) == guards
