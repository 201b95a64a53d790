"""The surgery: what a bucket looks like in the graph, where it stands, and what it carries."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import fx

from collective_identity.identity import Source
from collective_identity.store import BACKWARD_KEY, KEY, BucketRecord, Member, identity_of, members_of
from collective_identity.transports import is_wait, start_nodes
from inductor_passes.bucketing import Plan, apply_plan
from tests.graphs import Builder, aten, identity
from tests.passes.simulated_world import bucketed

UNSHARD, REDUCE, REPLICATE = "fsdp.param_unshard", "fsdp.grad_reduce_shard", "fsdp.grad_replicate_reduce"


def text(gm: fx.GraphModule) -> list[str]:
    """One line per node: name-free targets and arguments by position in the graph."""
    place = {node: i for i, node in enumerate(gm.graph.nodes)}
    lines = []
    for node in gm.graph.nodes:
        args = fx.map_arg(node.args, lambda n: f"%{place[n]}")
        operator_name = str(node.target).split(".")[-2:-1]
        target = operator_name[0] if operator_name else getattr(node.target, "__name__", node.op)
        lines.append(f"{target}({', '.join(str(a).replace(chr(39), '') for a in args)})")
    return lines


def test_gather_bucket() -> None:
    b = Builder()
    made = [b.all_gather(b.placeholder(f"w{i}", shape), role=UNSHARD)
            for i, shape in enumerate([(4, 8), (6,), (2, 1)])]
    b.output(*(c.wait for c in made))
    gm = b.module()
    bucketed(gm)
    assert text(gm) == [
        "placeholder()", "placeholder()", "placeholder()",
        "reshape(%0, [32])", "reshape(%2, [2])", "cat([%3, %1, %4])",
        "all_gather_into_tensor(%5, 2, dp)", "wait_tensor(%6)",
        "reshape(%7, [2, 40])", "split_with_sizes(%8, [32, 6, 2], 1)",
        "getitem(%9, 0)", "clone(%10)", "reshape(%11, [8, 8])", "getitem(%9, 1)", "clone(%13)", "reshape(%14, [12])",
        "getitem(%9, 2)", "clone(%16)", "reshape(%17, [4, 1])", "output((%12, %15, %18))",
    ]


def test_scatter_bucket() -> None:
    b = Builder()
    made = [b.reduce_scatter(b.placeholder(f"g{i}", shape), role=REDUCE, op="avg")
            for i, shape in enumerate([(4, 8), (6,)])]
    b.output(*(c.wait for c in made))
    gm = b.module()
    bucketed(gm)
    assert text(gm) == [
        "placeholder()", "placeholder()",
        "reshape(%0, [2, 16])", "reshape(%1, [2, 3])", "cat([%2, %3], 1)", "reshape(%4, [38])",
        "reduce_scatter_tensor(%5, avg, 2, dp)", "wait_tensor(%6)", "split_with_sizes(%7, [16, 3], 0)",
        "getitem(%8, 0)", "reshape(%9, [2, 8])", "getitem(%8, 1)", "output((%10, %11))",
    ]


def test_coalesced_buckets() -> None:
    """Nothing is copied: one call, and each member's own result waited for where it was."""
    shapes = [(4, 8), (6,)]
    kinds: dict[str, tuple[Any, str]] = {
        "all_gather": (lambda b, w: b.all_gather(w, role=UNSHARD), "all_gather_into_tensor_coalesced([%0, %1], 2, dp)"),
        "reduce_scatter": (
            lambda b, w: b.reduce_scatter(w, role=REDUCE, op="avg"),
            "reduce_scatter_tensor_coalesced([%0, %1], avg, 2, dp)",
        ),
        "all_reduce": (
            lambda b, w: b.all_reduce(w, role=REPLICATE, op="sum"),
            "all_reduce_coalesced([%0, %1], sum, dp)",
        ),
    }
    for kind, (add, line) in kinds.items():
        b = Builder()
        made = [add(b, b.placeholder(f"w{i}", shape)) for i, shape in enumerate(shapes)]
        had = [c.wait.meta["val"] for c in made]
        b.output(*(c.wait for c in made))
        gm = b.module()
        plan = bucketed(gm, coalesced=[kind])
        assert plan.buckets[0].coalesced and plan.to_dict()["buckets"][0]["coalesced"]
        assert text(gm) == [
            "placeholder()", "placeholder()", line, "getitem(%2, 0)", "getitem(%2, 1)",
            "wait_tensor(%3)", "wait_tensor(%4)", "output((%5, %6))",
        ]
        (start,) = start_nodes(gm)
        record, found = members_of(start), identity_of(start)
        assert record is not None and [m.name for m in record.members] == [c.start.name for c in made]
        assert found is not None and found.source is Source.EXPLICIT
        waits = [n.meta["val"] for n in gm.graph.nodes if is_wait(n)]
        assert [id(v) for v in waits] == [id(v) for v in had], "known already, and what is a view of one still says so"


