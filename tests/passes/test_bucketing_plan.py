"""The decision: which collectives become one, and the reason for every other."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from torch import fx

from collective_identity.identity import Source
from collective_identity.store import identity_of
from collective_identity.transports import Transport, start_nodes
from inductor_passes.bucketing import REASONS, Plan, bucket_collectives, plan_buckets
from tests.graphs import Builder, Collective, identity

UNSHARD, REDUCE, REPLICATE = "fsdp.param_unshard", "fsdp.grad_reduce_shard", "fsdp.grad_replicate_reduce"


def gathers(b: Builder, count: int, shape: tuple[int, ...] = (4, 8), **fields: Any) -> list[Collective]:
    first = len(b.graph.nodes)
    given = {"role": UNSHARD, **fields}
    return [b.all_gather(b.placeholder(f"w{first}_{i}", shape), **given) for i in range(count)]


def finish(b: Builder, *collectives: Collective) -> fx.GraphModule:
    b.output(*(c.wait for c in collectives))
    return b.module()


def members(plan: Plan) -> list[list[str]]:
    return [[m.name for m in bucket.members] for bucket in plan.buckets]


def names(*collectives: Collective) -> list[str]:
    return [c.start.name for c in collectives]


def reasons(plan: Plan) -> dict[str, str]:
    return {r.node.name: r.reason.slug for r in plan.refusals}


def test_a_unit_is_the_natural_bucket() -> None:
    b = Builder()
    first, second = gathers(b, 3, param_group="layers.0"), gathers(b, 2, param_group="layers.1")
    plan = plan_buckets(finish(b, *first, *second))
    assert members(plan) == [names(*first), names(*second)]
    assert [bucket.key.param_group for bucket in plan.buckets] == ["layers.0", "layers.1"]
    assert plan.refusals == ()
    key = plan.buckets[0].key
    assert (key.role, key.transport, key.group, key.group_size) == (UNSHARD, Transport.ALL_GATHER, "dp", 2)
    assert (key.dtype, key.device, key.reduce_op, key.depth) == (torch.float32, torch.device("cpu"), None, 0)
    assert plan.buckets[0].nbytes == 3 * 8 * 8 * 4, "the gathered tensor is larger than the shard"


def test_graph_order_crosses_units_and_fqn_order_sorts_within_one() -> None:
    b = Builder()
    made = [
        b.all_gather(b.placeholder(f"w{i}"), role=UNSHARD, param_group=unit, params=(fqn,))
        for i, (unit, fqn) in enumerate([("b", "b.z"), ("a", "a.y"), ("b", "b.x"), ("a", "a.w")])
    ]
    gm = finish(b, *made)
    n = names(*made)
    assert members(plan_buckets(gm, order="graph")) == [n]
    assert members(plan_buckets(gm)) == [[n[0], n[2]], [n[1], n[3]]]
    assert members(plan_buckets(gm, order="fqn")) == [[n[2], n[0]], [n[3], n[1]]]
    assert plan_buckets(gm, order="graph").buckets[0].key.param_group is None


def test_fqn_order_puts_the_unnamed_last() -> None:
    b = Builder()
    made = [b.all_gather(b.placeholder(f"w{i}"), role=UNSHARD, param_group="u", params=p)
            for i, p in enumerate([None, ("b",), None, ("a",)])]
    n = names(*made)
    assert members(plan_buckets(finish(b, *made), order="fqn")) == [[n[3], n[1], n[0], n[2]]]


# each gather below counts 8 x 8 x 4 bytes = 256 B
@pytest.mark.parametrize(("cap_bytes", "sizes", "alone"), [
    (None, [6], 0), (1536, [6], 0), (1535, [5], 1), (512, [2, 2, 2], 0), (511, [], 6), (255, [], 6),
    ([256, 1024], [4], 2), ([512, 768], [2, 3], 1), ([100, 512], [2, 2, 2], 0),
])
def test_cap(cap_bytes: Any, sizes: list[int], alone: int) -> None:
    b = Builder()
    gm = finish(b, *gathers(b, 6, param_group="u"))
    mib = 1024 * 1024
    cap = None if cap_bytes is None else [c / mib for c in cap_bytes] if isinstance(cap_bytes, list) \
        else cap_bytes / mib
    plan = plan_buckets(gm, cap_mb=cap)
    assert [len(bucket.members) for bucket in plan.buckets] == sizes
    assert list(reasons(plan).values()) == ["over_cap"] * alone


def test_a_member_over_the_cap_stands_alone_and_the_next_is_tried() -> None:
    b = Builder()
    small, large, more = gathers(b, 1), gathers(b, 1, (64, 64)), gathers(b, 1)
    plan = plan_buckets(finish(b, *small, *large, *more), cap_mb=0.001)
    assert members(plan) == [names(*small, *more)]
    assert reasons(plan) == {large[0].start.name: "over_cap"}


def test_without_units_a_cap_holds_unless_graph_order_is_asked_for() -> None:
    b = Builder()
    gm = finish(b, *gathers(b, 4, (1 << 19, 64)))  # 256 MiB gathered, each
    assert [len(bucket.members) for bucket in plan_buckets(gm).buckets] == []
    assert [len(bucket.members) for bucket in plan_buckets(gm, cap_mb=512).buckets] == [2, 2]
    assert [len(bucket.members) for bucket in plan_buckets(gm, order="graph").buckets] == [4]


@pytest.mark.parametrize("change", [
    {"group": "other"}, {"size": 4}, {"dtype": torch.bfloat16}, {"device": "cuda:0"},
])
def test_gathers_that_differ_do_not_merge_and_the_next_is_tried(change: dict[str, Any]) -> None:
    b = Builder()
    tensor = {k: v for k, v in change.items() if k in ("dtype", "device")}
    launch = {k: v for k, v in change.items() if k not in tensor}
    first = b.all_gather(b.placeholder("a"), role=UNSHARD)
    odd = b.all_gather(b.placeholder("b", **tensor), role=UNSHARD, **launch)
    last = b.all_gather(b.placeholder("c"), role=UNSHARD)
    plan = plan_buckets(finish(b, first, odd, last))
    assert members(plan) == [names(first, last)]
    assert reasons(plan) == {odd.start.name: "incompatible"}
    word = {"size": "group_size"}.get(next(iter(change)), next(iter(change)))
    assert word in plan.refusals[0].detail


def test_reduce_operations_do_not_mix() -> None:
    b = Builder()
    made = [b.reduce_scatter(b.placeholder(f"g{i}"), role=REDUCE, op=op)
            for i, op in enumerate(["avg", "sum", "avg", "sum"])]
    made += [b.all_reduce(b.placeholder(f"h{i}"), role=REPLICATE, op=op) for i, op in enumerate(["max", "min"])]
    n = names(*made)
    plan = plan_buckets(finish(b, *made))
    assert members(plan) == [[n[0], n[2]], [n[1], n[3]]]
    assert [bucket.key.reduce_op for bucket in plan.buckets] == ["avg", "sum"]
    assert reasons(plan) == {n[4]: "incompatible", n[5]: "incompatible"}


def test_only_fsdp_roles_merge() -> None:
    b = Builder()
    fsdp = gathers(b, 2)
    tp = gathers(b, 2, role="tp.activation_gather")
    unlabelled = [b.all_gather(b.placeholder(f"u{i}")) for i in range(2)]
    gm = finish(b, *fsdp, *tp, *unlabelled)
    plan = plan_buckets(gm, identities={c.start: identity_of(c.start) for c in (*fsdp, *tp, *unlabelled)})
    assert members(plan) == [names(*fsdp)]
    assert reasons(plan) == dict.fromkeys(names(*tp), "other_role") | dict.fromkeys(names(*unlabelled), "no_role")


def test_explicit_and_inferred_may_share_a_bucket() -> None:
    b = Builder()
    made = [*gathers(b, 1), *gathers(b, 1, source=Source.INFERRED)]
    gm = finish(b, *made)
    given = {c.start: identity(UNSHARD, source=s) for c, s in zip(made, Source, strict=True)}
    assert members(plan_buckets(gm, identities=given)) == [names(*made)]


def test_given_identities_are_used_instead_of_the_graph() -> None:
    b = Builder()
    made = [b.all_gather(b.placeholder(f"u{i}")) for i in range(2)]
    gm = finish(b, *made)
    assert reasons(plan_buckets(gm, identities={})) == dict.fromkeys(names(*made), "no_role")
    assert members(plan_buckets(gm, identities={c.start: identity(UNSHARD) for c in made})) == [names(*made)]


def test_kinds() -> None:
    b = Builder()
    ag = gathers(b, 2)
    rs = [b.reduce_scatter(b.placeholder(f"g{i}"), role=REDUCE) for i in range(2)]
    gm = finish(b, *ag, *rs)
    plan = plan_buckets(gm, kinds=("reduce_scatter",))
    assert members(plan) == [names(*rs)]
    assert reasons(plan) == dict.fromkeys(names(*ag), "not_requested")
    assert members(plan_buckets(gm, kinds=[Transport.ALL_GATHER])) == [names(*ag)]


def test_forward_and_backward_do_not_share_a_bucket() -> None:
    b = Builder()
    made = gathers(b, 3)
    for c, place in zip(made, ["is_forward", "is_forward", "is_backward"], strict=True):
        c.start.meta["partitioner_tag"] = place
    gm = finish(b, *made)
    plan = plan_buckets(gm, identities={c.start: identity(UNSHARD) for c in made})
    assert members(plan) == [names(*made[:2])]
    assert reasons(plan) == {made[2].start.name: "phase"}


@pytest.mark.parametrize("order", ["param_group", "graph"])
def test_a_whole_steps_second_gathers_stay_in_backward(order: str) -> None:
    """Forward and backward in one graph, as `trace_train_step` makes it and AOTAutograd hands it on: the copies that
    backward gathers are marked as the forward's, and nothing but their place tells them from the first gathers."""
    b = Builder()
    weights = [b.placeholder(f"w{i}") for i in range(2)]
    first = [b.all_gather(w, role=UNSHARD, param_group="layer") for w in weights]
    loss = b.call(torch.ops.aten.add.Tensor, *(c.wait for c in first))
    begin = b.call(torch.ops.aten.ones_like.default, loss)
    begin.meta["partitioner_tag"] = "is_backward"
    again = [b.all_gather(w, role=UNSHARD, param_group="layer") for w in weights]
    for c in again:
        c.start.meta["partitioner_tag"] = "is_forward"
    gradients = [b.call(torch.ops.aten.mul.Tensor, begin, c.wait) for c in again]
    b.output(loss, *gradients)
    gm = b.module()
    plan = bucket_collectives(gm, order=order)
    assert members(plan) == [names(*first), names(*again)]
    nodes = list(gm.graph.nodes)
    starts = [nodes.index(node) for node in start_nodes(gm)]
    assert starts[0] < nodes.index(begin) < starts[1], "the second bucket waits for backward to begin"


