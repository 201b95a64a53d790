"""Reduce-scatters of a sum become one, only where that is true; what the merged one carries; what it costs."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import fx

from collective_identity import absence_of, classify, identity_of, members_of, start_nodes, store
from collective_identity.transports import is_wait
from inductor_passes.dedup import REASONS, DedupPlan, apply_dedup, dedup_reduce_scatters, plan_dedup
from tests.graphs import Builder, Collective, aten, identity
from tests.passes.simulated_world import random_inputs, run, same
from tests.passes.test_bucketing_inputs import calls

REDUCE, TP = "fsdp.grad_reduce_shard", "tp.output_reduce_scatter"
Make = Callable[[Builder, list[Collective]], Any]


def scatters(b: Builder, count: int, shape: tuple[int, ...] = (4, 8), **fields: Any) -> list[Collective]:
    first = len(b.graph.nodes)
    dtype = fields.pop("dtype", torch.float32)
    given = {"role": REDUCE, "op": "sum", **fields}
    return [b.reduce_scatter(b.placeholder(f"g{first}_{i}", shape, dtype=dtype), **given) for i in range(count)]


def chain(b: Builder, nodes: list[fx.Node]) -> fx.Node:
    total = nodes[0]
    for node in nodes[1:]:
        total = b.call(aten.add.Tensor, total, node)
    return total


def deduped(gm: fx.GraphModule, **options: Any) -> DedupPlan:
    """Dedup and check that every pretended rank gets the same values, exactly: the inputs are eighths."""
    inputs, again = random_inputs(gm), random_inputs(gm)
    expected = run(gm, inputs)
    starts = [n for n in start_nodes(gm) if "reduce_scatter" in str(n.target)]
    before = [n.name for n in gm.graph.nodes]
    plan = plan_dedup(gm, **options)
    assert before == [n.name for n in gm.graph.nodes], "a plan changes nothing"
    decided = [m for merge in plan.merges for m in merge.members] + [r.node for r in plan.refusals]
    assert sorted(decided) == starts, "each exactly once"
    assert all(r.reason.id in REASONS for r in plan.refusals)
    assert apply_dedup(gm, plan) == bool(plan.merges)
    gm.graph.lint()
    assert same(expected, run(gm, again)) and same(inputs, again)
    return plan


def finish(b: Builder, *outputs: fx.Node) -> fx.GraphModule:
    b.output(*outputs)
    return b.module()


def reasons(plan: DedupPlan) -> list[str]:
    return [r.reason.slug for r in plan.refusals]


# ---- what merges


@pytest.mark.parametrize("op", ["sum", "avg"])
@pytest.mark.parametrize("group", [("dp", 2), ("world", 4), ("self", 1)])
def test_a_pair(op: str, group: tuple[str, int]) -> None:
    b = Builder()
    a, c = scatters(b, 2, op=op, group=group[0], size=group[1])
    gm = finish(b, chain(b, [a.wait, c.wait]))
    assert len(deduped(gm).merges) == 1
    assert [str(n.target).split(".")[-2] for n in gm.graph.nodes if n.op == "call_function"] == [
        "add", "reduce_scatter_tensor", "wait_tensor",
    ]


@pytest.mark.parametrize("shape", [(4,), (4, 1), (0, 3), (4, 0), (2, 3, 5)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.int64, torch.int32])
def test_shapes_and_element_types(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    b = Builder()
    made = scatters(b, 3, shape, dtype=dtype)
    gm = finish(b, chain(b, [c.wait for c in made]))
    assert len(deduped(gm).merges) == 1 and len(start_nodes(gm)) == 1
    (out,) = gm.graph.output_node().args[0]  # type: ignore[misc]
    assert out.meta["val"].dtype == dtype and out.meta["val"].shape == made[0].wait.meta["val"].shape


@pytest.mark.parametrize("how", ["expanded", "gaps", "transposed", "contiguous"])
def test_the_sum_says_how_it_lies_in_memory(how: str) -> None:
    """The operator's own strides, whatever those of the operands."""
    b = Builder()
    laid = {
        "expanded": lambda node: b.call(aten.expand.default, node, [4, 8]),
        "gaps": lambda node: b.call(aten.slice.Tensor, node, 1, 0, 16, 2),
        "transposed": lambda node: b.call(aten.t.default, node),
        "contiguous": lambda node: node,
    }[how]
    shape = {"expanded": (1, 8), "gaps": (4, 16), "transposed": (8, 4), "contiguous": (4, 8)}[how]
    sent = [laid(b.placeholder(f"g{i}", shape)) for i in range(2)]
    gm = finish(b, chain(b, [b.reduce_scatter(one, role=REDUCE, op="sum").wait for one in sent]))
    assert len(deduped(gm).merges) == 1
    (total,) = [n for n in gm.graph.nodes if n.target is aten.add.Tensor]
    with b.fake:
        expected = torch.add(*(one.meta["val"] for one in sent))
    assert total.meta["val"].stride() == expected.stride()