@pytest.mark.parametrize("why", ["gaps", "empty", "another type", "another kind"])
def test_what_cannot_be_sent_where_it_lies_is_copied(why: str) -> None:
    b = Builder()
    first, other = b.placeholder("w0"), b.placeholder("w1", (0, 8) if why == "empty" else (4, 8))
    if why == "gaps":
        other = b.call(aten.t.default, other)
    if why == "another type":
        other = b.cast(other, torch.bfloat16)
    made = [b.all_gather(one, role=UNSHARD) for one in (first, other)]
    b.output(*(c.wait for c in made))
    gm = b.module()
    plan = bucketed(gm, coalesced=["all_reduce" if why == "another kind" else "all_gather"], mixed_dtypes=True)
    assert [bucket.coalesced for bucket in plan.buckets] == [False], "the plan says what is done"
    assert [str(n.target) for n in start_nodes(gm)] == ["_c10d_functional.all_gather_into_tensor.default"]


def test_reduce_bucket() -> None:
    b = Builder()
    made = [b.all_reduce(b.placeholder(f"g{i}", shape), role=REPLICATE, op="sum")
            for i, shape in enumerate([(4, 2), (6,), ()])]
    b.output(*(c.wait for c in made))
    gm = b.module()
    bucketed(gm)
    assert text(gm) == [
        "placeholder()", "placeholder()", "placeholder()",
        "reshape(%0, [8])", "reshape(%2, [1])", "cat([%3, %1, %4])",
        "all_reduce(%5, sum, dp)", "wait_tensor(%6)", "split_with_sizes(%7, [8, 6, 1], 0)",
        "getitem(%8, 0)", "reshape(%9, [4, 2])", "getitem(%8, 1)", "getitem(%8, 2)", "reshape(%12, [])",
        "output((%10, %11, %13))",
    ]


def test_a_gathered_piece_that_could_be_a_view_with_gaps_is_copied() -> None:
    b = Builder()
    made = [b.all_gather(b.placeholder(f"w{i}", (1, 5)), role=UNSHARD) for i in range(2)]
    flat = b.view(made[0].wait, [10])  # only works on contiguous memory
    b.output(flat, made[1].wait)
    gm = b.module()
    bucketed(gm)
    assert sum(line.startswith("clone(") for line in text(gm)) == 2


def test_a_bucket_of_one_is_left_untouched() -> None:
    b = Builder()
    b.output(b.all_gather(b.placeholder("w"), role=UNSHARD).wait)
    gm = b.module()
    nodes, code = list(gm.graph.nodes), gm.code
    payload = nodes[1].meta["custom"]
    assert bucketed(gm).buckets == ()
    assert list(gm.graph.nodes) == nodes and gm.code == code and nodes[1].meta["custom"] is payload
    assert apply_plan(gm, Plan((), ())) is False


# ---- identity and provenance


def test_identity_provenance_and_no_alias() -> None:
    b = Builder()
    made = [b.all_gather(b.placeholder(f"w{i}"), role=UNSHARD, param_group="layers.0", params=(f"layers.0.{n}",))
            for i, n in enumerate("ba")]
    b.output(*(c.wait for c in made))
    gm = b.module()
    dicts = [c.start.meta["custom"] for c in made]
    before = copy.deepcopy(dicts)
    members = tuple(Member(c.start.name, identity_of(c.start)) for c in made)
    bucketed(gm)
    (start,) = start_nodes(gm)
    assert identity_of(start) == identity(
        UNSHARD, producer="bucketing", param_group="layers.0", params=("layers.0.a", "layers.0.b")
    )
    assert members_of(start) == BucketRecord("bucketing", members)
    assert dicts == before and all(start.meta["custom"] is not d for d in dicts)
    assert [n for n in gm.graph.nodes if "custom" in n.meta] == [start]
    assert [n for n in gm.graph.nodes if members_of(n) is not None] == [start]


def test_one_inferred_member_makes_the_bucket_inferred_and_units_that_differ_leave_none() -> None:
    b = Builder()
    made = [b.all_gather(b.placeholder(f"w{i}"), role=UNSHARD, param_group=unit) for i, unit in enumerate("xy")]
    b.output(*(c.wait for c in made))
    gm = b.module()
    given = {c.start: identity(UNSHARD, source=s, param_group=u)
             for c, s, u in zip(made, [Source.EXPLICIT, Source.INFERRED], "xy", strict=True)}
    bucketed(gm, order="graph", identities=given)
    assert identity_of(start_nodes(gm)[0]) == identity(UNSHARD, producer="bucketing", source=Source.INFERRED)


