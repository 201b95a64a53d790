"""Symbolic sizes, several element types in one bucket, the order within a unit, and what fits under a cap."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import fx
from torch.fx.experimental.proxy_tensor import make_fx

from collective_identity import identity_of, start_nodes
from inductor_passes.bucketing import plan_buckets
from tests.graphs import Builder, aten
from tests.passes.simulated_world import WORLD, bucketed, run, same
from tests.passes.test_bucketing_cases import REDUCE, UNSHARD, ag, bucket, label, rs
from tests.passes.test_bucketing_plan import finish, gathers, members, names, reasons

C = torch.ops._c10d_functional
REPLICATE = "fsdp.grad_replicate_reduce"

# ---- symbolic sizes


def gather(x: torch.Tensor, group: str) -> torch.Tensor:
    return ag(x, 2, group)


def scatter(x: torch.Tensor, group: str) -> torch.Tensor:
    return rs(x, "sum", 2, group)


def reduce(x: torch.Tensor, group: str) -> torch.Tensor:
    return C.wait_tensor(C.all_reduce(x, "sum", group))


Trace = Callable[..., fx.GraphModule]


@pytest.fixture
def trace(new_group: Callable[[list[int]], str]) -> Trace:
    """Traces with symbolic sizes on a group of two ranks, which the pretended world calls dp."""

    def traced(f: Callable[..., Any], *given: torch.Tensor) -> fx.GraphModule:
        group = new_group([0, 1])
        gm = make_fx(lambda *xs: f(group, *xs), tracing_mode="symbolic")(*given)
        for node in start_nodes(gm):
            node.args = tuple("dp" if a == group else a for a in node.args)
        return gm

    return traced


def values(shapes: list[tuple[int, ...]], seed: int) -> list[list[torch.Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    return [[torch.randint(-64, 64, s, generator=generator) / 8 for s in shapes] for _ in range(WORLD)]


@pytest.mark.parametrize(("send", "role"), [(gather, UNSHARD), (reduce, REPLICATE)])
@pytest.mark.parametrize("traced", [[(4, 8), (6, 8), (5, 3)], [(4, 8), (4, 8)], [(7,), (3, 2, 5)]])
def test_hinted_sizes_merge_and_other_sizes_run(
    trace: Trace, send: Callable[..., torch.Tensor], role: str, traced: list[tuple[int, ...]]
) -> None:
    given = [torch.randn(s) for s in traced]
    gm = trace(lambda g, *xs: tuple(send(x, g) * 2 for x in xs), *given)
    label(gm, [role] * len(traced))
    again = [tuple(size + 3 for size in s) for s in traced]
    runs = [values(traced, 0), values(again, 1) if len(set(traced)) == len(traced) else values(traced, 1)]
    expected = [run(gm, inputs) for inputs in runs]
    plan = bucket(gm)
    assert [len(b.members) for b in plan.buckets] == [len(traced)] and len(start_nodes(gm)) == 1
    assert plan.buckets[0].nbytes == sum(
        4 * x.numel() * (2 if send is gather else 1) for x in given
    ), "a symbolic size counts as its hint"
    assert [same(a, run(gm, inputs)) for a, inputs in zip(expected, runs, strict=True)] == [True, True]
    for out, old in zip(gm.graph.output_node().args[0], traced, strict=True):  # type: ignore[arg-type]
        value = out.meta["val"]
        assert value.dim() == len(old) and value.is_contiguous()


def test_scatters_merge_where_the_size_surely_divides(trace: Trace) -> None:
    def f(g: str, a: torch.Tensor, b: torch.Tensor, c: torch.Tensor) -> Any:
        return scatter(torch.cat([a, a]), g), scatter(torch.cat([b, b]), g), scatter(c, g)

    gm = trace(f, torch.randn(3, 4), torch.randn(5, 2), torch.randn(6, 7))
    runs = [values([(3, 4), (5, 2), (6, 7)], 0), values([(4, 9), (7, 3), (8, 5)], 1)]
    expected = [run(gm, inputs) for inputs in runs]
    plan = bucket(label(gm, [REDUCE] * 3))
    assert [len(b.members) for b in plan.buckets] == [2]
    assert [r.reason.slug for r in plan.refusals] == ["sizes_disagree"], "6 rows today, an odd number tomorrow"
    assert [same(a, run(gm, inputs)) for a, inputs in zip(expected, runs, strict=True)] == [True, True]


def test_static_and_symbolic_sizes_share_a_bucket(trace: Trace) -> None:
    gm = trace(lambda g, a, w: (gather(a, g), gather(torch.cat([w[:2], w[:2]])[:, :2], g)),
               torch.randn(4, 8), torch.randn(6, 5))
    runs = [values([(4, 8), (6, 5)], 0), values([(2, 3), (9, 7)], 1)]
    expected = [run(gm, inputs) for inputs in runs]
    plan = bucket(label(gm, [UNSHARD] * 2))
    assert [len(b.members) for b in plan.buckets] == [2]
    assert [same(a, run(gm, inputs)) for a, inputs in zip(expected, runs, strict=True)] == [True, True]


def test_no_guard_is_added(trace: Trace) -> None:
    gm = trace(lambda g, *xs: tuple(gather(x, g) for x in xs), torch.randn(4, 8), torch.randn(6, 3))
    shapes = next(iter(gm.graph.nodes)).meta["val"].fake_mode.shape_env
    before = len(shapes.guards)
    bucket(label(gm, [UNSHARD] * 2))
    assert len(start_nodes(gm)) == 1 and len(shapes.guards) == before


# ---- several element types


TYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int64, torch.uint8, torch.bool, torch.int8]


@pytest.mark.parametrize("group", [("dp", 2), ("world", 4), ("self", 1)])
def test_gathers_go_as_bytes_where_it_is_asked_for(group: tuple[str, int]) -> None:
    b = Builder()
    shapes = [(3,), (1, 5), (2, 3), (1,), (3, 1, 2), (5,), (7,), (0, 3)]
    made = [b.all_gather(b.placeholder(f"w{i}", s, dtype=d), group=group[0], size=group[1], role=UNSHARD)
            for i, (s, d) in enumerate(zip(shapes, TYPES, strict=True))]
    gm = finish(b, *made)
    assert plan_buckets(gm).buckets == ()
    plan = bucketed(gm, mixed_dtypes=True)
    assert [len(x.members) for x in plan.buckets] == [len(TYPES)] and plan.buckets[0].key.dtype is torch.uint8
    (start,) = start_nodes(gm)
    assert start.meta["val"].dtype is torch.uint8 and identity_of(start) is not None
    outs = gm.graph.output_node().args[0]
    assert [n.meta["val"].dtype for n in outs] == TYPES  # type: ignore[union-attr]
    assert all(n.meta["val"].is_contiguous() for n in outs)  # type: ignore[union-attr]


@pytest.mark.parametrize("shape", [(0, 3), (4, 0), (0,)])
def test_nothing_goes_as_no_bytes(shape: tuple[int, ...]) -> None:
    b = Builder()
    made = [b.all_gather(b.placeholder(f"w{i}", shape, dtype=d), role=UNSHARD) for i, d in enumerate(TYPES)]
    assert len(bucketed(finish(b, *made), mixed_dtypes=True).buckets) == 1


def test_odd_bytes_before_a_wide_type_stay_aligned() -> None:
    b = Builder()
    made = [b.all_gather(b.placeholder("a", (1,), dtype=torch.uint8), group="self", size=1, role=UNSHARD),
            b.all_gather(b.placeholder("b", (3, 2), dtype=torch.float64), group="self", size=1, role=UNSHARD)]
    gm = finish(b, *made)
    assert len(bucketed(gm, mixed_dtypes=True).buckets) == 1


def test_inputs_with_gaps_go_as_bytes_too() -> None:
    b = Builder()
    turned = b.call(aten.permute.default, b.placeholder("a", (3, 4)), [1, 0])
    strided = b.call(aten.slice.Tensor, b.placeholder("b", (8,), dtype=torch.bfloat16), 0, 0, 8, 2)
    gm = finish(b, *(b.all_gather(x, role=UNSHARD) for x in (turned, strided)))
    assert len(bucketed(gm, mixed_dtypes=True).buckets) == 1


def test_one_type_is_sent_as_itself_and_devices_do_not_mix() -> None:
    b = Builder()
    gm = finish(b, *gathers(b, 2))
    assert bucketed(gm, mixed_dtypes=True).buckets[0].key.dtype is torch.float32
    b = Builder()
    made = [b.all_gather(b.placeholder("a"), role=UNSHARD),
            b.all_gather(b.placeholder("b", dtype=torch.bfloat16, device="cuda:0"), role=UNSHARD)]
    plan = plan_buckets(finish(b, *made), mixed_dtypes=True)
    assert plan.buckets == () and reasons(plan) == dict.fromkeys(names(*made), "incompatible")


def test_reductions_and_complex_numbers_do_not_mix() -> None:
    b = Builder()
    two = [torch.float32, torch.bfloat16]
    made = [b.reduce_scatter(b.placeholder(f"g{d.itemsize}", dtype=d), role=REDUCE) for d in two]
    made += [b.all_reduce(b.placeholder(f"r{d.itemsize}", dtype=d), role=REPLICATE) for d in two]
    made += [b.all_gather(b.placeholder(f"w{i}", dtype=d), role=UNSHARD)
             for i, d in enumerate([torch.float32, torch.complex64])]
    plan = plan_buckets(finish(b, *made), mixed_dtypes=True)
    assert plan.buckets == () and set(reasons(plan).values()) == {"incompatible"}


# ---- order within a unit


def named(b: Builder, fqns: list[str]) -> dict[str, str]:
    made = {
        n: b.all_gather(b.placeholder(n.replace(".", "_")), role=UNSHARD, param_group="m", params=(n,)) for n in fqns
    }
    finish(b, *made.values())
    return {c.start.name: n for n, c in made.items()}


def test_numbers_in_names_count_as_numbers() -> None:
    b = Builder()
    start_of = named(b, ["m.10.w", "m.9.w", "m.2.b", "m.2", "m.norm", "m.2.b2", "m.2.b10"])
    (found,) = members(plan_buckets(b.module(), order="fqn"))
    assert [start_of[n] for n in found] == ["m.2", "m.2.b", "m.2.b2", "m.2.b10", "m.9.w", "m.10.w", "m.norm"]


def test_a_given_order_is_followed_and_names_it_lacks_come_last() -> None:
    b = Builder()
    registered = ["m.wq", "m.wk", "m.wo", "m.norm"]
    start_of = named(b, ["m.norm", "m.wk", "m.other", "m.wo", "m.wq"])
    gm = b.module()
    (found,) = members(plan_buckets(gm, order="fqn", fqns=registered))
    assert [start_of[n] for n in found] == [*registered, "m.other"]
    (unused,) = members(plan_buckets(gm, fqns=registered))
    assert [start_of[n] for n in unused] == ["m.norm", "m.wk", "m.other", "m.wo", "m.wq"], "only order='fqn' sorts"


# ---- what fits under a cap


def sized(b: Builder, units: list[int]) -> fx.GraphModule:
    """Gathers of so many times 256 KiB."""
    return finish(b, *(b.all_gather(b.placeholder(f"w{i}", (u, 32768)), role=UNSHARD) for i, u in enumerate(units)))


@pytest.mark.parametrize(("units", "cap", "expected"), [
    ([3, 8, 3], 8, [[0, 2]]), ([5, 8, 4, 3], 8, [[2, 3]]), ([9, 3, 9, 3], 8, [[1, 3]]), ([5, 5, 5], 8, []),
    ([2, 2, 8, 2, 2], 8, [[0, 1], [3, 4]]), ([7, 6, 2, 1], 8, [[0, 3], [1, 2]]), ([6, 5, 7, 2, 2], 8, [[0, 4], [1, 3]]),
])
def test_a_member_that_does_not_fit_is_skipped_and_the_next_one_is_tried(
    units: list[int], cap: int, expected: list[list[int]]
) -> None:
    gm = sized(Builder(), units)
    starts = [n.name for n in start_nodes(gm)]
    plan = plan_buckets(gm, cap_mb=cap / 4)
    assert sorted(sorted(starts.index(m) for m in b) for b in members(plan)) == expected


def test_no_two_that_are_left_alone_fit_together() -> None:
    rng = random.Random(0)
    for _ in range(50):
        units = [rng.randint(1, 10) for _ in range(rng.randint(2, 25))]
        gm = sized(Builder(), units)
        starts = [n.name for n in start_nodes(gm)]
        plan = plan_buckets(gm, cap_mb=2)
        assert all(b.nbytes <= 2 * 2**20 for b in plan.buckets)
        alone = sorted(units[starts.index(r.node.name)] for r in plan.refusals)
        assert len(alone) < 2 or alone[0] + alone[1] > 8, (units, alone)
