"""The structural fallback: exactly torch's verdict, and what the extended rules add."""

from __future__ import annotations

import gc
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import fx
from torch.fx.experimental.proxy_tensor import make_fx

from collective_identity import (
    GRAD_REDUCE_SHARD,
    GRAD_REPLICATE_REDUCE,
    PARAM_UNSHARD,
    Source,
    classify,
    classify_report,
    launch_of,
    stamp,
    start_nodes,
)
from collective_identity.compat import collector_paused, torch_version
from tests.graphs import Builder, Collective, aten, counting_edges, identity

C = torch.ops._c10d_functional
Group = Callable[[list[int]], str]


def _roles(gm: fx.GraphModule, rules: Any = "extended") -> list[str | None]:
    found = classify(gm, rules=rules)
    assert list(found) == start_nodes(gm)
    assert all(i is None or i.source is Source.INFERRED for i in found.values() if not (i and i.explicit))
    return [None if i is None else i.role for i in found.values()]


# --- compatible: the installed torch, exactly (and tests/random_graphs.py) ---------------------------------


def test_forms_torch_does_not_recognise_are_not_fsdp_in_compatible() -> None:
    b = Builder()
    w = b.placeholder("w")
    start = b.graph.call_function(C.all_gather_into_tensor_coalesced.default, ([w], 2, "g"))
    b.output(start)
    gm = b.module()
    assert _roles(gm, "compatible") == [None]
    assert _roles(gm) == [PARAM_UNSHARD]


# --- extended: gathers -----------------------------------------------------------------------------------


def _ag(x: torch.Tensor, group: str) -> torch.Tensor:
    return C.wait_tensor(C.all_gather_into_tensor(x, 2, group))


def _rs(x: torch.Tensor, group: str, op: str = "avg") -> torch.Tensor:
    return C.wait_tensor(C.reduce_scatter_tensor(x, op, 2, group))


def _ar(x: torch.Tensor, group: str, op: str = "sum") -> torch.Tensor:
    return C.wait_tensor(C.all_reduce(x, op, group))


def _trace(f: Callable[..., Any], *args: Any, mode: str = "fake") -> fx.GraphModule:
    return make_fx(f, tracing_mode=mode)(*args)


@pytest.fixture
def dp(new_group: Group) -> str:
    return new_group([0, 2])


@pytest.fixture
def tp(new_group: Group) -> str:
    return new_group([0, 1])