def test_what_backward_needs_is_handed_on() -> None:
    b = Builder()
    made = [b.reduce_scatter(b.placeholder(f"g{i}")) for i in range(2)]
    b.output(*(c.wait for c in made))
    gm = b.module()
    stack = {"block": ("layers.0", torch.nn.Linear)}
    for c in made:
        c.start.meta |= {"partitioner_tag": "is_backward", "autograd_backward": True, "stack_trace": "File x",
                         "nn_module_stack": stack}
    old = set(gm.graph.nodes)
    bucketed(gm, identities={c.start: identity(REDUCE) for c in made})
    (start,) = start_nodes(gm)
    assert set(start.meta["custom"]) == {KEY, BACKWARD_KEY}
    assert identity_of(start) == identity(REDUCE, producer="bucketing")
    new = [n for n in gm.graph.nodes if n not in old]
    assert {n.meta["partitioner_tag"] for n in new} == {"is_backward"}
    assert all(n.meta["autograd_backward"] and n.meta["stack_trace"] == "File x" for n in new)
    assert all(n.meta["nn_module_stack"] is stack for n in new)


def test_values_share_memory_where_the_nodes_do() -> None:
    b = Builder()
    made = [b.reduce_scatter(b.placeholder(f"g{i}", (4, 8)), role=REDUCE) for i in range(2)]
    b.output(*(c.wait for c in made))
    gm = b.module()
    bucketed(gm)

    def storage(node: fx.Node) -> int:
        return node.meta["val"].untyped_storage()._cdata

    inputs = [n for n in gm.graph.nodes if n.op == "placeholder"]
    assert [storage(n) for n in inputs] == [storage(next(iter(n.users))) for n in inputs]
    results = gm.graph.output_node().args[0]
    wait = next(n for n in gm.graph.nodes if is_wait(n))
    assert {storage(n) for n in results} == {storage(wait)}
    assert [n.meta["val"].storage_offset() for n in results] == [0, 16]
    assert {n.meta["val"].fake_mode for n in gm.graph.nodes if isinstance(n.meta.get("val"), torch.Tensor)} == {b.fake}


# ---- place in the graph


def targets(gm: fx.GraphModule, *wanted: Any) -> list[Any]:
    return [n.target for n in gm.graph.nodes if n.target in wanted]


def test_a_gather_bucket_stands_at_its_first_member_and_takes_chains_along() -> None:
    b = Builder()
    w0, w1, x = b.placeholder("w0"), b.placeholder("w1"), b.placeholder("x", (8, 8))
    x0 = b.call(aten.sin.default, x)
    first = b.all_gather(w0, role=UNSHARD)
    x1 = b.call(aten.mm.default, x0, first.wait)
    x2 = b.call(aten.cos.default, x1)
    second = b.all_gather(b.call(aten.mul.Tensor, w1, 2.0), role=UNSHARD)
    b.output(b.call(aten.mm.default, x2, second.wait))
    gm = b.module()
    bucketed(gm)
    gather = start_nodes(gm)[0].target
    assert targets(gm, aten.sin.default, aten.mul.Tensor, gather, aten.mm.default, aten.cos.default) == [
        aten.sin.default, aten.mul.Tensor, gather, aten.mm.default, aten.cos.default, aten.mm.default,
    ]
    order = [n.name for n in gm.graph.nodes]
    assert order.index("cos_default") < order.index("getitem_1"), "the second piece is copied out when it is used"


def test_a_reduction_bucket_stands_at_its_last_member_and_delays_users() -> None:
    b = Builder()
    g0, g1 = b.placeholder("g0"), b.placeholder("g1")
    first = b.reduce_scatter(g0, role=REDUCE)
    used = b.call(aten.sin.default, first.wait)
    apart = b.call(aten.cos.default, g1)
    second = b.reduce_scatter(apart, role=REDUCE)
    after = b.call(aten.tan.default, g0)
    b.output(used, second.wait, after)
    gm = b.module()
    bucketed(gm)
    scatter = start_nodes(gm)[0].target
    assert targets(gm, aten.sin.default, aten.cos.default, aten.tan.default, scatter) == [
        aten.cos.default, scatter, aten.sin.default, aten.tan.default,
    ]


def test_random_numbers_and_writes_keep_their_order() -> None:
    b = Builder()
    w0, w1 = b.placeholder("w0"), b.placeholder("w1")
    noise0 = b.call(aten.rand.default, [4, 8])
    first = b.all_gather(w0, role=UNSHARD)
    noise1 = b.call(aten.rand.default, [8, 8])
    other = b.placeholder("other", (8, 8))
    b.call(aten.add_.Tensor, other, noise1)
    noise2 = b.call(aten.rand.default, [4, 8])
    second = b.all_gather(b.call(aten.add.Tensor, w1, noise2), role=UNSHARD)
    read = b.call(aten.sum.default, other)
    b.output(first.wait, second.wait, noise0, read)
    gm = b.module()
    plan = bucketed(gm)
    assert len(plan.buckets) == 1
    drawn = [n.name for n in gm.graph.nodes if n.target is aten.rand.default]
    assert drawn == [noise0.name, noise1.name, noise2.name]