# ---- arguments and views of a plan


@pytest.mark.parametrize(("options", "message"), [
    ({"order": "random"}, "expected order param_group | graph | fqn, found 'random'"),
    ({"kinds": ("all_to_all",)}, "expected kinds out of all_gather, reduce_scatter, all_reduce, found 'all_to_all'"),
    ({"kinds": 5}, "expected kinds out of all_gather, reduce_scatter, all_reduce, found 5"),
    ({"coalesced": ["broadcast"]}, "expected kinds out of all_gather, reduce_scatter, all_reduce, found 'broadcast'"),
    ({"fqns": None}, "expected fqns to be parameter names in a list or a tuple, found None"),
    ({"cap_mb": True}, "expected cap_mb to be a positive number of MiB or several, found True"),
    ({"cap_mb": 0}, "expected cap_mb to be a positive number of MiB or several, found 0"),
    ({"cap_mb": []}, "found []"), ({"cap_mb": [1, -1]}, "found [1, -1]"), ({"cap_mb": float("nan")}, "found nan"),
])
def test_bad_options(options: dict[str, Any], message: str) -> None:
    b = Builder()
    with pytest.raises(ValueError) as error:
        bucket_collectives(finish(b, *gathers(b, 2)), **options)
    assert message in str(error.value)


def test_a_graph_without_collectives() -> None:
    b = Builder()
    b.output(b.placeholder("x"))
    gm = b.module()
    assert bucket_collectives(gm) == Plan((), ())
    assert [n.op for n in gm.graph.nodes] == ["placeholder", "output"]


