"""Members of one unit that others are needed between do not wait for each other when collectives overlap compute."""

from __future__ import annotations

import pytest
import torch
from torch import fx

from collective_identity import GRAD_REDUCE_SHARD, PARAM_UNSHARD
from collective_identity.store import identity_of
from inductor_passes.bucketing import apply_plan, plan_buckets, reasons
from inductor_passes.bucketing.plan import MIB
from inductor_passes.overlap import apply_overlap, plan_overlap
from inductor_passes.uses import multiplies
from tests.graphs import Builder

aten = torch.ops.aten
LARGE, TINY = 2048, 16  # rows of 1024 float32: 8 MiB and 64 KiB
SHARES = ("embed", "a.1", "a.2", "b.1", "b.2", "norm", "head")


def unit_of(name: str) -> str:
    return name.partition(".")[0] if "." in name else ""


def rows(name: str) -> int:
    return TINY if name == "norm" else LARGE


def forward(order: tuple[str, ...] = SHARES) -> fx.GraphModule:
    """Gathers at the top, as capture has them, and each used in this order."""
    b = Builder()
    x = b.placeholder("x", (8, 1024))
    made = {
        name: b.all_gather(
            b.parameter(name.replace(".", "_"), (rows(name) // 2, 1024)), role=PARAM_UNSHARD, params=(name,),
            param_group=unit_of(name),
        )
        for name in SHARES
    }  # fmt: skip
    for name in order:
        x = b.call(aten.add.Tensor, x, b.call(aten.sum.default, made[name].wait))
    b.output(x)
    return b.module()


def backward() -> fx.GraphModule:
    """Gradients from the head down; the root's are reduced at the end, as autograd has them."""
    b = Builder()
    x = b.placeholder("x", (LARGE, 1024))
    gradients, made = {}, []
    for name in reversed(SHARES):
        x = b.call(aten.sin.default, x)
        gradients[name] = b.call(aten.mul.Tensor, x, x) if rows(name) == LARGE else b.slice(x, 0, TINY)
        if unit_of(name):
            made.append(name)
    made += [name for name in reversed(SHARES) if not unit_of(name)]
    scattered = [
        b.reduce_scatter(gradients[name], role=GRAD_REDUCE_SHARD, params=(name,), param_group=unit_of(name))
        for name in made
    ]
    b.output(*(one.wait for one in scattered))
    return b.module()


def buckets(gm: fx.GraphModule, *, apart: bool) -> list[tuple[str, ...]]:
    plan = plan_buckets(gm, apart=apart)
    return [tuple(p for m in bucket.members for p in identity_of(m).params) for bucket in plan.buckets]


def test_the_root_is_gathered_in_two() -> None:
    assert buckets(forward(), apart=False) == [("embed", "norm", "head"), ("a.1", "a.2"), ("b.1", "b.2")]
    assert buckets(forward(), apart=True) == [("a.1", "a.2"), ("b.1", "b.2"), ("norm", "head")]


def test_the_root_is_reduced_in_two() -> None:
    assert ("head", "norm", "embed") in buckets(backward(), apart=False)
    assert buckets(backward(), apart=True) == [("b.2", "b.1"), ("a.2", "a.1"), ("head", "norm")]


def test_why_one_is_left_alone() -> None:
    plan = plan_buckets(forward(), apart=True)
    (refusal,) = plan.refusals
    assert refusal.reason is reasons.APART and identity_of(refusal.node).params == ("embed",)
    assert refusal.detail.startswith("other units are needed between it and ")


@pytest.mark.parametrize(
    ("order", "found"),
    [
        (("embed", "head", "norm", "a.1", "a.2", "b.1", "b.2"), [("embed", "norm", "head")]),
        (("a.1", "embed", "a.2", "b.1", "norm", "b.2", "head"), [("norm", "embed")]),
        (("norm", "a.1", "a.2", "embed", "b.1", "b.2", "head"), [("embed", "norm")]),
        (("embed", "a.1", "a.2", "norm", "b.1", "b.2", "head"), [("embed", "norm")]),
    ],
)
def test_a_small_part_joins_what_comes_before_it(order: tuple[str, ...], found: list[tuple[str, ...]]) -> None:
    root = [bucket for bucket in buckets(forward(order), apart=True) if not unit_of(bucket[0])]
    assert [set(bucket) for bucket in root] == [set(bucket) for bucket in found]


def test_a_units_own_members_stay_together_whatever_is_between() -> None:
    """Two units that take turns would be cut to pieces by their large members: then each piece is its own."""
    found = buckets(forward(("embed", "a.1", "b.1", "a.2", "b.2", "norm", "head")), apart=True)
    assert found == [("norm", "head")]


def test_an_early_gradient_is_reduced_early() -> None:
    gm = backward()
    assert apply_plan(gm, plan_buckets(gm, apart=True)) and apply_overlap(gm, plan_overlap(gm, ahead=1))
    gm.graph.lint()
    at = {node: i for i, node in enumerate(gm.graph.nodes)}
    starts = {identity_of(n).params: at[n] for n in gm.graph.nodes if identity_of(n) is not None}
    ordered = sorted(starts, key=lambda params: starts[params])
    assert ordered == [("head", "norm"), ("b.1", "b.2"), ("a.1", "a.2"), ("embed",)]
    sines = sorted(at[n] for n in gm.graph.nodes if n.target is aten.sin.default)
    assert starts[("head", "norm")] < sines[2], "before the next unit's gradients are computed"


BLOCK = ("up", "down", "norm", "out", "query")
"""In the order of their gradients; of a forward the other way round."""


def multiplied(b: Builder, x: fx.Node) -> fx.Node:
    return b.call(aten.mm.default, x, x)


def block(backward: bool, *, units: int, products: bool = True, pads: bool = False) -> fx.GraphModule:
    """Blocks whose feed-forward is twice its attention, and a product between the uses of two members.

    Where it ``pads``, the shards of this rank are a row short.
    """
    b = Builder()
    x = b.placeholder("x", (1024, 1024))
    sizes = {"up": 2 * LARGE, "down": 2 * LARGE, "norm": 2, "out": LARGE, "query": LARGE}
    order = [f"{unit}.{name}" for unit in range(units) for name in (BLOCK if backward else reversed(BLOCK))]
    made, kept = {}, []
    if not backward:
        for name in order:
            shard = b.parameter(name.replace(".", "_"), (sizes[name.split(".")[1]] // 2 - pads, 1024))
            shard = b.pad(shard, [0, 0, 0, 1]) if pads else shard
            made[name] = b.all_gather(shard, role=PARAM_UNSHARD, params=(name,), param_group=unit_of(name))
    for name in order:
        if products:
            x = multiplied(b, x)
        if backward:
            row = b.slice(x, 0, 1)
            gradient = b.call(aten.expand.default, row, [sizes[name.split(".")[1]], 1024])
            made[name] = b.reduce_scatter(
                b.call(aten.clone.default, b.call(aten.mul.Tensor, gradient, gradient)), role=GRAD_REDUCE_SHARD,
                params=(name,), param_group=unit_of(name),
            )  # fmt: skip
            kept.append(made[name].wait)
        else:
            x = b.call(aten.add.Tensor, x, b.call(aten.sum.default, made[name].wait))
    b.output(x, *kept)
    return b.module()


def named(gm: fx.GraphModule) -> list[str]:
    return [" ".join(p.replace(".", "") for p in bucket) for bucket in buckets(gm, apart=True)]


@pytest.mark.parametrize("pads", [False, True])
def test_what_is_gathered_first_is_cut_where_it_is_multiplied_with(pads: bool) -> None:
    whole = "{0}query {0}out {0}norm {0}down {0}up"
    assert named(block(False, units=3, pads=pads)) == [
        "0query 0out 0norm", "0down 0up", "1query 1out 1norm", "1down 1up", whole.format(2),
    ]  # fmt: skip


def test_what_is_reduced_last_is_cut_and_norms_wait_for_the_end() -> None:
    whole = "{0}up {0}down {0}norm {0}out {0}query"
    assert named(block(True, units=3)) == [
        whole.format(0), "1up 1down", "1norm 1out 1query", "2up 2down", "2norm 2out 2query",
    ]  # fmt: skip


@pytest.mark.parametrize("backward", [False, True])
def test_nothing_is_cut_where_nothing_is_multiplied(backward: bool) -> None:
    assert len(named(block(backward, units=2, products=False))) == 2


def test_no_part_is_left_with_next_to_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = len(named(block(True, units=2)))
    monkeypatch.setattr("inductor_passes.bucketing.apart.SMALL", 17 * MIB)
    assert (whole, len(named(block(True, units=2)))) == (4, 2), "out and query are 16 MiB"


def test_what_comes_last_starts_while_the_rest_is_computed() -> None:
    gm = block(True, units=2)
    assert apply_plan(gm, plan_buckets(gm, apart=True)) and apply_overlap(gm, plan_overlap(gm, ahead=1))
    gm.graph.lint()
    nodes = list(gm.graph.nodes)
    starts = {p: i for i, n in enumerate(nodes) if identity_of(n) is not None for p in identity_of(n).params}
    products = [i for i, n in enumerate(nodes) if n.target is aten.mm.default]
    assert products[6] < starts["1.up"] == starts["1.down"] < products[7] and starts["1.query"] > products[9]


def test_without_units_nothing_is_apart() -> None:
    b = Builder()
    x = b.placeholder("x", (8, 1024))
    made = [b.all_gather(b.parameter(f"w{i}", (LARGE, 1024)), role=PARAM_UNSHARD) for i in range(3)]
    for one in made:
        x = b.call(aten.add.Tensor, x, b.call(aten.sum.default, one.wait))
    b.output(x)
    assert [len(bucket.members) for bucket in plan_buckets(b.module(), apart=True).buckets] == [3]


def test_what_one_rank_pads_is_bucketed_alike_on_all() -> None:
    """Only ranks with a short shard pad it; a write to the shard must keep the same members apart everywhere."""

    def bucketed(pads: bool) -> list[tuple[str, ...]]:
        b = Builder()
        x = b.placeholder("x", (8, 1024))
        made = []
        for number in range(4):
            shard = b.parameter(f"w{number}", (3 if pads else 4, 1024))
            if number == 2:
                b.call(aten.mul_.Tensor, shard, 2.0)
            sent = b.pad(shard, [0, 0, 0, 1]) if pads else shard
            made.append(b.all_gather(sent, role=PARAM_UNSHARD, params=(f"w{number}",), param_group="u"))
        for one in made:
            x = b.call(aten.add.Tensor, x, b.call(aten.sum.default, one.wait))
        b.output(x)
        return buckets(b.module(), apart=False)

    assert bucketed(False) == bucketed(True) == [("w0", "w1"), ("w2", "w3")]


def test_what_one_rank_pads_is_gathered_again_alike_on_all() -> None:
    """A write waits for the gather that sends the shard, and so for the first bucket, also where a pad is sent."""

    def bucketed(pads: bool) -> list[tuple[str, ...]]:
        b = Builder()
        x = b.placeholder("x", (8, 1024))
        shards = [b.parameter(f"w{number}", (3 if pads else 4, 1024)) for number in range(2)]
        for again in (False, True):
            for number in (1, 0) if again else (0, 1):
                sent = b.pad(shards[number], [0, 0, 0, 1]) if pads else shards[number]
                one = b.all_gather(sent, role=PARAM_UNSHARD, params=(f"w{number}",), param_group="u")
                x = b.call(aten.add.Tensor, x, b.call(aten.sum.default, one.wait))
            if not again:
                b.call(aten.mul_.Tensor, shards[0], 2.0)
        b.output(x)
        return buckets(b.module(), apart=False)

    assert bucketed(False) == bucketed(True) == [("w0", "w1")]


def test_an_outer_product_is_one_however_inductor_wrote_it() -> None:
    """With one row, on some ranks only, a weight's gradient is a multiplication and no ``mm``: ranks cut alike."""
    b = Builder()
    column, row, whole = b.placeholder("g", (6, 1)), b.placeholder("x", (1, 5)), b.placeholder("w", (6, 5))
    products = b.call(aten.mul.Tensor, column, row), b.call(aten.mm.default, column, row)
    scalings = b.call(aten.mul.Tensor, whole, column), b.call(aten.mul.Tensor, whole, whole)
    b.output(*products, *scalings)
    assert [multiplies(node) for node in (*products, *scalings)] == [True, True, False, False]
