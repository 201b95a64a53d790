"""Tensor parallelism's collectives fuse with matrix products, FSDP's never; what the fused operator carries."""

from __future__ import annotations

import json
import operator
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed._symmetric_memory  # registers symm_mem
from torch import fx

from collective_identity import absence_of, identity_of, launch_of, members_of, start_nodes, store
from collective_identity.transports import is_wait
from inductor_passes.fusion import REASONS, FusionPlan, apply_fusions, plan_fusions
from tests.graphs import Builder, Collective, annotate, aten, identity
from tests.passes.simulated_world import random_inputs, run, same

UNSHARD, REDUCE = "fsdp.param_unshard", "fsdp.grad_reduce_shard"
GATHER, SCATTER = "tp.activation_gather", "tp.output_reduce_scatter"
GATHER_MATMUL = torch.ops.symm_mem.fused_all_gather_matmul.default
MATMUL_SCATTER = torch.ops.symm_mem.fused_matmul_reduce_scatter.default


def everywhere(group: str) -> bool:
    return True


def roles(gm: fx.GraphModule) -> Counter[str | None]:
    return Counter(None if (i := identity_of(n)) is None else i.role for n in start_nodes(gm))


def fused_nodes(gm: fx.GraphModule) -> list[fx.Node]:
    return [n for n in gm.graph.nodes if n.target in (GATHER_MATMUL, MATMUL_SCATTER)]


def fused(gm: fx.GraphModule, **options: Any) -> FusionPlan:
    """Fuse, and check that values stay, that every loss is on record and that roles are counted out."""
    inputs, again = random_inputs(gm), random_inputs(gm)
    expected = run(gm, inputs)
    starts, before = start_nodes(gm), roles(gm)
    names = [n.name for n in gm.graph.nodes]
    plan = plan_fusions(gm, **{"enabled": everywhere, **options})
    assert names == [n.name for n in gm.graph.nodes], "a plan changes nothing"
    decided = [f.match.start for f in plan.fusions] + [r.node for r in plan.refusals]
    assert sorted(decided) == starts, "each exactly once"
    assert all(r.reason.id in REASONS for r in plan.refusals)
    assert apply_fusions(gm, plan) == bool(plan.fusions)
    gm.graph.lint()
    assert same(expected, run(gm, again)) and same(inputs, again)
    recorded: Counter[str | None] = Counter()
    for node in fused_nodes(gm):
        record, absence = members_of(node), absence_of(node)
        assert record is not None and record.pass_name == "fusion" and len(record.members) == 1
        assert identity_of(node) is None and launch_of(node) is None and not store.has_payload(node)
        lost = record.members[0].identity
        recorded[None if lost is None else lost.role] += 1
        if lost is not None:
            assert absence is not None and absence.code is not None
            assert (absence.kind, absence.code.slug, absence.pass_name) == ("dropped", "opaque", "fusion")
    assert before == roles(gm) + recorded, "before = after + recorded"
    for node in gm.graph.nodes:
        assert "val" in node.meta or node.op == "output", node.format_node()
    return plan


def reasons(plan: FusionPlan) -> list[str]:
    return [r.reason.slug for r in plan.refusals]


def gathered(b: Builder, shape: tuple[int, ...], dim: int = 0, *, slices: bool = False, **fields: Any) -> fx.Node:
    """What functional collectives make of a gather along ``dim`` of a tensor-parallel activation."""
    sent = b.call(aten.add.Tensor, b.placeholder(f"x{len(b.graph.nodes)}", shape), 1.0)
    wait = b.all_gather(sent, group="tp", **{"role": GATHER, **fields}).wait
    if dim == 0:
        return wait
    if slices:
        pieces = [b.slice(wait, i * shape[0], (i + 1) * shape[0]) for i in range(2)]
    else:
        split = b.call(aten.split.Tensor, wait, shape[0])
        pieces = [b.graph.call_function(operator.getitem, (split, i)) for i in range(2)]
        for i, piece in enumerate(pieces):
            piece.meta["val"] = split.meta["val"][i]
    return b.cat(pieces, dim)