def _quantise(w: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    return (w * scale).clamp(-448, 448).to(torch.float8_e4m3fn)


def test_a_scaled_parameter_and_its_scale(dp: str) -> None:
    """A 0-dim scale is no second source, and its own gather is the parameter's too."""

    def f(w: torch.Tensor, inv_scale: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        g = _ag(_quantise(w, inv_scale).view(torch.uint8), dp).view(torch.float8_e4m3fn).to(torch.float32)
        s = _ag(inv_scale.reshape(1).expand(1).contiguous(), dp)
        return x @ (g / s[0])

    gm = _trace(f, torch.randn(4, 8), torch.randn(()), torch.randn(3, 8))
    assert _roles(gm) == [PARAM_UNSHARD, PARAM_UNSHARD]


@pytest.mark.parametrize("shape", [(2, 2), (4, 1), (1, 8), (4,)])
def test_a_block_scaled_parameter(dp: str, shape: tuple[int, ...]) -> None:
    def f(w: torch.Tensor, scale: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        wide = scale.unsqueeze(1) if len(shape) == 1 else scale
        for dim, size in enumerate(wide.shape):
            wide = wide.repeat_interleave(w.shape[dim] // size, dim=dim)
        g = _ag(_quantise(w, wide).view(torch.uint8), dp).view(torch.float8_e4m3fn).to(torch.float32)
        return x @ (g / _ag(wide, dp))

    gm = _trace(f, torch.randn(4, 8), torch.randn(shape), torch.randn(3, 8))
    assert _roles(gm, "compatible")[0] is None
    assert _roles(gm) == [PARAM_UNSHARD, PARAM_UNSHARD]


def test_an_activation_and_the_weight_of_its_norm_are_no_scaled_pair(tp: str) -> None:
    def normed(x: torch.Tensor, gamma: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        x = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * gamma
        return _ag(x, tp) @ w

    def quantised(x: torch.Tensor, gamma: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        x = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * gamma
        return _ag(x.to(torch.float8_e4m3fn).view(torch.uint8), tp).float() @ w

    def plain(x: torch.Tensor, gamma: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return _ag(x * gamma, tp) @ w

    for f in (normed, quantised, plain):
        gm = _trace(f, torch.randn(4, 8), torch.randn(1, 8), torch.randn(8, 8))
        assert _roles(gm) == [None], f.__name__


def test_a_scale_that_is_used_elsewhere_is_none(dp: str) -> None:
    def f(w: torch.Tensor, scale: torch.Tensor, x: torch.Tensor) -> Any:
        return x @ _ag(_quantise(w, scale).view(torch.uint8), dp).float(), (x * scale.sum()).relu()

    gm = _trace(f, torch.randn(4, 8), torch.randn(4, 1), torch.randn(3, 8))
    assert _roles(gm) == [None]


def test_parameters_that_live_in_the_module() -> None:
    """They are no placeholders, and still the source."""
    b = Builder()
    x = b.placeholder("x", (3, 8))
    outs = []
    for name in ("w0", "w1"):
        gathered = b.all_gather(b.cast(b.parameter(name), torch.bfloat16))
        outs.append(b.call(aten.mm.default, b.cast(x, torch.bfloat16), b.call(aten.t.default, gathered.wait)))
    b.output(*outs)
    gm = b.module()
    assert _roles(gm) == [PARAM_UNSHARD, PARAM_UNSHARD]
    assert _roles(gm, "compatible") == [None, None]


def test_a_parameter_of_the_module_padded_by_a_constant_of_the_module() -> None:
    b = Builder()
    w = b.parameter("w", (3, 8))
    b.root.register_buffer("zeros", torch.zeros(1, 8))
    zeros = b.graph.get_attr("zeros")
    zeros.meta["val"] = b.empty((1, 8))
    b.output(b.all_gather(b.cat([w, zeros])).wait)
    assert _roles(b.module()) == [PARAM_UNSHARD]


def test_two_parameters_of_the_module_are_two_sources() -> None:
    b = Builder()
    b.output(b.all_gather(b.cat([b.parameter("w0"), b.parameter("w1")])).wait)
    assert _roles(b.module()) == [None]


def test_a_size_symbol_is_no_second_source(dp: str) -> None:
    def f(w: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return x @ _ag(w.view(w.shape[0], w.shape[1] * 1), dp)

    gm = _trace(f, torch.randn(4, 8), torch.randn(3, 8), mode="symbolic")
    assert _roles(gm) == [PARAM_UNSHARD]
    b = Builder()
    size = b.graph.placeholder("s0")
    size.meta["val"] = 4
    w = b.placeholder("w")
    view = b.graph.call_function(aten.view.default, (w, [size, 8]))
    view.meta["val"] = w.meta["val"]
    b.output(b.all_gather(view).wait)
    gm = b.module()
    assert _roles(gm) == [PARAM_UNSHARD]
    assert _roles(gm, "compatible") == [None]


def test_a_group_node_is_no_second_source(dp: str) -> None:
    b = Builder()
    group = b.graph.placeholder("group")
    group.meta["val"] = torch.distributed.distributed_c10d._resolve_process_group(dp)
    b.output(b.all_gather(b.placeholder("w"), group=group).wait)
    gm = b.module()
    assert _roles(gm) == [PARAM_UNSHARD]
    if torch_version() >= (2, 12):  # before, torch looked at the first argument alone
        assert _roles(gm, "compatible") == [None]


def test_an_output_buffer_is_no_second_source() -> None:
    b = Builder()
    w, out = b.placeholder("w"), b.placeholder("out", (8, 8))
    start = b.graph.call_function(C.all_gather_into_tensor_out.default, (w, 2, "dp"), {"out": out})
    b.output(b.graph.call_function(C.wait_tensor.default, (start,)))
    gm = b.module()
    assert _roles(gm) == [PARAM_UNSHARD]
    if torch_version() >= (2, 12):
        assert _roles(gm, "compatible") == [None]


def test_two_inputs_are_two_sources(tp: str) -> None:
    gm = _trace(lambda x, w: _ag(x @ w, tp), torch.randn(4, 8), torch.randn(8, 8))
    assert _roles(gm) == _roles(gm, "compatible") == [None]


# --- extended: reductions --------------------------------------------------------------------------------


def test_accumulated_and_eaten_by_an_optimizer(dp: str, tp: str) -> None:
    """The first two are structure; the third, a twin of a gradient, needs its explicit role."""

    def f(g0: Any, acc: Any, g1: Any, p: Any, lr: Any, act: Any) -> Any:
        return acc + _rs(g0, dp), p - lr * _rs(g1, dp), _rs(act @ act.T, tp, "sum")

    gm = _trace(
        f,
        torch.randn(4, 8),
        torch.randn(2, 8),
        torch.randn(4, 8),
        torch.randn(2, 8),
        torch.tensor(0.1),
        torch.randn(4, 8),
    )
    assert _roles(gm)[:2] == [GRAD_REDUCE_SHARD] * 2
    twin = start_nodes(gm)[2]
    stamp(twin, identity("tp.output_reduce_scatter"))
    assert _roles(gm) == [GRAD_REDUCE_SHARD, GRAD_REDUCE_SHARD, "tp.output_reduce_scatter"]


def test_tied_gradients_clipping_and_adam(dp: str) -> None:
    def f(g0: Any, g1: Any, g2: Any, p: Any, m: Any, v: Any) -> Any:
        tied, other = _rs(g0, dp) + _rs(g1, dp), _rs(g2, dp)
        norm = _ar(tied.pow(2).sum() + other.pow(2).sum(), dp).sqrt()
        scale = torch.clamp(1.0 / (norm + 1e-6), max=1.0)
        tied, other = tied * scale, other * scale
        m = m * 0.9 + tied * 0.1
        v = v * 0.99 + tied * tied * 0.01
        return p - 1e-3 * m / (v.sqrt() + 1e-8), m, v, other, norm

    shard, full = torch.randn(2, 8), torch.randn(4, 8)
    gm = _trace(f, full, full, full, shard, shard, shard)
    roles = _roles(gm)
    assert roles[:3] == [GRAD_REDUCE_SHARD] * 3
    if torch_version() >= (2, 13):
        assert _roles(gm, "compatible")[:3] == [None] * 3


def test_a_whole_step_gathers_what_it_updates(dp: str) -> None:
    def f(p: Any, x: Any) -> Any:
        w = _ag(p, dp)
        y = x @ w
        grad = _rs(x.T @ y, dp)
        p = p - 0.1 * grad
        return (x @ _ag(p, dp)).sum(), p

    gm = _trace(f, torch.randn(4, 8), torch.randn(3, 8))
    assert _roles(gm)[:2] == [PARAM_UNSHARD, GRAD_REDUCE_SHARD]


def test_a_partial_activation_is_no_gradient(tp: str) -> None:
    """Row-parallel output under sequence parallelism: residual, bias or norm follow."""

    def residual(x: Any, w0: Any, w1: Any) -> Any:
        y = x + _rs((x @ w0).relu().repeat(2, 1) @ w1, tp, "sum")
        return y

    def bias(x: Any, w0: Any, b: Any) -> Any:
        return _rs(x @ w0, tp, "sum") + b

    def norm(x: Any, w0: Any, b: Any) -> Any:
        y = _rs(x @ w0, tp, "sum")
        return y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True))

    def next_layer(x: Any, w0: Any, w1: Any) -> Any:
        return _rs(x @ w0, tp, "sum") @ w1

    square = torch.randn(8, 8)
    for f, third in ((residual, square), (bias, torch.randn(8)), (norm, square), (next_layer, square)):
        gm = _trace(f, torch.randn(4, 8), square, third)
        assert _roles(gm) == [None], f.__name__


def test_a_scatter_without_use_or_wait() -> None:
    b = Builder()
    unwaited = b.graph.call_function(C.reduce_scatter_tensor.default, (b.placeholder("g"), "avg", 2, "dp"))
    b.output(unwaited)
    assert _roles(b.module()) == [None]


def test_groups(dp: str, tp: str) -> None:
    def f(g: Any, loss: Any, other: Any) -> Any:
        return _rs(g, dp), _ar(loss, dp), _ar(other, tp)

    gm = _trace(f, torch.randn(4, 8), torch.randn(()), torch.randn(4))
    assert _roles(gm) == [GRAD_REDUCE_SHARD, GRAD_REPLICATE_REDUCE, None], "a backward without re-gather"
    assert _roles(gm, "compatible")[1:] == [None, None], "torch looks at gathers only"


# --- explicit roles and the fallback ---------------------------------------------------------------------


def test_explicit_roles_name_and_clear_groups(dp: str, tp: str) -> None:
    def f(a: Any, b: Any, x: Any, y: Any) -> Any:
        return _ag(a, dp), _ag(b, tp), _ar(x, dp), _ar(y, tp)

    gm = _trace(f, torch.randn(4, 8), torch.randn(4, 8), torch.randn(4), torch.randn(4))
    starts = start_nodes(gm)
    assert _roles(gm) == [PARAM_UNSHARD, PARAM_UNSHARD, GRAD_REPLICATE_REDUCE, GRAD_REPLICATE_REDUCE]
    stamp(starts[1], identity("tp.activation_gather"))
    assert _roles(gm) == [PARAM_UNSHARD, "tp.activation_gather", GRAD_REPLICATE_REDUCE, None]
    stamp(starts[3], identity(GRAD_REPLICATE_REDUCE, group=tp))
    stamp(starts[0], identity("user.weights"))
    assert _roles(gm) == ["user.weights", "tp.activation_gather", None, GRAD_REPLICATE_REDUCE]


@pytest.mark.parametrize("shape", ["chain", "fan", "join"])
@pytest.mark.parametrize("rules", ["compatible", "extended"])
def test_the_cost_is_linear(shape: str, rules: Any) -> None:
    def edges(size: int) -> int:
        b = Builder()
        w, x = b.placeholder("w"), b.placeholder("x")
        outs: list[Collective] = []
        for _ in range(size):
            if shape == "chain":
                w = b.view(w, [4, 8])
                outs.append(b.all_gather(w))
                scattered = b.reduce_scatter(outs[-1].wait)
                w = b.call(aten.add.Tensor, b.view(scattered.wait, [4, 8]), x)
            elif shape == "fan":
                outs.append(b.all_gather(b.view(w, [4, 8])))
                outs.append(b.reduce_scatter(w))
            else:
                w = b.call(aten.add.Tensor, w, x)
                outs.append(b.all_gather(w))
        b.output(*[o.wait for o in outs])
        gm = b.module()
        with counting_edges() as count:
            classify_report(gm, rules=rules)
        return count()

    assert edges(200) <= 4.5 * edges(50)


def test_only_the_cones_that_matter_are_viewed() -> None:
    from collective_identity.view import build_view

    b = Builder()
    gathered = b.all_gather(b.cast(b.placeholder("w"), torch.bfloat16))
    far = b.placeholder("far")
    for _ in range(20):
        far = b.call(aten.relu.default, far)
    b.output(gathered.wait, far)
    gm = b.module()
    launch = launch_of(gathered.start)
    assert launch is not None
    view = build_view({gathered.start: launch}, "extended")
    assert {view.nodes[i].name for i in view.cone} == {"w", "convert_element_type_default", gathered.start.name}
    assert start_nodes(gm) == [gathered.start]


@pytest.mark.parametrize("rules", ["extended", "compatible"])
def test_a_graph_that_is_not_sorted_yet(rules: Any) -> None:
    """Amid a pass a node may stand before its inputs; the answer does not depend on where."""
    b = Builder()
    w, x, y = (b.placeholder(name) for name in ("w", "x", "y"))
    one = b.all_gather(b.cast(w, torch.bfloat16))
    two = b.all_gather(b.call(aten.add.Tensor, x, y))
    grad = b.reduce_scatter(b.placeholder("g"))
    b.output(one.wait, two.wait, b.cast(grad.wait, torch.bfloat16))
    gm = b.module()
    sorted_roles = {node.name: role for node, role in zip(start_nodes(gm), _roles(gm, rules), strict=True)}
    first = next(iter(gm.graph.nodes))
    for node in (one.start, two.start, grad.wait):
        first.prepend(node)
    assert {node.name: role for node, role in zip(start_nodes(gm), _roles(gm, rules), strict=True)} == sorted_roles
    assert set(sorted_roles.values()) == {PARAM_UNSHARD, None, GRAD_REDUCE_SHARD}


@pytest.mark.parametrize("was_on", [True, False])
def test_the_collector_is_left_as_it_was(was_on: bool) -> None:
    b = Builder()
    b.output(b.all_gather(b.placeholder("w")).wait)
    gm = b.module()
    assert gc.isenabled()
    try:
        (gc.enable if was_on else gc.disable)()
        classify(gm)
        with pytest.raises(AttributeError):
            classify(None)  # type: ignore[arg-type]
        assert gc.isenabled() == was_on
    finally:
        gc.enable()


def test_what_a_long_pause_made_is_old_and_nothing_is_thawed() -> None:
    """Else the first collection after it walks all of that in vain."""
    assert gc.isenabled() and gc.get_freeze_count() == 0
    made = []
    with collector_paused(long=True):
        assert not gc.isenabled()
        made.append([object()])
    assert gc.isenabled() and gc.get_freeze_count() == 0
    assert any(one is made[0] for one in gc.get_objects(generation=2))
    gc.freeze()
    try:
        with collector_paused(long=True):
            pass
        assert gc.get_freeze_count() > 0, "the program froze these"
    finally:
        gc.unfreeze()


@pytest.mark.parametrize("rules", ["extended", "compatible"])
def test_a_group_node_without_a_name(rules: Any) -> None:
    """A gather and an all-reduce given the same node as their group are on one group, whatever its name."""
    b = Builder()
    b.root.group, b.root.other = object(), object()
    group, other = b.graph.get_attr("group"), b.graph.get_attr("other")
    gathered = b.all_gather(b.placeholder("w"), group=group)
    same, apart = (b.all_reduce(gathered.wait, group=node) for node in (group, other))
    b.output(same.wait, apart.wait)
    known = rules == "extended" or torch_version() >= (2, 13)
    assert _roles(b.module(), rules) == [PARAM_UNSHARD, GRAD_REPLICATE_REDUCE if known else None, None]


def test_operator_packets_are_unknown_to_torch() -> None:
    """Dynamo's graphs hold packets; torch's heuristics see none of them, as start, wait or all-reduce."""
    b = Builder()
    gathered = b.all_gather(b.placeholder("w"))
    reduced, scattered = b.all_reduce(gathered.wait), b.reduce_scatter(b.placeholder("g"))
    waited = b.reduce_scatter(b.placeholder("h"))
    b.output(reduced.wait, scattered.wait, waited.wait)
    gm = b.module()
    every = _roles(gm, "extended")
    assert every == [PARAM_UNSHARD, GRAD_REPLICATE_REDUCE, GRAD_REDUCE_SHARD, GRAD_REDUCE_SHARD]
    for node in (gathered.start, reduced.start, scattered.start, waited.wait):
        node.target = node.target.overloadpacket
    assert _roles(gm, "compatible") == [None] * 4
    assert _roles(gm, "extended") == every


def test_an_all_explicit_graph_imports_no_networkx() -> None:
    code = """
import sys
from tests.graphs import Builder
from collective_identity import classify_report, PARAM_UNSHARD
assert "networkx" not in sys.modules, "imported by torch itself"
b = Builder()
b.output(b.all_gather(b.placeholder("w"), role=PARAM_UNSHARD).wait)
report = classify_report(b.module())
assert not report.structure_built and "networkx" not in sys.modules
b = Builder()
b.output(b.all_gather(b.placeholder("w")).wait)
assert classify_report(b.module()).structure_built and "networkx" in sys.modules
"""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, cwd=_root(), check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]


def _root() -> str:
    from pathlib import Path

    return str(Path(__file__).resolve().parents[2])
