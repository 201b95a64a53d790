"""The producer's side: what a scope writes, where it arrives, and what never does."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.fx.traceback as tb
from functorch.compile import make_boxed_func
from torch import fx
from torch._dynamo.backends.common import aot_autograd
from torch.fx.experimental.proxy_tensor import make_fx

from collective_identity import (
    GRAD_REDUCE_SHARD,
    GRAD_REPLICATE_REDUCE,
    PARAM_UNSHARD,
    absence_of,
    codes,
    collective_table,
    identity_of,
    normalize,
    role_scope,
    start_nodes,
    store,
)
from collective_identity.compat import torch_version
from tests.graphs import identity

C = torch.ops._c10d_functional
Graphs = dict[str, list[fx.GraphModule]]


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"role": "param_unshard"}, "such as 'user.metric_gather'"),
        ({"role": ""}, "non-empty str as role"),
        ({"role": None}, "non-empty str as role"),
        ({"role": "fsdp.gather"}, "fsdp.param_unshard"),
        ({"role": "Fsdp param.unshard"}, "found 'Fsdp param.unshard'"),
        ({"producer": ""}, "non-empty str as producer"),
        ({"producer": 3}, "non-empty str as producer"),
        ({"group": object()}, "group_name"),
        ({"param_group": 0}, "as param_group"),
        ({"params": "layers.0.w"}, "pass a list"),
        ({"params": ["a", None]}, "str names as params"),
    ],
)
def test_bad_input_is_refused_before_anything_is_traced(fields: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        role_scope(**({"role": PARAM_UNSHARD, "producer": "test"} | fields))


def test_a_role_without_a_producer_is_refused() -> None:
    with pytest.raises(TypeError, match="producer"):
        role_scope(PARAM_UNSHARD)  # type: ignore[call-arg]


def test_what_it_writes() -> None:
    with tb.preserve_node_meta():
        with role_scope(PARAM_UNSHARD, producer="p", group="7", param_group="layers.0", params=iter(["w", "b"])):
            inside = dict(tb.get_current_meta()["custom"])
        assert "custom" not in tb.get_current_meta()
    full = identity(PARAM_UNSHARD, producer="p", group="7", param_group="layers.0", params=("w", "b"))
    assert inside == {store.KEY: full.to_payload()}


def test_backward_can_be_said_by_hand() -> None:
    with tb.preserve_node_meta(), role_scope(GRAD_REDUCE_SHARD, producer="p", backward=True):
        assert set(tb.get_current_meta()["custom"]) == {store.KEY, store.BACKWARD_KEY}


def _gather(x: torch.Tensor, size: int, group: str) -> torch.Tensor:
    return C.wait_tensor(C.all_gather_into_tensor(x, size, group))


def _scatter(x: torch.Tensor, size: int, group: str) -> torch.Tensor:
    return C.wait_tensor(C.reduce_scatter_tensor(x, "avg", size, group))


def test_non_strict_tracing_and_normalisation(new_group: Callable[[list[int]], str]) -> None:
    dp, tp = new_group([0, 2]), new_group([0, 1])

    def f(w: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        with role_scope(PARAM_UNSHARD, producer="p", group=dp, params=["w"]):
            shard = torch.nn.functional.pad(w.to(torch.bfloat16), (0, 0, 0, 1))
            full = _gather(shard, 2, dp)[:6]
        with role_scope("tp.activation_gather", producer="p"):
            return _gather(x, 2, tp).bfloat16() @ full.T

    with tb.preserve_node_meta():
        gm = make_fx(f, tracing_mode="fake")(torch.randn(3, 8), torch.randn(3, 8))
    carriers = [n for n in gm.graph.nodes if store.has_payload(n)]
    assert len(carriers) > 4, "the whole region is stamped"
    assert normalize(gm)
    starts = start_nodes(gm)
    assert [n for n in gm.graph.nodes if store.has_payload(n)] == starts
    assert [identity_of(n) for n in starts] == [
        identity(PARAM_UNSHARD, producer="p", group=dp, params=("w",)),
        identity("tp.activation_gather", producer="p"),
    ]


def test_the_same_ranks_in_another_group_are_another_group(new_group: Callable[[list[int]], str]) -> None:
    dp, twin = new_group([0, 2]), new_group([0, 2])

    def f(w: torch.Tensor) -> torch.Tensor:
        with role_scope(PARAM_UNSHARD, producer="p", group=twin):
            return _gather(w, 2, dp)

    with tb.preserve_node_meta():
        gm = make_fx(f, tracing_mode="fake")(torch.randn(4, 8))
    absence = absence_of(start_nodes(gm)[0])
    assert absence is not None and absence.code is codes.GROUP_MISMATCH


# --- through AOTAutograd ---------------------------------------------------------------------------------


@pytest.fixture
def graphs() -> Iterator[tuple[Graphs, Any]]:
    """Captured forward and backward graphs, and the backend that captures them."""
    seen: Graphs = {"forward": [], "backward": []}

    def capture(which: str) -> Any:
        def compiler(gm: fx.GraphModule, _: Any) -> Any:
            seen[which].append(gm)
            return make_boxed_func(gm.forward)

        return compiler

    torch._dynamo.reset()
    yield seen, aot_autograd(fw_compiler=capture("forward"), bw_compiler=capture("backward"))
    torch._dynamo.reset()


def _starts(graphs: Graphs, which: str) -> list[fx.Node]:
    return [n for gm in graphs[which] for n in start_nodes(gm)]


def test_a_forward_scope_never_labels_the_backward_reduction(fake_world: int, graphs: tuple[Graphs, Any]) -> None:
    """AOTAutograd copies the forward annotation over the backward reduce-scatter."""
    import torch.distributed._functional_collectives as funcol

    seen, backend = graphs

    def f(w: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        with role_scope(PARAM_UNSHARD, producer="p"):
            full = funcol.wait_tensor(funcol.all_gather_tensor_autograd(w, 0, dist.group.WORLD))
        return (x @ full.T).sum()

    w, x = torch.randn(4, 8, requires_grad=True), torch.randn(3, 8)
    torch.compile(f, backend=backend, fullgraph=True)(w, x).backward()
    for which in seen:
        for gm in seen[which]:
            normalize(gm)
    assert [identity_of(n) for n in _starts(seen, "forward")] == [identity(PARAM_UNSHARD, producer="p")]
    (scatter,) = _starts(seen, "backward")
    assert identity_of(scatter) is None
    absence = absence_of(scatter)
    assert absence is not None and absence.kind in ("malformed", "never_had")
    if absence.kind == "malformed":
        assert absence.code in (codes.SEQ_NR_COPY, codes.ROLE_TRANSPORT)


class _Unshard(torch.autograd.Function):
    """One hop each way, each under its own scope."""

    @staticmethod
    def forward(ctx: Any, w: torch.Tensor, size: int, group: str, by_hand: bool) -> torch.Tensor:
        ctx.size, ctx.group, ctx.backward_flag = size, group, True if by_hand else None
        with role_scope(PARAM_UNSHARD, producer="p", params=["w"]):
            return _gather(w, size, group)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        with role_scope(GRAD_REDUCE_SHARD, producer="p", params=["w"], backward=ctx.backward_flag):
            shard = _scatter(grad, ctx.size, ctx.group)
        with role_scope(GRAD_REPLICATE_REDUCE, producer="p", params=["w"], backward=ctx.backward_flag):
            shard = C.wait_tensor(C.all_reduce(shard, "avg", ctx.group))
        return shard, None, None, None


UNSHARD = identity(PARAM_UNSHARD, producer="p", params=("w",))
REDUCTIONS = [identity(r, producer="p", params=("w",)) for r in (GRAD_REDUCE_SHARD, GRAD_REPLICATE_REDUCE)]


def test_one_scope_per_hop_under_dynamo(fake_world: int, graphs: tuple[Graphs, Any]) -> None:
    seen, backend = graphs
    group = dist.group.WORLD.group_name  # type: ignore[union-attr]
    w, x = torch.randn(4, 8, requires_grad=True), torch.randn(3, 8)

    def f(w: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return (x @ _Unshard.apply(w, fake_world, group, True).T).sum()

    torch.compile(f, backend=backend, fullgraph=True)(w, x).backward()
    assert [identity_of(n) for n in _starts(seen, "forward")] == [UNSHARD]
    assert [identity_of(n) for n in _starts(seen, "backward")] == REDUCTIONS


def test_one_scope_per_hop_traced_without_dynamo(fake_world: int, graphs: tuple[Graphs, Any]) -> None:
    from functorch.compile import aot_function

    seen: Graphs = {"forward": [], "backward": []}
    group = dist.group.WORLD.group_name  # type: ignore[union-attr]

    def capture(which: str) -> Any:
        return lambda gm, _: seen[which].append(gm) or make_boxed_func(gm.forward)

    w, x = torch.randn(4, 8, requires_grad=True), torch.randn(3, 8)
    f = lambda w, x: (x @ _Unshard.apply(w, fake_world, group, False).T).sum()  # noqa: E731
    aot_function(f, fw_compiler=capture("forward"), bw_compiler=capture("backward"))(w, x).backward()
    assert [identity_of(n) for n in _starts(seen, "forward")] == [UNSHARD]
    found = [identity_of(n) for n in _starts(seen, "backward")]
    if torch_version() >= (2, 13):
        assert found == REDUCTIONS, "the backward key survives the copy"
    else:
        # 2.11 and 2.12 replace the whole dict: the payload is lost, and the copy is not mistaken for it.
        assert found == [None, None]
        assert {a.code for n in _starts(seen, "backward") if (a := absence_of(n))} == {codes.SEQ_NR_COPY}


def test_a_whole_step_traced_at_once(fake_world: int) -> None:
    group = dist.group.WORLD.group_name  # type: ignore[union-attr]

    def step(w: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        w = w.detach().requires_grad_()
        (x @ _Unshard.apply(w, fake_world, group, False).T).sum().backward()
        assert w.grad is not None
        return w - 0.1 * w.grad

    with tb.preserve_node_meta():
        gm = make_fx(step, tracing_mode="fake")(torch.randn(4, 8), torch.randn(3, 8))
    assert [identity_of(n) for n in start_nodes(gm)] == [UNSHARD, *REDUCTIONS]


def test_what_never_entered_the_graph_is_not_called_unclassified(fake_world: int, graphs: tuple[Graphs, Any]) -> None:
    """FSDP2's hooks run eagerly around compiled blocks; there is no node to have lost a role."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    seen, backend = graphs

    class Block(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = torch.nn.Linear(8, 8), torch.nn.Linear(8, 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + self.b(self.a(x).relu())

    block = fully_shard(Block(), mesh=init_device_mesh("cpu", (fake_world,)))
    torch.compile(block, backend=backend)(torch.randn(4, 8)).sum().backward()
    captured = [gm for which in seen.values() for gm in which]
    rows = [row for gm in captured for row in collective_table(gm)]
    if torch_version() >= (2, 12):
        assert captured and rows == [], "a row without a role would say 'never had one'"
    else:
        assert all(row.role is None and row.absence == "never_had" for row in rows)