def test_a_plan_can_be_read_and_stored() -> None:
    b = Builder()
    made = gathers(b, 5, param_group="layers.0")
    alone = b.reduce_scatter(b.placeholder("g"), role=REDUCE, op="avg")
    plan = plan_buckets(finish(b, *made, alone))
    n = names(*made)
    assert plan.describe() == (
        "bucketing plan (order param_group): 5 collectives into 1 buckets, 1 left alone\n"
        "  bucket 0: 5 x fsdp.param_unshard (all_gather) of 'layers.0' on group dp, 0.00 MiB, float32, cpu: "
        f"{n[0]}, {n[1]}, {n[2]}, {n[3]}, and 1 more\n"
        "  left alone: 1 x BK017 alone, it is the only collective of its role and transport: "
        "reduce_scatter_tensor_default"
    )
    stored = json.loads(json.dumps(plan.to_dict()))
    assert stored["buckets"] == [{
        "role": UNSHARD, "transport": "all_gather", "group": "dp", "group_size": 2, "dtype": "float32",
        "device": "cpu", "reduce_op": None, "param_group": "layers.0", "depth": 0, "nbytes": 1280,
            "coalesced": False, "kernels": False, "members": n,
    }]
    assert stored["refusals"] == [{
        "node": "reduce_scatter_tensor_default", "reason": "BK017", "slug": "alone",
        "detail": "no other fsdp.grad_reduce_shard",
    }]


def test_the_table_of_reasons_is_complete_and_in_order() -> None:
    from collective_identity.codes import CODES, Code
    from inductor_passes.bucketing import reasons as table

    defined = [v for v in vars(table).values() if isinstance(v, Code)]
    assert list(REASONS.values()) == defined
    assert list(REASONS) == [f"BK{i + 1:03d}" for i in range(len(defined))]
    assert not set(REASONS) & set(CODES)