def test_a_whole_tree_becomes_one_in_one_step() -> None:
    b = Builder()
    waits = [c.wait for c in scatters(b, 8)]
    while len(waits) > 1:
        waits = [b.call(aten.add.Tensor, x, y) for x, y in zip(waits[::2], waits[1::2], strict=True)]
    gm = finish(b, waits[0])
    plan = deduped(gm)
    assert [len(m.members) for m in plan.merges] == [8]
    assert len(start_nodes(gm)) == 1 and sum(map(is_wait, gm.graph.nodes)) == 1


def test_other_addends_stay_and_every_group_gets_its_own() -> None:
    b = Builder()
    dp, world = scatters(b, 3), scatters(b, 2, group="other")
    extra = [b.placeholder(f"x{i}", (2, 8)) for i in range(2)]
    order = [dp[0].wait, extra[0], world[0].wait, dp[1].wait, extra[1], world[1].wait, dp[2].wait]
    gm = finish(b, chain(b, order))
    assert sorted(len(m.members) for m in deduped(gm).merges) == [2, 3]
    assert len(start_nodes(gm)) == 2
    assert sum(n.target is aten.add.Tensor for n in gm.graph.nodes) == 3 + 3, "3 of what is sent, 3 of what is left"


def test_sums_of_sums() -> None:
    b = Builder()
    inner = chain(b, [c.wait for c in scatters(b, 2, (8, 8))])
    above = b.reduce_scatter(inner, op="sum", role=REDUCE)
    gm = finish(b, chain(b, [above.wait, *(c.wait for c in scatters(b, 2))]), inner)
    assert [len(m.members) for m in deduped(gm).merges] == [2, 3] and len(start_nodes(gm)) == 2


def test_what_is_sent_is_added_as_it_comes_and_only_one_sum_is_alive() -> None:
    b = Builder()
    waits = []
    for i in range(4):
        made = b.call(aten.mul.Tensor, b.placeholder(f"g{i}"), 2.0)
        waits.append(b.reduce_scatter(made, op="sum", role=REDUCE).wait)
    gm = finish(b, chain(b, waits))
    deduped(gm)
    order = [str(n.target).split(".")[-2] for n in gm.graph.nodes if n.op == "call_function"]
    assert order == ["mul", "mul", "add", "mul", "add", "mul", "add", "reduce_scatter_tensor", "wait_tensor"]


# ---- what does not


def scaled(b: Builder, c: list[Collective]) -> fx.Node:
    return b.call(aten.add.Tensor, c[0].wait, c[1].wait, alpha=2)


def used_twice(b: Builder, c: list[Collective]) -> list[fx.Node]:
    return [chain(b, [c[0].wait, c[1].wait]), b.call(aten.sin.default, c[0].wait), b.call(aten.sin.default, c[1].wait)]


def added_to_itself(b: Builder, c: list[Collective]) -> list[fx.Node]:
    return [b.call(aten.add.Tensor, c[0].wait, c[0].wait), b.call(aten.add.Tensor, c[1].wait, c[1].wait)]


def in_place(b: Builder, c: list[Collective]) -> fx.Node:
    return b.call(aten.add_.Tensor, c[0].wait, c[1].wait)


def through_a_view(b: Builder, c: list[Collective]) -> fx.Node:
    return chain(b, [b.view(c[0].wait, [16]), b.view(c[1].wait, [16])])


def subtracted(b: Builder, c: list[Collective]) -> fx.Node:
    return b.call(aten.sub.Tensor, c[0].wait, c[1].wait)


def plus_a_number(b: Builder, c: list[Collective]) -> list[fx.Node]:
    return [b.call(aten.add.Tensor, x.wait, 2.0) for x in c]


def waited_twice(b: Builder, c: list[Collective]) -> fx.Node:
    return chain(b, [c[0].wait, c[1].wait, b.wait(c[0].start), b.wait(c[1].start)])


def output_as_well(b: Builder, c: list[Collective]) -> list[fx.Node]:
    return [chain(b, [c[0].wait, c[1].wait]), c[0].wait, c[1].wait]


