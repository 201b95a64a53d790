"""Members of one unit that others are needed between do not wait for each other when collectives overlap compute."""

from __future__ import annotations

import pytest
import torch
from torch import fx

from collective_identity import GRAD_REDUCE_SHARD, PARAM_UNSHARD
from collective_identity.store import identity_of
from inductor_passes.bucketing import apply_plan, plan_buckets, reasons
from inductor_passes.overlap import apply_overlap, plan_overlap
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
