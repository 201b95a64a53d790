"""Refusals: collectives that wait for each other, inputs that are written, nodes that cannot be merged at all."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from collective_identity.transports import Transport, default_overload
from inductor_passes.bucketing import plan_buckets
from tests.graphs import Builder, Collective, aten, identity
from tests.passes.test_bucketing_plan import REDUCE, REPLICATE, UNSHARD, finish, gathers, members, names, reasons

# ---- dependencies


def test_members_that_wait_for_each_other_stay_apart() -> None:
    b = Builder()
    w = b.placeholder("w")
    inner = b.all_gather(w, role=UNSHARD)
    outer = b.all_gather(b.call(aten.mul.Tensor, inner.wait, 2.0), role=UNSHARD)
    plan = plan_buckets(finish(b, outer))
    assert plan.buckets == ()
    assert reasons(plan) == dict.fromkeys(names(inner, outer), "depends")


def test_two_level_gathers_merge_level_by_level() -> None:
    b = Builder()
    inner = gathers(b, 3)
    outer = [b.all_gather(c.wait, role=UNSHARD) for c in inner]
    plan = plan_buckets(finish(b, *outer))
    assert members(plan) == [names(*inner), names(*outer)]
    assert [bucket.key.depth for bucket in plan.buckets] == [0, 1]


def test_two_buckets_never_wait_for_each_other() -> None:
    # x1 -> y1 and y2 -> x2: either pair could merge, both together would be a ring
    b = Builder()
    x1 = b.all_gather(b.placeholder("a", (4, 4)), role=UNSHARD)
    y1 = b.reduce_scatter(x1.wait, role=REDUCE)
    y2 = b.reduce_scatter(b.placeholder("b", (8, 4)), role=REDUCE)
    x2 = b.all_gather(y2.wait, role=UNSHARD)
    plan = plan_buckets(finish(b, y1, x2))
    assert len(plan.buckets) < 2
    assert "depends" in reasons(plan).values()


def test_gradients_of_a_unit_merge_although_only_some_need_regathered_parameters() -> None:
    # the last layer's weight gradient needs no parameter, the one before needs the last layer's
    b = Builder()
    last = b.all_gather(b.placeholder("last", (4, 8)), role=UNSHARD, param_group="head")
    norm = b.all_gather(b.placeholder("norm", (4, 8)), role=UNSHARD, param_group="head")
    grad = b.placeholder("grad", (8, 8))
    of_last = b.reduce_scatter(b.call(aten.mul.Tensor, grad, 2.0), role=REDUCE, param_group="head")
    of_norm = b.reduce_scatter(b.call(aten.mm.default, grad, last.wait), role=REDUCE, param_group="head")
    plan = plan_buckets(finish(b, of_last, of_norm, norm))
    assert members(plan) == [names(last, norm), names(of_last, of_norm)]


def test_hybrid_sharding_merges_scatter_and_replicate_reductions() -> None:
    b = Builder()
    scatters = [b.reduce_scatter(b.placeholder(f"g{i}"), role=REDUCE) for i in range(3)]
    reduces = [b.all_reduce(c.wait, group="replicate", role=REPLICATE) for c in scatters]
    plan = plan_buckets(finish(b, *reduces))
    assert members(plan) == [names(*scatters), names(*reduces)]


# ---- writes


@pytest.mark.parametrize("through_view", [False, True])
def test_an_input_written_in_between_keeps_members_apart(through_view: bool) -> None:
    b = Builder()
    w, x, y = b.placeholder("w"), b.placeholder("x"), b.placeholder("y")
    before = b.all_gather(w, role=UNSHARD)
    target = b.call(aten.view.default, x, [32]) if through_view else x
    b.call(aten.mul_.Tensor, target, 2.0)
    after, last = b.all_gather(x, role=UNSHARD), b.all_gather(y, role=UNSHARD)
    plan = plan_buckets(finish(b, before, after, last))
    assert members(plan) == [names(after, last)]
    assert reasons(plan) == {before.start.name: "mutated"}


def test_a_write_to_something_else_is_no_reason() -> None:
    b = Builder()
    w, x, other = b.placeholder("w"), b.placeholder("x"), b.placeholder("other")
    first = b.all_gather(w, role=UNSHARD)
    b.call(aten.mul_.Tensor, other, 2.0)
    second = b.all_gather(x, role=UNSHARD)
    assert members(plan_buckets(finish(b, first, second))) == [names(first, second)]


# ---- what is refused on its own account


def refused(change: Any) -> tuple[str, str]:
    b = Builder()
    c = b.all_gather(b.placeholder("w"), role=UNSHARD)
    company = gathers(b, 2)
    outputs = change(b, c) or [c.wait]
    b.output(*outputs, *(x.wait for x in company))
    gm = b.module()
    plan = plan_buckets(gm, identities={x.start: identity(UNSHARD) for x in (c, *company)})
    assert members(plan) == [names(*company)]
    assert [r.node for r in plan.refusals] == [c.start]
    return plan.refusals[0].reason.slug, plan.refusals[0].detail


def test_other_users_than_waits() -> None:
    assert refused(lambda b, c: [c.wait, c.start]) == ("other_users", "used by output")


def test_no_wait() -> None:
    def change(b: Builder, c: Collective) -> list[fx.Node]:
        b.graph.erase_node(c.wait)
        return [b.placeholder("x")]

    assert refused(change) == ("no_wait", "no users")


@pytest.mark.parametrize("which", ["input", "start"])
def test_no_meta(which: str) -> None:
    def change(b: Builder, c: Collective) -> None:
        (c.start.args[0] if which == "input" else c.start).meta.pop("val")  # type: ignore[union-attr]

    assert refused(change)[0] == "no_meta"


def test_sizes_that_depend_on_data_are_left_alone() -> None:
    def change(b: Builder, c: Collective) -> None:
        shapes = ShapeEnv()
        with FakeTensorMode(shape_env=shapes):
            symbolic = torch.empty(shapes.create_unbacked_symint(), 8)
        c.start.args[0].meta["val"] = symbolic  # type: ignore[union-attr]

    slug, detail = refused(change)
    assert slug == "symbolic_size" and detail.startswith("w has u")


def test_sizes_that_disagree() -> None:
    def change(b: Builder, c: Collective) -> None:
        c.start.meta["val"] = b.empty((12, 8))

    assert refused(change) == ("sizes_disagree", "sends [4, 8] on 2 ranks, yields [12, 8], expected [8, 8]")


def test_group_that_is_no_constant() -> None:
    def change(b: Builder, c: Collective) -> None:
        with b.graph.inserting_before(c.start):
            group = b.graph.placeholder("group")
        group.meta["val"] = object()
        c.start.args = (c.start.args[0], 2, group)

    assert refused(change)[0] == "group_unknown"


def test_other_forms_are_left_alone() -> None:
    def change(b: Builder, c: Collective) -> None:
        c.start.target = torch.ops._c10d_functional.all_gather_into_tensor_coalesced.default
        c.start.args = ([c.start.args[0]], 2, "dp")

    assert refused(change)[0] == "other_form"


def test_sparse_tensors_are_left_alone() -> None:
    def change(b: Builder, c: Collective) -> None:
        c.start.args[0].meta["val"] = torch.empty(4, 8).to_sparse()  # type: ignore[union-attr]

    assert refused(change)[0] == "layout"


def test_a_scatter_that_does_not_divide_is_left_alone() -> None:
    b = Builder()
    made = [b.reduce_scatter(b.placeholder(f"g{i}", (5, 2)), role=REDUCE) for i in range(2)]
    assert set(reasons(plan_buckets(finish(b, *made))).values()) == {"sizes_disagree"}


@pytest.mark.parametrize("node", [False, True])
def test_a_reduce_operation_that_is_no_name_is_left_alone(node: bool) -> None:
    """An object, ``ReduceOp.PREMUL_SUM(2.0)``, or an input of the graph: two of them may differ."""
    b = Builder()
    sums, scatters = [], []
    for i in range(4):
        made = b.all_reduce(b.placeholder(f"x{i}"), role=REPLICATE)
        scattered = b.reduce_scatter(b.placeholder(f"g{i}"), role=REDUCE)
        if i < 2:
            with b.graph.inserting_before(made.start):
                op = b.graph.placeholder(f"op{i}") if node else Unprintable()
            made.start.update_arg(1, op)
            scattered.start.update_arg(1, op)
        sums.append(made)
        scatters.append(scattered)
    plan = plan_buckets(finish(b, *sums, *scatters))
    assert members(plan) == [names(*sums[2:]), names(*scatters[2:])]
    assert reasons(plan) == dict.fromkeys(names(*sums[:2], *scatters[:2]), "reduce_op")


class Unprintable:
    """Stands for an object that is no constant of generated code."""

    def __repr__(self) -> str:
        return "None"


def test_unlabelled_all_to_all_is_not_requested() -> None:
    b = Builder()
    x = b.placeholder("x")
    start = b.graph.call_function(default_overload(Transport.ALL_TO_ALL), (x, [2, 2], [2, 2], "dp"))
    start.meta["val"] = b.empty((4, 8))
    b.output(b.wait(start))
    assert reasons(plan_buckets(b.module())) == {start.name: "not_requested"}