@pytest.mark.parametrize(("make", "reason"), [
    (scaled, "scaled"), (used_twice, "other_users"), (added_to_itself, "other_users"), (in_place, "in_place"),
    (through_a_view, "not_added"), (subtracted, "not_added"), (plus_a_number, "unequal"),
    (waited_twice, "other_users"), (output_as_well, "other_users"),
], ids=lambda x: getattr(x, "__name__", x))
def test_other_uses_are_left_alone(make: Make, reason: str) -> None:
    b = Builder()
    made = make(b, scatters(b, 2))
    plan = deduped(finish(b, *(made if isinstance(made, list) else [made])))
    assert plan.merges == () and reasons(plan) == [reason, reason]


@pytest.mark.parametrize("alpha", [-1, 0, 0.5, 2.0])
def test_any_scale_but_one_is_left_alone_and_so_is_its_tree(alpha: float) -> None:
    b = Builder()
    c = scatters(b, 4)
    inner = [chain(b, [c[0].wait, c[1].wait]), chain(b, [c[2].wait, c[3].wait])]
    gm = finish(b, b.call(aten.add.Tensor, *inner, alpha=alpha))
    assert [len(m.members) for m in deduped(gm).merges] == [2, 2], "each operand is a sum of its own"


def test_a_scale_of_one_is_none() -> None:
    b = Builder()
    c = scatters(b, 2)
    assert len(deduped(finish(b, b.call(aten.add.Tensor, c[0].wait, c[1].wait, alpha=1))).merges) == 1


@pytest.mark.parametrize("shapes", [((4, 2, 1), (2, 1)), ((4, 1), (4, 8)), ((2, 8), (4, 8)), ((2,), (4, 4))])
def test_shards_that_broadcast_are_left_alone(shapes: tuple[tuple[int, ...], tuple[int, ...]]) -> None:
    b = Builder()
    made = [b.reduce_scatter(b.placeholder(f"g{i}", s), op="sum", role=REDUCE) for i, s in enumerate(shapes)]
    plan = deduped(finish(b, chain(b, [c.wait for c in made])))
    assert plan.merges == () and reasons(plan) == ["unequal", "unequal"]


@pytest.mark.parametrize("dtypes", [(torch.float32, torch.float64), (torch.bfloat16, torch.float32),
                                    (torch.int64, torch.float32)])
def test_element_types_that_promote_are_left_alone(dtypes: tuple[torch.dtype, torch.dtype]) -> None:
    b = Builder()
    made = [scatters(b, 1, dtype=d)[0] for d in dtypes]
    plan = deduped(finish(b, chain(b, [c.wait for c in made])))
    assert plan.merges == () and reasons(plan) == ["unequal", "unequal"]


def test_an_addend_that_promotes_further_up_ends_the_tree() -> None:
    b = Builder()
    total = chain(b, [c.wait for c in scatters(b, 2)])
    wide = b.call(aten.add.Tensor, total, b.placeholder("x", (2, 8), dtype=torch.float64))
    gm = finish(b, wide)
    assert len(deduped(gm).merges) == 1


@pytest.mark.parametrize("op", ["max", "min", "product", "premul_sum"])
def test_operations_that_are_not_linear(op: str) -> None:
    b = Builder()
    plan = plan_dedup(finish(b, chain(b, [c.wait for c in scatters(b, 2, op=op)])))
    assert plan.merges == () and reasons(plan) == ["not_linear", "not_linear"]


@pytest.mark.parametrize(("op", "dtype"), [("avg", torch.int64), ("sum", torch.bool), ("avg", torch.uint8)])
def test_element_types_in_which_the_operation_is_not_linear(op: str, dtype: torch.dtype) -> None:
    b = Builder()
    plan = plan_dedup(finish(b, chain(b, [c.wait for c in scatters(b, 2, op=op, dtype=dtype)])))
    assert reasons(plan) == ["not_linear", "not_linear"]


@pytest.mark.parametrize("other", [{"group": "other"}, {"op": "avg"}, {"group": "self", "size": 1}])
def test_what_differs_is_skipped_and_the_next_one_is_tried(other: dict[str, Any]) -> None:
    b = Builder()
    shape = (2, 8) if other.get("size") == 1 else (4, 8)
    first, odd, last = scatters(b, 1)[0], scatters(b, 1, shape, **other)[0], scatters(b, 1)[0]
    plan = deduped(finish(b, chain(b, [first.wait, odd.wait, last.wait])))
    assert [m.members for m in plan.merges] == [(first.start, last.start)]
    assert [(r.node, r.reason.slug) for r in plan.refusals] == [(odd.start, "incompatible")]


