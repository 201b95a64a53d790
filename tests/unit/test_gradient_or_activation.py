"""A reduced gradient or a partial activation? What only meets state, as in an optimizer, is a gradient."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from collective_identity import (
    GRAD_REDUCE_SHARD,
    GRAD_REPLICATE_REDUCE,
    PARAM_UNSHARD,
    BucketRecord,
    Member,
    Source,
    classify,
    stamp,
    start_nodes,
    store,
)
from tests.graphs import Builder, aten, identity

C = torch.ops._c10d_functional


@pytest.fixture
def rs(new_group: Callable[[list[int]], str]) -> Callable[[torch.Tensor], torch.Tensor]:
    group = new_group([0, 2])
    return lambda x: C.wait_tensor(C.reduce_scatter_tensor(x, "sum", 2, group))


def found(f: Callable[..., Any], *shapes: tuple[int, ...]) -> list[str | None]:
    gm = make_fx(f, tracing_mode="fake")(*(torch.randn(shape) for shape in shapes))
    return [one and one.role for one in classify(gm).values()]


F = torch.nn.functional
ACTIVATIONS: dict[str, Callable[..., Any]] = {
    "gelu": lambda rs, a, w, v, x: F.gelu(rs(a @ w) + x),
    "silu": lambda rs, a, w, v, x: F.silu(rs(a @ w) + x),
    "tanh": lambda rs, a, w, v, x: torch.tanh(x - rs(a @ w)),
    "gated": lambda rs, a, w, v, x: rs(a @ w) * torch.sigmoid(rs(a @ v)),
    "product": lambda rs, a, w, v, x: rs(a @ w) * rs(a @ v),
    "mse": lambda rs, a, w, v, x: ((rs(a @ w) - x) ** 2).mean(),
    "mse of each": lambda rs, a, w, v, x: (rs(a @ w) - x) ** 2,
    "l1": lambda rs, a, w, v, x: (rs(a @ w) - x).abs().sum(),
}


@pytest.mark.parametrize("kind", ACTIVATIONS)
def test_an_activation_is_none(kind: str, rs: Any) -> None:
    roles = found(lambda *given: ACTIVATIONS[kind](rs, *given), (4, 8), (8, 8), (8, 8), (2, 8))
    assert set(roles) == {None}


@pytest.mark.parametrize("foreach", [False, True])
def test_clipping_shared_with_a_local_gradient(foreach: bool, rs: Any) -> None:
    def f(g: Any, p: Any, x: Any, q: Any) -> Any:
        s, local = rs(g), x.T @ x
        norms = torch._foreach_norm([s, local]) if foreach else [torch.linalg.vector_norm(one) for one in (s, local)]
        k = (1.0 / (torch.linalg.vector_norm(torch.stack(list(norms))) + 1e-6)).clamp(max=1.0)
        if foreach:
            return tuple(torch._foreach_add([p, q], torch._foreach_mul([s, local], k), alpha=-0.1))
        return p - 0.1 * s * k, q - 0.1 * local * k

    assert found(f, (4, 8), (2, 8), (3, 8), (8, 8)) == [GRAD_REDUCE_SHARD]


def test_a_gradient_that_is_written_into_state(rs: Any) -> None:
    """As in place, and as AOTAutograd leaves it: through a copy of the buffer it was a part of."""

    def in_place(g: Any, m: Any, p: Any) -> Any:
        m.lerp_(rs(g), 0.1)
        p.addcdiv_(m, m * m)

    def functional(g: Any, m: Any, p: Any) -> Any:
        s = rs(g)
        clipped = torch.slice_scatter(s, s[:1] * 0.5, 0, 0, 1)
        m.copy_(m + clipped)

    def activation(a: Any, w: Any, p: Any) -> Any:
        p.copy_(rs(a) @ w[:8, :8])

    assert found(in_place, (4, 8), (2, 8), (2, 8)) == [GRAD_REDUCE_SHARD]
    assert found(functional, (4, 8), (2, 8), (2, 8)) == [GRAD_REDUCE_SHARD]
    assert found(activation, (4, 8), (8, 8), (2, 8)) == [None]


@pytest.mark.parametrize("p", [1.0, 2.0])
def test_the_norm_of_gradients_is_no_gradient(p: float, new_group: Callable[[list[int]], str]) -> None:
    group = new_group([0, 2])

    def f(g: Any, state: Any) -> Any:
        s = C.wait_tensor(C.reduce_scatter_tensor(g, "sum", 2, group))
        norms = torch.stack(list(torch._foreach_norm([s, s + state], p))) ** p
        total = C.wait_tensor(C.all_reduce(norms, "sum", group)).sum()
        return state - s / total, C.wait_tensor(C.all_reduce(s * 0.5, "sum", group))

    gm = make_fx(f, tracing_mode="fake")(torch.randn(4, 8), torch.randn(2, 8))
    scatter, norm, gradient = start_nodes(gm)
    assert [one and one.role for one in classify(gm).values()] == [
        GRAD_REDUCE_SHARD,
        GRAD_REPLICATE_REDUCE,
        GRAD_REPLICATE_REDUCE,
    ], "plain: as torch says of a group that it takes for FSDP's"
    stamp(scatter, identity(GRAD_REDUCE_SHARD, group=group))
    found = classify(gm)
    assert found[norm] is None and found[gradient] is not None and found[gradient].role == GRAD_REPLICATE_REDUCE


@pytest.mark.parametrize("op", ["sum", "avg", "max", "product"])
def test_only_sums_reduce_gradients(op: str) -> None:
    b = Builder()
    gathered = b.all_gather(b.placeholder("w"), role=PARAM_UNSHARD)
    reduced = b.all_reduce(b.placeholder("amax"), op=op)
    b.output(gathered.wait, reduced.wait)
    one = classify(b.module())[reduced.start]
    assert (one and one.role) == (GRAD_REPLICATE_REDUCE if op in ("sum", "avg") else None)


def test_a_merged_inferred_gather_marks_its_group() -> None:
    b = Builder()
    gathered = b.all_gather(b.cat([b.placeholder("w"), b.placeholder("v")]))
    reduced = b.all_reduce(b.call(aten.add.Tensor, b.placeholder("g"), b.placeholder("h")))
    b.output(gathered.wait, reduced.wait)
    gm = b.module()
    stamp(gathered.start, identity(PARAM_UNSHARD, source=Source.INFERRED))
    store.set_members(gathered.start, BucketRecord("p", (Member("a", None),)))
    assert [one and one.role for one in classify(gm).values()] == [PARAM_UNSHARD, GRAD_REPLICATE_REDUCE]


@pytest.mark.parametrize("explicit", [False, True])
def test_a_gather_in_a_sub_graph_marks_its_group_outside(explicit: bool) -> None:
    inner = Builder()
    gathered = inner.all_gather(inner.placeholder("w"))
    inner.output(gathered.wait)
    b = Builder()
    b.root.body = inner.module()
    call = torch.ops.higher_order.invoke_subgraph
    called = b.graph.call_function(call, (b.graph.get_attr("body"), "body", b.placeholder("w")))
    reduced = b.all_reduce(b.call(aten.add.Tensor, b.placeholder("g"), b.placeholder("h")))
    b.output(called, reduced.wait)
    gm = b.module()
    if explicit:
        stamp(gathered.start, identity(PARAM_UNSHARD))
    roles = {node: one and one.role for node, one in classify(gm).items()}
    assert roles == {reduced.start: GRAD_REPLICATE_REDUCE, gathered.start: PARAM_UNSHARD}
