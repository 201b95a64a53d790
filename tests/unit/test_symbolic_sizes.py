"""Reading a graph of symbolic sizes never guards on one and never raises: what a symbol leaves open stays open."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import fx
from torch._dynamo.source import ConstantSource
from torch._inductor.fx_passes.control_dependencies import control_deps
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext

from collective_identity import GRAD_REDUCE_SHARD, PARAM_UNSHARD, classify, collective_table, digest, payload_digest
from tests.graphs import Builder, aten

C = torch.ops._c10d_functional


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


def _padded(w: torch.Tensor, x: torch.Tensor, group: str) -> torch.Tensor:
    return C.wait_tensor(C.all_gather_into_tensor(torch.cat([w, w.new_zeros(x.shape[0], 8)]), 2, group))


def _padded_like(w: torch.Tensor, x: torch.Tensor, group: str) -> torch.Tensor:
    return C.wait_tensor(C.all_gather_into_tensor(torch.cat([w, torch.zeros_like(x)]), 2, group))


def _made_by(w: torch.Tensor, x: torch.Tensor, group: str) -> torch.Tensor:
    return C.wait_tensor(C.all_gather_into_tensor(torch.cat([w, x.new_full((2, 8), 0)]), 2, group))


def _sliced(w: torch.Tensor, x: torch.Tensor, group: str) -> torch.Tensor:
    return C.wait_tensor(C.all_gather_into_tensor(w[: x.shape[0] * 2 - x.numel() // 8], 2, group))


def _viewed(w: torch.Tensor, x: torch.Tensor, group: str) -> torch.Tensor:
    return C.wait_tensor(C.all_gather_into_tensor(w[0].expand_as(x), 2, group))


def _added(w: torch.Tensor, x: torch.Tensor, group: str) -> torch.Tensor:
    return C.wait_tensor(C.all_gather_into_tensor(w[: x.shape[0]] + x, 2, group))


def _made_of(w: torch.Tensor, x: torch.Tensor, group: str) -> torch.Tensor:
    """A number read from the other input is data, whatever is made with it."""
    return C.wait_tensor(C.all_gather_into_tensor(w * x.new_full((4, 8), x.sum().item()), 2, group))


@pytest.mark.parametrize("mode", ["fake", "symbolic"])
@pytest.mark.parametrize(
    ("made", "role"),
    [
        (_padded, PARAM_UNSHARD),
        (_padded_like, PARAM_UNSHARD),
        (_made_by, PARAM_UNSHARD),
        (_sliced, PARAM_UNSHARD),
        (_viewed, PARAM_UNSHARD),
        (_added, None),
        (_made_of, None),
    ],
    ids=lambda given: given.__name__ if callable(given) else "",
)
def test_the_size_of_another_input_is_no_source(
    made: Callable[..., Any], role: str | None, mode: Any, new_group: Callable[[list[int]], str]
) -> None:
    """What a gather sends comes from its parameter alone, although torch counts the other placeholder."""
    group = new_group([0, 1])
    with torch._dynamo.config.patch(capture_scalar_outputs=True):
        gm = make_fx(lambda w, x: made(w, x, group), tracing_mode=mode)(torch.ones(4, 8), torch.ones(3, 8))
    env = gm.shape_env if mode == "symbolic" else None
    guards = len(env.guards) if env else 0
    assert [i and i.role for i in classify(gm).values()] == [role]
    assert env is None or len(env.guards) == guards


def test_a_size_beside_a_parameter_and_its_block_scale() -> None:
    b = Builder()
    w, s, x = b.placeholder("w", dtype=torch.uint8), b.placeholder("s", (4, 1)), b.placeholder("x", dtype=torch.uint8)
    sent = b.graph.call_function(aten.mul.Tensor, (w, s))
    size = b.graph.call_function(aten.sym_size.int, (x, 0))
    size.meta["val"] = 4
    sent.meta["val"] = w.meta["val"]
    padded = b.cat([b.call(aten.slice.Tensor, sent, 0, 0, size), b.call(aten.zeros_like.default, x)])
    b.output(b.all_gather(padded).wait)
    gm = b.module()
    assert [i and i.role for i in classify(gm).values()] == [PARAM_UNSHARD]


def test_an_ordering_is_no_source() -> None:
    """An operator that `control_deps` orders behind another reads the values that it is given, not the other's."""
    b = Builder()
    w, x = b.placeholder("w"), b.placeholder("x")
    cast = Builder()
    cast.output(cast.cast(cast.placeholder("a"), torch.bfloat16))
    b.root.cast = cast.module()
    ordered = b.graph.call_function(control_deps, ((b.call(aten.relu.default, x),), b.graph.get_attr("cast"), w))
    ordered.meta["val"] = b.empty((4, 8), torch.bfloat16)
    b.output(b.all_gather(ordered).wait)
    gm = b.module()
    assert [i and i.role for i in classify(gm).values()] == [PARAM_UNSHARD]