def test_forward_and_backward_do_not_mix() -> None:
    b = Builder()
    made = scatters(b, 2, role=None)
    made[0].start.meta["partitioner_tag"], made[1].start.meta["partitioner_tag"] = "is_forward", "is_backward"
    assert reasons(plan_dedup(finish(b, chain(b, [c.wait for c in made])))) == ["incompatible"] * 2


def test_one_scatter_and_something_else_is_left_alone() -> None:
    b = Builder()
    (c,) = scatters(b, 1)
    assert reasons(deduped(finish(b, chain(b, [c.wait, b.placeholder("x", (2, 8))])))) == ["alone"]


@pytest.mark.parametrize("written", ["sent", "addend"])
@pytest.mark.parametrize("view", [False, True])
def test_a_write_in_between_is_left_alone(written: str, view: bool) -> None:
    b = Builder()
    g = [b.placeholder(f"g{i}") for i in range(2)]
    x = b.placeholder("x", (2, 8))
    first = b.reduce_scatter(g[0], op="sum", role=REDUCE)
    partial = b.call(aten.add.Tensor, first.wait, x)
    target = g[0] if written == "sent" else x
    b.call(aten.mul_.Tensor, b.view(target, [-1]) if view else target, 2.0)
    second = b.reduce_scatter(g[1], op="sum", role=REDUCE)
    plan = deduped(finish(b, chain(b, [partial, second.wait])))
    assert plan.merges == () and reasons(plan) == ["mutated", "mutated"]


def test_a_write_to_something_else_is_no_reason() -> None:
    b = Builder()
    first = scatters(b, 1)[0]
    b.call(aten.mul_.Tensor, b.placeholder("other"), 2.0)
    second = scatters(b, 1)[0]
    assert len(deduped(finish(b, chain(b, [first.wait, second.wait]))).merges) == 1


def test_unknown_values_prove_nothing() -> None:
    b = Builder()
    made = scatters(b, 2)
    gm = finish(b, chain(b, [c.wait for c in made]))
    made[0].start.args[0].meta.pop("val")  # type: ignore[union-attr]
    assert reasons(plan_dedup(gm)) == ["no_meta", "alone"]


def test_other_forms_and_groups_that_are_no_constants() -> None:
    b = Builder()
    made = scatters(b, 3)
    gm = finish(b, chain(b, [c.wait for c in made]))
    made[0].start.target = torch.ops._c10d_functional_autograd.reduce_scatter_tensor.default
    with gm.graph.inserting_before(made[1].start):
        group = gm.graph.placeholder("group")
    group.meta["val"] = object()
    made[1].start.args = (made[1].start.args[0], "sum", 2, group)
    assert reasons(plan_dedup(gm)) == ["other_form", "group_unknown", "alone"]


# ---- what the merged one carries


ROLES = [
    ([REDUCE, REDUCE], REDUCE, None), ([REDUCE, TP], None, "mixed"), ([TP, REDUCE], None, "mixed"),
    ([REDUCE, None], None, "mixed"), ([None, REDUCE], None, "mixed"), ([TP, TP], TP, None), ([None, None], None, None),
    ([REDUCE, REDUCE, "user.x"], None, "mixed"),
]


@pytest.mark.parametrize(("given", "role", "lost"), ROLES)
def test_roles_by_default(given: list[str | None], role: str | None, lost: str | None) -> None:
    b = Builder()
    made = [scatters(b, 1, role=r)[0] for r in given]
    dicts = [c.start.meta.get("custom") for c in made]
    gm = finish(b, chain(b, [c.wait for c in made]))
    plan = deduped(gm)
    (start,) = start_nodes(gm)
    found, absence = identity_of(start), absence_of(start)
    assert (None if found is None else found.role) == role
    assert len(plan.merges) == 1 and plan.refusals == ()
    if lost:
        assert absence is not None and (absence.kind, absence.pass_name) == ("dropped", "dedup")
        assert absence.code is not None and absence.code.slug == lost and classify(gm)[start] is None
    elif role is None:
        assert absence is store.NEVER_HAD
    assert [n for n in gm.graph.nodes if n.meta.get("custom")] == ([start] if role or lost else [])
    assert all(start.meta.get("custom") is not d for d in dicts if d)
    record = members_of(start)
    assert record is not None and [m.name for m in record.members] == [c.start.name for c in made]
    assert [None if m.identity is None else m.identity.role for m in record.members] == given


