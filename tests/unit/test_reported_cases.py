"""Small graphs from public bug reports on torch's own classification, and variants of each, with the right value."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import fx
from torch.fx.experimental.proxy_tensor import make_fx

from collective_identity import (
    GRAD_REDUCE_SHARD,
    GRAD_REPLICATE_REDUCE,
    PARAM_UNSHARD,
    Transport,
    absence_of,
    classify,
    clear,
    codes,
    digest,
    identity_of,
    launch_of,
    roles,
    stamp,
    start_nodes,
)
from collective_identity.losses import record_losses, snapshot
from inductor_passes.bucketing import bucket_collectives
from tests.graphs import identity

C = torch.ops._c10d_functional
TP_GATHER, TP_SCATTER = "tp.activation_gather", "tp.output_reduce_scatter"


@pytest.fixture(scope="module")
def groups(fake_world: int) -> Iterator[dict[str, str]]:
    yield {name: torch.distributed.new_group(ranks).group_name for name, ranks in (("DP", [0, 2]), ("TP", [0, 1]))}


def ag(x: torch.Tensor, group: str) -> torch.Tensor:
    return C.wait_tensor(C.all_gather_into_tensor(x, 2, group))


def rs(x: torch.Tensor, group: str, op: str = "avg") -> torch.Tensor:
    return C.wait_tensor(C.reduce_scatter_tensor(x, op, 2, group))


def ar(x: torch.Tensor, group: str) -> torch.Tensor:
    return C.wait_tensor(C.all_reduce(x, "sum", group))


def trace(f: Callable[..., Any], *args: Any) -> fx.GraphModule:
    return make_fx(f, tracing_mode="fake")(*args)


def r(*shape: int) -> torch.Tensor:
    return torch.randn(shape)


def stamped(gm: fx.GraphModule, *said: str | None) -> fx.GraphModule:
    for node, role in zip(start_nodes(gm), said, strict=True):
        if role is not None:
            stamp(node, identity(role))
    return gm


def found(gm: fx.GraphModule) -> list[str | None]:
    return [None if one is None else one.role for one in classify(gm).values()]


def fsdp(gm: fx.GraphModule) -> list[bool]:
    return [roles.is_fsdp(role) for role in found(gm)]


# --- gathers that look alike -----------------------------------------------------------------------------


def test_activation_gathers_of_one_input(groups: dict[str, str]) -> None:
    dp, tp = groups["DP"], groups["TP"]

    def f(w: Any, x: Any, y: Any, on_dp: Any, on_tp: Any) -> Any:
        z = ag(y.relu() * 2, tp)
        full = ag(w, dp)
        return ag(x, tp) @ full + z @ full, ar(on_dp, dp), ar(on_tp, tp)

    gm = stamped(trace(f, r(4, 8), r(3, 8), r(3, 8), r(4), r(4)), TP_GATHER, PARAM_UNSHARD, TP_GATHER, None, None)
    assert found(gm) == [TP_GATHER, PARAM_UNSHARD, TP_GATHER, GRAD_REPLICATE_REDUCE, None]
    assert fsdp(gm) == [False, True, False, True, False], "and FSDP's only group is DP"


@pytest.mark.parametrize("role", [TP_GATHER, "cp.key_value_gather", "user.metric_gather", "pp.stage_weights"])
def test_whatever_another_producer_calls_it(groups: dict[str, str], role: str) -> None:
    gm = trace(lambda x, loss: (ag(x.t().contiguous(), groups["TP"]), ar(loss, groups["TP"])), r(4, 8), r(4))
    assert fsdp(gm) == [True, True], "structure alone says what torch says"
    stamped(gm, role, None)
    assert found(gm) == [role, None]
    clear(start_nodes(gm)[0])
    assert fsdp(gm) == [True, True]


# --- one parameter, several inputs -----------------------------------------------------------------------


def quantised(w: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    return (w * scale).clamp(-448, 448).to(torch.float8_e4m3fn).view(torch.uint8)


@pytest.mark.parametrize("shape", [(), (1,), (1, 1), (4, 1), (2, 2)])
def test_a_scaled_shard_and_its_scale(groups: dict[str, str], shape: tuple[int, ...]) -> None:
    def f(w: Any, scale: Any, x: Any) -> Any:
        wide = scale
        if scale.dim() == 2:
            for dim, size in enumerate(scale.shape):
                wide = wide.repeat_interleave(w.shape[dim] // size, dim=dim)
        full = ag(quantised(w, wide), groups["DP"]).view(torch.float8_e4m3fn).float()
        sent = wide if scale.dim() == 2 else scale.reshape(1).expand(1).contiguous()
        scales = ag(sent, groups["DP"])
        return x @ (full / (scales if scale.dim() == 2 else scales[0]))

    assert found(trace(f, r(4, 8), r(*shape), r(3, 8))) == [PARAM_UNSHARD, PARAM_UNSHARD]


def in_module(count: int, *, cast: bool, buffer: bool = False) -> Callable[[str], fx.GraphModule]:
    """Parameters that live in the module, each gathered and multiplied with."""

    def build(group: str) -> fx.GraphModule:
        class Held(torch.nn.Module):
            def __init__(self) -> None:
                super().__init__()
                for i in range(count):
                    value = torch.randn(4, 8)
                    if buffer:
                        self.register_buffer(f"w{i}", value)
                    else:
                        setattr(self, f"w{i}", torch.nn.Parameter(value))

        held, graph = Held(), fx.Graph()
        from torch._subclasses.fake_tensor import FakeTensorMode

        with FakeTensorMode() as mode:
            shard, full, product = torch.empty(4, 8), torch.empty(8, 8), torch.empty(3, 8)
            x = graph.placeholder("x")
            x.meta["val"] = torch.empty(3, 8)
        assert mode is not None
        out = []

        def call(value: Any, target: Any, *args: Any) -> fx.Node:
            node = graph.call_function(target, args)
            node.meta["val"] = value
            return node

        for i in range(count):
            node = graph.get_attr(f"w{i}")
            node.meta["val"] = shard
            if cast:
                node = call(shard, torch.ops.aten.clone.default, node)
            gathered = call(full, C.all_gather_into_tensor.default, node, 2, group)
            waited = call(full, C.wait_tensor.default, gathered)
            out.append(call(product, torch.ops.aten.mm.default, x, waited))
        graph.output(tuple(out))
        return fx.GraphModule(held, graph)

    return build


@pytest.mark.parametrize(
    "build", [in_module(2, cast=False), in_module(3, cast=True), in_module(2, cast=False, buffer=True)]
)
def test_shards_that_live_in_the_module(groups: dict[str, str], build: Callable[[str], fx.GraphModule]) -> None:
    gm = build(groups["DP"])
    assert set(found(gm)) == {PARAM_UNSHARD}
    bucket_collectives(gm, kinds=("all_gather",), cap_mb=100.0, order="graph")
    gathers = [n for n in start_nodes(gm) if (launch := launch_of(n)) and launch.transport is Transport.ALL_GATHER]
    assert len(gathers) == 1


# --- reduce-scatters, both ways --------------------------------------------------------------------------


def test_accumulated_updated_and_returned(groups: dict[str, str]) -> None:
    dp, tp = groups["DP"], groups["TP"]

    def f(g0: Any, acc: Any, g1: Any, p: Any, lr: Any, act: Any) -> Any:
        return acc + rs(g0, dp), p - lr * rs(g1, dp), rs(act @ act.T, tp, "sum")

    gm = trace(f, r(4, 8), r(2, 8), r(4, 8), r(2, 8), torch.tensor(0.1), r(4, 8))
    assert found(gm)[:2] == [GRAD_REDUCE_SHARD, GRAD_REDUCE_SHARD]
    stamped(gm, None, None, TP_SCATTER)
    assert found(gm) == [GRAD_REDUCE_SHARD, GRAD_REDUCE_SHARD, TP_SCATTER] and fsdp(gm) == [True, True, False]


def momentum(g: Any, p: Any, m: Any) -> Any:
    m = 0.9 * m + g
    return p - 0.1 * m, m


def decayed(g: Any, p: Any, m: Any) -> Any:
    return p * (1 - 0.1 * 0.01) - 0.1 * g, m


def adam(g: Any, p: Any, m: Any) -> Any:
    return p - 0.1 * m.lerp(g, 0.1) / ((g * g).sqrt() + 1e-8), m


def averaged(g: Any, p: Any, m: Any) -> Any:
    return p, (m * 3 + g.float()) / 4


def foreach(g: Any, p: Any, m: Any) -> Any:
    return tuple(torch._foreach_add([p, m], [g, g], alpha=-0.1))


@pytest.mark.parametrize("update", [momentum, decayed, adam, averaged, foreach], ids=lambda f: f.__name__)
def test_other_optimizers(groups: dict[str, str], update: Callable[..., Any]) -> None:
    gm = trace(lambda g, p, m: update(rs(g, groups["DP"]), p, m), r(4, 8), r(2, 8), r(2, 8))
    assert found(gm) == [GRAD_REDUCE_SHARD]


def normed(y: Any, x: Any, w: Any) -> Any:
    return torch.nn.functional.layer_norm(y, (8,), w[0])


def residual(y: Any, x: Any, w: Any) -> Any:
    return (x + y) @ w


@pytest.mark.parametrize("then", [normed, residual], ids=lambda f: f.__name__)
def test_partial_activations(groups: dict[str, str], then: Callable[..., Any]) -> None:
    def f(a: Any, w: Any, x: Any) -> Any:
        return then(rs(a @ w, groups["TP"], "sum"), x, w)

    assert found(trace(f, r(4, 8), r(8, 8), r(2, 8))) == [None]


# --- what ranks compare ----------------------------------------------------------------------------------


def test_what_differs_between_ranks_shows(fake_world: int) -> None:
    a, b = (torch.distributed.new_group(ranks).group_name for ranks in ([0, 1], [0, 2]))

    def made(first: str, second: str, op: str = "sum", *said: str | None) -> str:
        gm = trace(lambda x, y: (ag(x, first), ag(y, second), rs(x, first, op)), r(4, 8), r(4, 8))
        return digest(stamped(gm, *said) if said else gm)

    same = made(a, b)
    assert made(a, b) == same
    assert made(b, a) != same and made(a, b, "avg") != same
    first, second = made(a, b, "sum", PARAM_UNSHARD, None, None), made(a, b, "sum", None, PARAM_UNSHARD, None)
    assert len({same, first, second}) == 3


# --- copies and retraces ---------------------------------------------------------------------------------


def gathering(groups: dict[str, str]) -> fx.GraphModule:
    return stamped(trace(lambda w, x: x @ ag(w, groups["DP"]), r(4, 8), r(3, 8)), PARAM_UNSHARD)


def test_marking_a_copy_marks_the_copy_alone(groups: dict[str, str]) -> None:
    gm = gathering(groups)
    graph, env = fx.Graph(), {}
    for node in gm.graph.nodes:
        env[node] = graph.node_copy(node, lambda n: env[n])
    (original,) = start_nodes(gm)
    said = identity_of(original)
    assert said is not None
    stamp(env[original], said.inferred())
    assert identity_of(original) == said and identity_of(env[original]) == said.inferred()
    assert original.meta["custom"] is not env[original].meta["custom"]


def test_a_retrace_keeps_the_role_or_says_who_lost_it(groups: dict[str, str]) -> None:
    """What torch's plain retrace drops cannot be known again; it is named, and structure may guess."""
    gm = gathering(groups)
    before = snapshot(gm)
    with fx.traceback.preserve_node_meta():
        kept = trace(lambda *args: fx.Interpreter(gm).run(*args), r(4, 8), r(3, 8))
    assert found(kept) == [PARAM_UNSHARD] and record_losses(before, kept, pass_name="retrace") == ()
    lost = trace(gm, r(4, 8), r(3, 8))
    assert len(record_losses(before, lost, pass_name="retrace")) == 1
    absence = absence_of(start_nodes(lost)[0])
    assert absence is not None and (absence.code, absence.pass_name) == (codes.DROPPED_UNKNOWN, "retrace")
    assert found(lost) == [PARAM_UNSHARD]
    guess = classify(lost)[start_nodes(lost)[0]]
    assert guess is not None and not guess.explicit