def linear(b: Builder, x: fx.Node, columns: int) -> fx.Node:
    """``x @ w`` as AOTAutograd writes it: flattened, multiplied, unflattened."""
    shape = list(x.meta["val"].shape)
    first = next(iter(b.graph.nodes))
    with b.graph.inserting_before(first):
        weight = b.placeholder(f"w{len(b.graph.nodes)}", (columns, shape[-1]))
    right = b.call(aten.permute.default, weight, [1, 0])
    if len(shape) == 2:
        return b.call(aten.mm.default, x, right)
    flat = b.view(x, [-1, shape[-1]])
    return b.view(b.call(aten.mm.default, flat, right), [*shape[:-1], columns])


def scattered(b: Builder, x: fx.Node, dim: int = 0, *, op: str = "sum", **fields: Any) -> Collective:
    if dim:
        split = b.call(aten.split.Tensor, x, x.meta["val"].shape[dim] // 2, dim)
        pieces = [b.graph.call_function(operator.getitem, (split, i)) for i in range(2)]
        for i, piece in enumerate(pieces):
            piece.meta["val"] = split.meta["val"][i]
        x = b.cat(pieces)
    return b.reduce_scatter(x, group="tp", op=op, **{"role": SCATTER, **fields})


def finish(b: Builder, *outputs: fx.Node) -> fx.GraphModule:
    b.output(*outputs)
    return b.module()


# ---- what fuses


@pytest.mark.parametrize(("shape", "dim"), [((4, 6), 0), ((2, 4, 6), 0), ((2, 4, 6), 1), ((2, 3, 4, 6), 2)])
@pytest.mark.parametrize("slices", [False, True])
def test_gather_and_matmul(shape: tuple[int, ...], dim: int, slices: bool) -> None:
    b = Builder()
    gm = finish(b, linear(b, gathered(b, shape, dim, slices=slices), 5))
    plan = fused(gm)
    assert len(plan.fusions) == 1 and plan.fusions[0].match.dim == dim
    (node,) = fused_nodes(gm)
    assert node.target is GATHER_MATMUL and node.kwargs == {"return_A": False}
    assert start_nodes(gm) == [] and not any(map(is_wait, gm.graph.nodes))


def test_several_products_share_one_gather_and_the_gathered_tensor_may_be_kept() -> None:
    b = Builder()
    x = gathered(b, (2, 4, 6), 1)
    gm = finish(b, *(linear(b, x, n) for n in (5, 3, 7)), b.call(aten.sin.default, x))
    fused(gm)
    (node,) = fused_nodes(gm)
    assert len(node.args[1]) == 3 and node.kwargs == {"return_A": True}  # type: ignore[arg-type]
    kept = gm.graph.output_node().args[0][-1]  # type: ignore[index]
    assert kept.args[0].meta["val"].is_contiguous()


@pytest.mark.parametrize(("shape", "dim"), [((4, 6), 0), ((2, 4, 6), 0), ((2, 4, 6), 1)])
def test_the_gathered_tensor_may_be_an_output_or_be_written_away(shape: tuple[int, ...], dim: int) -> None:
    """Users that yield nothing to anyone are users all the same."""
    for written in (False, True):
        b = Builder()
        x = gathered(b, shape, dim)
        product = linear(b, x, 5)
        if written:
            with b.graph.inserting_before(next(iter(b.graph.nodes))):
                buffer = b.placeholder("buffer", tuple(x.meta["val"].shape))
            b.call(aten.copy_.default, buffer, x)
            gm = finish(b, product)
        else:
            gm = finish(b, product, x)
        fused(gm)
        (node,) = fused_nodes(gm)
        assert node.kwargs == {"return_A": True} and gm.graph.output_node().args[0]


@pytest.mark.parametrize("view", [aten.permute.default, aten.view.default])
def test_a_gathered_tensor_multiplied_by_itself_is_left_alone(view: Any) -> None:
    b = Builder()
    x = gathered(b, (4, 8))
    right = b.call(view, x, [1, 0] if view is aten.permute.default else [8, 8])
    plan = fused(finish(b, b.call(aten.mm.default, x, right)))
    assert not plan.fusions and len(plan.refusals) == 1


@pytest.mark.parametrize(("shape", "dim"), [((4, 6), 0), ((4, 2, 6), 0), ((2, 4, 6), 1)])
@pytest.mark.parametrize("op", ["sum", "avg"])
def test_matmul_and_scatter(shape: tuple[int, ...], dim: int, op: str) -> None:
    b = Builder()
    made = scattered(b, linear(b, b.placeholder("x", shape), 5), dim, op=op)
    gm = finish(b, b.call(aten.mul.Tensor, made.wait, 2.0))
    plan = fused(gm)
    assert len(plan.fusions) == 1
    (node,) = fused_nodes(gm)
    assert node.target is MATMUL_SCATTER and node.args[2:] == (op, dim, "tp")
    assert start_nodes(gm) == []


def test_a_block_with_sequence_parallel_next_to_fsdp() -> None:
    b = Builder()
    weights = [b.placeholder(f"p{i}", (3, 6)) for i in range(2)]
    full = [b.all_gather(w, role=UNSHARD) for w in weights]
    x = gathered(b, (2, 4, 6), 1)
    flat = b.view(x, [-1, 6])
    up = b.call(aten.mm.default, flat, b.call(aten.permute.default, full[0].wait, [1, 0]))
    down = b.call(aten.mm.default, b.call(aten.relu.default, up), b.placeholder("w", (6, 4)))
    out = scattered(b, b.view(down, [2, 8, 4]), 1)
    product = b.call(aten.mm.default, b.placeholder("g", (6, 8)), b.placeholder("h", (8, 6)))
    grad = b.reduce_scatter(product, role=REDUCE)
    gm = finish(b, out.wait, grad.wait, full[1].wait)
    plan = fused(gm)
    assert [n.target for n in fused_nodes(gm)] == [GATHER_MATMUL, MATMUL_SCATTER]
    assert roles(gm) == {UNSHARD: 2, REDUCE: 1} and reasons(plan) == ["fsdp"] * 3


# ---- roles


@pytest.mark.parametrize(("role", "reason"), [
    (UNSHARD, "fsdp"), ("cp.kv_gather", "other_role"), ("user.anything", "other_role"), ("dtensor.x", "other_role"),
])
def test_other_roles_are_left_alone(role: str, reason: str) -> None:
    b = Builder()
    gm = finish(b, linear(b, gathered(b, (4, 6), role=role), 5))
    assert reasons(fused(gm)) == [reason] and roles(gm) == {role: 1}


def test_fsdps_gradient_and_parameter_stay_and_tensor_parallelism_fuses() -> None:
    b = Builder()
    gradient = b.call(aten.mm.default, b.placeholder("gy", (4, 6)), b.placeholder("x", (6, 8)))
    reduced = b.reduce_scatter(gradient, op="avg", role=REDUCE)
    parameter = b.all_gather(b.placeholder("w", (4, 8)), role=UNSHARD)
    left = b.call(aten.mm.default, parameter.wait, b.placeholder("a", (8, 5)))
    gm = finish(b, reduced.wait, left, linear(b, gathered(b, (8, 5)), 5))
    fused(gm)
    assert roles(gm) == {REDUCE: 1, UNSHARD: 1}
    (node,) = fused_nodes(gm)
    record = members_of(node)
    assert record is not None and record.members[0].identity == identity(GATHER)


@pytest.mark.parametrize("fsdp", [True, False])
def test_without_identity_structure_decides(fsdp: bool) -> None:
    b = Builder()
    w = b.placeholder("w", (4, 6))
    sent = w if fsdp else b.call(aten.add.Tensor, w, b.placeholder("other", (4, 6)))
    gm = finish(b, linear(b, b.all_gather(sent, group="tp").wait, 5))
    plan = fused(gm)
    assert reasons(plan) == (["fsdp"] if fsdp else [])
    assert len(fused_nodes(gm)) == (0 if fsdp else 1)


def test_an_inferred_tensor_parallel_role_is_no_permission() -> None:
    from collective_identity import Source

    b = Builder()
    gm = finish(b, linear(b, gathered(b, (4, 6)), 5))
    given = {n: identity(GATHER, source=Source.INFERRED) for n in start_nodes(gm)}
    plan = plan_fusions(gm, enabled=everywhere, identities=given)
    assert reasons(plan) == ["other_role"]


@pytest.mark.parametrize("lost", ["malformed", "dropped"])
def test_what_lost_its_role_is_left_alone(lost: str) -> None:
    from collective_identity import codes

    b = Builder()
    two = b.call(aten.add.Tensor, b.placeholder("x", (4, 6)), b.placeholder("y", (4, 6)))
    made = b.all_gather(two, group="tp")
    gm = finish(b, linear(b, made.wait, 5))
    if lost == "malformed":
        annotate(made.start, {"role": GATHER})
    else:
        store.drop(made.start, codes.DROPPED_MIXED, "somebody")
    assert reasons(fused(gm)) == ["lost_role"] and fused_nodes(gm) == []


# ---- what does not


def last_dimension(b: Builder) -> list[fx.Node]:
    return [linear(b, gathered(b, (4, 2, 3), 2), 5)]


def right_operand(b: Builder) -> list[fx.Node]:
    return [b.call(aten.mm.default, b.placeholder("a", (5, 8)), gathered(b, (4, 6)))]


def pointwise(b: Builder) -> list[fx.Node]:
    return [b.call(aten.sin.default, gathered(b, (4, 6)))]


def own_square(b: Builder) -> list[fx.Node]:
    x = gathered(b, (4, 8))
    return [b.call(aten.mm.default, x, x)]


def late_weight(b: Builder) -> list[fx.Node]:
    x = gathered(b, (4, 6))
    early = b.call(aten.sin.default, x)
    weight = b.call(aten.mul.Tensor, b.placeholder("w", (6, 5)), 2.0)
    return [early, b.call(aten.mm.default, x, weight)]


def pieces_out_of_order(b: Builder) -> list[fx.Node]:
    wait = gathered(b, (2, 4, 6))
    return [linear(b, b.cat([b.slice(wait, 2, 4), b.slice(wait, 0, 2)], 1), 5)]


def product_used_elsewhere(b: Builder) -> list[fx.Node]:
    product = linear(b, b.placeholder("x", (4, 6)), 5)
    return [scattered(b, product).wait, b.call(aten.sin.default, product)]


def other_reduction(b: Builder) -> list[fx.Node]:
    return [scattered(b, linear(b, b.placeholder("x", (4, 6)), 5), op="max").wait]


def no_product(b: Builder) -> list[fx.Node]:
    return [scattered(b, b.call(aten.sin.default, b.placeholder("x", (4, 6)))).wait]


def waited_twice(b: Builder) -> list[fx.Node]:
    x = gathered(b, (4, 6))
    return [linear(b, x, 5), b.wait(x.args[0])]  # type: ignore[arg-type]


def no_collective_of_the_kind(b: Builder) -> list[fx.Node]:
    product = linear(b, b.placeholder("x", (4, 6)), 5)
    return [b.all_reduce(product, group="tp", role="tp.output_reduce").wait]


def written_weight(b: Builder) -> list[fx.Node]:
    x, weight = gathered(b, (4, 6)), b.placeholder("w", (6, 5))
    early = b.call(aten.sin.default, x)
    b.call(aten.mul_.Tensor, weight, 2.0)
    return [early, b.call(aten.mm.default, x, weight)]


def written_activation(b: Builder) -> list[fx.Node]:
    x = gathered(b, (4, 6))
    b.call(aten.mul_.Tensor, x.args[0].args[0], 2.0)  # type: ignore[union-attr]
    return [linear(b, x, 5)]


def written_before_the_scatter(b: Builder) -> list[fx.Node]:
    left = b.placeholder("left", (4, 6))
    product = linear(b, left, 5)
    b.call(aten.mul_.Tensor, left, 2.0)
    return [scattered(b, product).wait]


@pytest.mark.parametrize(("make", "reason"), [
    (last_dimension, "no_matmul"), (right_operand, "no_matmul"), (pointwise, "no_matmul"), (own_square, "no_matmul"),
    (late_weight, "no_matmul"), (pieces_out_of_order, "no_matmul"), (product_used_elsewhere, "other_users"),
    (other_reduction, "reduce_op"), (no_product, "no_matmul"), (waited_twice, "other_users"),
    (no_collective_of_the_kind, "other_transport"), (written_weight, "mutated"), (written_activation, "mutated"),
    (written_before_the_scatter, "mutated"),
], ids=lambda x: getattr(x, "__name__", x))
def test_other_graphs_are_left_alone(make: Callable[[Builder], list[fx.Node]], reason: str) -> None:
    b = Builder()
    gm = finish(b, *make(b))
    assert reasons(fused(gm)) == [reason] and fused_nodes(gm) == []


def test_a_group_without_symmetric_memory() -> None:
    from inductor_passes import fuse_tensor_parallel

    b = Builder()
    gm = finish(b, linear(b, gathered(b, (4, 6)), 5))
    assert reasons(fuse_tensor_parallel(gm)) == ["not_enabled"], "no GPU, no group: torch says no"
    assert reasons(fuse_tensor_parallel(gm, enabled=lambda group: group == "dp")) == ["not_enabled"]
    assert reasons(fuse_tensor_parallel(gm, enabled=lambda group: group == "tp")) == []


def test_groups_and_sizes_that_are_not_known() -> None:
    b = Builder()
    gm = finish(b, *(linear(b, gathered(b, (4, 6)), 5) for _ in range(2)))
    first, second = start_nodes(gm)
    with gm.graph.inserting_before(first):
        group = gm.graph.placeholder("group")
    group.meta["val"] = object()
    first.args = (first.args[0], 2, group)
    second.meta.pop("val")
    assert reasons(plan_fusions(gm, enabled=everywhere)) == ["group_unknown", "no_meta"]


# ---- plans as values


def test_a_plan_can_be_read_and_stored_and_fits_one_graph_once() -> None:
    def build() -> fx.GraphModule:
        b = Builder()
        return finish(b, linear(b, gathered(b, (4, 6)), 5), linear(b, gathered(b, (4, 6), role=UNSHARD), 5))

    gm = build()
    plan = plan_fusions(gm, enabled=everywhere)
    assert plan.describe().splitlines() == [
        "fusion plan: 1 collectives fused, 1 left alone",
        f"  all_gather_into_tensor_default ({GATHER}, dimension 0) with mm_default",
        "  left alone: 1 x FU002 fsdp, it is FSDP's, by its identity or by the shape of the graph",
    ]
    stored = json.loads(json.dumps(plan.to_dict()))
    assert stored["fusions"] == [
        {"node": "all_gather_into_tensor_default", "role": GATHER, "dim": 0, "products": ["mm_default"]}
    ]
    with pytest.raises(ValueError, match="not in it; plan again"):
        apply_fusions(build(), plan)
    assert apply_fusions(gm, plan)
    with pytest.raises(ValueError, match="not in it; plan again"):
        apply_fusions(gm, plan)


def test_the_table_of_reasons_is_complete_and_in_order() -> None:
    from collective_identity.codes import CODES, Code
    from inductor_passes.bucketing import REASONS as BUCKETING
    from inductor_passes.dedup import REASONS as DEDUP
    from inductor_passes.fusion import reasons as table

    defined = [v for v in vars(table).values() if isinstance(v, Code)]
    assert list(REASONS.values()) == defined
    assert list(REASONS) == [f"FU{i + 1:03d}" for i in range(len(defined))]
    assert not set(REASONS) & (set(CODES) | set(BUCKETING) | set(DEDUP))