@pytest.mark.parametrize(("given", "left"), [
    ([REDUCE, REDUCE], [REDUCE]), ([REDUCE, TP], [REDUCE, TP]), ([REDUCE, None], [REDUCE, None]),
    ([REDUCE, TP, REDUCE], [TP, REDUCE]), ([TP, None, TP, None], [TP, None]), ([None, None], [None]),
])
def test_refuse_merges_equals_only_and_loses_nothing(given: list[str | None], left: list[str | None]) -> None:
    b = Builder()
    made = [scatters(b, 1, role=r)[0] for r in given]
    gm = finish(b, chain(b, [c.wait for c in made]))
    plan = deduped(gm, mixed="refuse")
    assert [None if (i := identity_of(n)) is None else i.role for n in start_nodes(gm)] == left
    assert all(store.dropped_of(n) is None for n in gm.graph.nodes)
    assert set(reasons(plan)) <= {"other_role"}


def test_units_and_parameters_are_combined_and_one_inferred_makes_all_inferred() -> None:
    from collective_identity import Source

    b = Builder()
    made = [*scatters(b, 1, param_group="u", params=("u.b",)),
            *scatters(b, 1, param_group="u", params=("u.a",), source=Source.INFERRED)]
    gm = finish(b, chain(b, [c.wait for c in made]))
    deduped(gm)
    assert identity_of(start_nodes(gm)[0]) == identity(
        REDUCE, producer="dedup", source=Source.INFERRED, param_group="u", params=("u.a", "u.b")
    )


def test_a_backward_node_keeps_its_half_and_both_keys() -> None:
    b = Builder()
    made = scatters(b, 2)
    for c in made:
        c.start.meta |= {"partitioner_tag": "is_backward", "autograd_backward": True}
        store.stamp(c.start, identity(REDUCE))
    gm = finish(b, chain(b, [c.wait for c in made]))
    old = set(gm.graph.nodes)
    deduped(gm)
    (start,) = start_nodes(gm)
    assert identity_of(start) == identity(REDUCE, producer="dedup")
    assert all(n.meta["partitioner_tag"] == "is_backward" for n in gm.graph.nodes if n not in old)


# ---- plans as values, and the cost


def test_a_plan_can_be_read_and_stored_and_fits_one_graph_once() -> None:
    def build() -> fx.GraphModule:
        b = Builder()
        made = [*scatters(b, 2), *scatters(b, 1, role=TP)]
        return finish(b, chain(b, [c.wait for c in made]), scatters(b, 1)[0].wait)

    gm = build()
    plan = plan_dedup(gm)
    assert plan.describe().splitlines() == [
        "dedup plan (mixed roles: drop): 3 reduce-scatters into 1, 1 left alone",
        "  3 of the sum add_tensor_1: no role (mixed)",
        "  left alone: 1 x DD006 not_added, its result is not an addend of a sum",
    ]
    stored = json.loads(json.dumps(plan.to_dict()))
    assert stored["merges"][0]["lost"] == "mixed" and stored["merges"][0]["detail"] == (
        f"dedup merged {REDUCE} with {TP}"
    )
    with pytest.raises(ValueError, match="not in it; plan again"):
        apply_dedup(build(), plan)
    assert apply_dedup(gm, plan)
    with pytest.raises(ValueError, match="not in it; plan again"):
        apply_dedup(gm, plan)
    with pytest.raises(ValueError, match="expected mixed drop | refuse, found 'maybe'"):
        plan_dedup(gm, mixed="maybe")


def test_the_table_of_reasons_is_complete_and_in_order() -> None:
    from collective_identity.codes import CODES, Code
    from inductor_passes.bucketing import REASONS as BUCKETING
    from inductor_passes.dedup import reasons as table

    defined = [v for v in vars(table).values() if isinstance(v, Code)]
    assert list(REASONS.values()) == defined
    assert list(REASONS) == [f"DD{i + 1:03d}" for i in range(len(defined))]
    assert not set(REASONS) & (set(CODES) | set(BUCKETING))


@pytest.mark.parametrize("pairs", [False, True])
def test_cost_grows_linearly(pairs: bool) -> None:
    def cost(count: int) -> int:
        b = Builder()
        waits = [c.wait for c in scatters(b, count)]
        sums = [waits[i : i + 2] for i in range(0, count, 2)] if pairs else [waits]
        gm = finish(b, *(chain(b, s) for s in sums))
        return calls(lambda: dedup_reduce_scatters(gm))

    cost(100)  # fill torch's caches
    small, large = cost(100), cost(400)
    assert large < 4.4 * small
