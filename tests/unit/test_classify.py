"""Precedence: explicit payload, then structure, then nothing; and what is said about each."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import fx
from torch.fx.experimental.proxy_tensor import make_fx

from collective_identity import (
    DEFAULT_ROLES,
    GRAD_REDUCE_SHARD,
    GRAD_REPLICATE_REDUCE,
    PARAM_UNSHARD,
    BucketRecord,
    Identity,
    Member,
    Source,
    Transport,
    classify,
    classify_report,
    codes,
    stamp,
    start_nodes,
    store,
)
from tests.graphs import Builder, annotate, aten, identity, payload

C = torch.ops._c10d_functional


def _custom(gm: fx.GraphModule) -> list[Any]:
    return [copy.deepcopy(n.meta.get("custom")) for n in gm.graph.nodes]


def _two_gathers(first: str | None = None, second: str | None = None) -> tuple[fx.GraphModule, fx.Node, fx.Node]:
    b = Builder()
    one = b.all_gather(b.placeholder("w0"), role=first)
    two = b.all_gather(b.placeholder("w1"), role=second)
    b.output(one.wait, two.wait)
    return b.module(), one.start, two.start


def test_explicit_wins_and_structure_is_not_asked() -> None:
    gm, one, two = _two_gathers(PARAM_UNSHARD, "tp.activation_gather")
    report = classify_report(gm)
    assert dict(report.identities) == {one: identity(PARAM_UNSHARD), two: identity("tp.activation_gather")}
    assert not report.structure_built and not report.mismatches and not report.absences and not report.notes


def test_missing_is_inferred_and_never_written() -> None:
    gm, one, two = _two_gathers(PARAM_UNSHARD)
    before = _custom(gm)
    report = classify_report(gm)
    assert report.structure_built
    assert report.identities[one] == identity(PARAM_UNSHARD)
    assert report.identities[two] == Identity(1, PARAM_UNSHARD, Source.INFERRED, "structure", "dp")
    assert not report.absences and _custom(gm) == before


def test_structure_says_no() -> None:
    b = Builder()
    mixed = b.all_gather(b.call(aten.add.Tensor, b.placeholder("x"), b.placeholder("y")))
    b.output(mixed.wait)
    report = classify_report(b.module())
    assert report.identities[mixed.start] is None
    assert report.absences[mixed.start] == store.Absence("never_had")


def test_a_tensor_parallel_gather_that_looks_like_fsdp(new_group: Callable[[list[int]], str]) -> None:
    """With the roles stamped, identity decides, and groups follow."""
    dp, tp = new_group([0, 2]), new_group([0, 1])

    def gather(x: torch.Tensor, group: str) -> torch.Tensor:
        return C.wait_tensor(C.all_gather_into_tensor(x, 2, group))

    def f(w: Any, x: Any, y: Any, loss: Any) -> Any:
        full, act, other = gather(w, dp), gather(x, tp), gather(y.relu() * 2, tp)
        return act @ full + other @ full, C.wait_tensor(C.all_reduce(loss, "sum", tp))

    args = (torch.randn(4, 8), torch.randn(3, 8), torch.randn(3, 8), torch.randn(4))
    gm = make_fx(f, tracing_mode="fake")(*args)
    starts = start_nodes(gm)
    roles = [PARAM_UNSHARD, "tp.activation_gather", "tp.activation_gather"]
    for node, role in zip(starts, roles, strict=False):
        stamp(node, identity(role))
    found = list(classify(gm).values())
    assert [i and i.role for i in found] == [*roles, None], "the all-reduce's group carries no FSDP collective"
    compatible = list(classify(gm, rules="compatible").values())
    assert [i and i.role for i in compatible] == [*roles, None]


def test_a_mismatch_is_recorded_and_explicit_used() -> None:
    b = Builder()
    mixed = b.all_gather(b.call(aten.add.Tensor, b.placeholder("x"), b.placeholder("y")), role=PARAM_UNSHARD)
    twin = b.all_gather(b.placeholder("act"), role="tp.activation_gather")
    plain = b.all_gather(b.placeholder("w"))
    reduced = b.all_reduce(b.placeholder("g"), group="replicate", role=GRAD_REPLICATE_REDUCE)
    b.output(mixed.wait, twin.wait, plain.wait, reduced.wait)
    report = classify_report(b.module())
    assert report.identities[mixed.start] == identity(PARAM_UNSHARD)
    assert report.identities[twin.start] == identity("tp.activation_gather")
    assert [(m.node, m.structure_role) for m in report.mismatches] == [
        (mixed.start, None),
        (twin.start, PARAM_UNSHARD),
    ]
    assert "structure says no FSDP collective" in report.mismatches[0].detail


@pytest.mark.parametrize(
    ("raw", "code"),
    [
        (payload(GRAD_REDUCE_SHARD), codes.ROLE_TRANSPORT),
        (payload(PARAM_UNSHARD, group="other"), codes.GROUP_MISMATCH),
        (payload("unshard"), codes.BAD_ROLE),
        ("unshard", codes.WRONG_TYPE),
    ],
)
def test_malformed_is_absent_and_structure_decides(raw: object, code: codes.Code) -> None:
    gm, one, two = _two_gathers(None, PARAM_UNSHARD)
    annotate(one, raw)
    report = classify_report(gm)
    found = report.identities[one]
    assert found is not None and (found.role, found.source) == (PARAM_UNSHARD, Source.INFERRED)
    assert report.absences[one].kind == "malformed" and report.absences[one].code is code
    assert two not in report.absences


def test_a_wrong_role_is_no_evidence_of_another() -> None:
    b = Builder()
    scattered = b.reduce_scatter(b.placeholder("g"))
    mixed = b.call(aten.mm.default, scattered.wait, b.placeholder("w", (8, 8)))
    b.output(mixed)
    annotate(scattered.start, payload(PARAM_UNSHARD))
    report = classify_report(b.module())
    assert report.identities[scattered.start] is None
    assert report.absences[scattered.start].code is codes.ROLE_TRANSPORT


def test_a_forward_payload_that_fits_a_backward_gather_is_no_evidence() -> None:
    gm, one, _ = _two_gathers(PARAM_UNSHARD, PARAM_UNSHARD)
    one.meta["partitioner_tag"] = "is_backward"
    report = classify_report(gm)
    found = report.identities[one]
    assert found is not None and found.source is Source.INFERRED, "structure may say so, the payload may not"
    assert report.absences[one].code is codes.SEQ_NR_COPY
    one.meta["partitioner_tag"] = "is_forward"
    assert classify(gm)[one] == identity(PARAM_UNSHARD)


def test_a_stored_inference_is_a_cache_only() -> None:
    b = Builder()
    mixed = b.all_gather(b.call(aten.add.Tensor, b.placeholder("x"), b.placeholder("y")))
    plain = b.all_gather(b.placeholder("w"))
    b.output(mixed.wait, plain.wait)
    gm = b.module()
    stored = identity(PARAM_UNSHARD, producer="earlier").inferred()
    for c in (mixed, plain):
        stamp(c.start, stored)
    found = classify(gm)
    assert found[mixed.start] is None, "structure decides again"
    again = found[plain.start]
    assert again is not None and again.producer == "structure" and again.source is Source.INFERRED


def test_a_bucket_keeps_what_was_inferred_of_its_members() -> None:
    b = Builder()
    bucket = b.all_gather(b.cat([b.view(b.placeholder(n), [32]) for n in ("w0", "w1", "w2")]))
    b.output(bucket.wait)
    gm = b.module()
    merged = identity(PARAM_UNSHARD, producer="bucketing").inferred()
    stamp(bucket.start, merged)
    assert classify(gm)[bucket.start] is None
    store.set_members(bucket.start, BucketRecord("bucketing", (Member("a", merged), Member("b", merged))))
    assert classify(gm)[bucket.start] == merged


@pytest.mark.parametrize("code", [codes.DROPPED_MIXED, codes.DROPPED_OPAQUE, codes.DROPPED_DECOMPOSED])
def test_a_deliberate_loss_is_not_guessed_back(code: codes.Code) -> None:
    gm, one, two = _two_gathers()
    store.drop(one, code, "dedup")
    report = classify_report(gm)
    assert report.identities[one] is None and report.identities[two] is not None
    assert report.absences[one] == store.Absence("dropped", code, "dedup")


def test_what_an_unknown_pass_lost_may_be_inferred() -> None:
    gm, one, _ = _two_gathers()
    store.drop(one, codes.DROPPED_UNKNOWN, "someone")
    report = classify_report(gm)
    found = report.identities[one]
    assert found is not None and not found.explicit
    assert report.absences[one].kind == "dropped", "the report still says what happened"


def test_notes() -> None:
    b = Builder()
    group = b.graph.placeholder("group")
    gathered = b.all_gather(b.placeholder("w"), group=group, role=PARAM_UNSHARD)
    gathered.start.meta["custom"] = {store.KEY: payload(PARAM_UNSHARD, group="dp")}
    b.output(gathered.wait)
    report = classify_report(b.module())
    assert report.identities[gathered.start] == identity(PARAM_UNSHARD, group="dp")
    assert report.notes == ((gathered.start, codes.GROUP_UNVERIFIED),)


def test_registered_rows_count() -> None:
    gm, one, _ = _two_gathers("tp.odd", PARAM_UNSHARD)
    table = DEFAULT_ROLES.extend({"tp.odd": {Transport.ALL_REDUCE}})
    report = classify_report(gm, roles=table)
    assert report.absences[one].code is codes.ROLE_TRANSPORT
    assert classify(gm)[one] == identity("tp.odd")


def test_rules_are_checked() -> None:
    with pytest.raises(ValueError, match="expected rules 'extended' or 'compatible', found 'exact'"):
        classify(_two_gathers()[0], rules="exact")  # type: ignore[arg-type]


def test_the_result_is_read_only() -> None:
    gm, one, _ = _two_gathers()
    with pytest.raises(TypeError):
        classify(gm)[one] = None  # type: ignore[index]


def test_no_collectives() -> None:
    b = Builder()
    b.output(b.placeholder("x"))
    report = classify_report(b.module())
    assert not report.identities and not report.absences and not report.structure_built


def test_sub_graphs_are_classified() -> None:
    inner, one, two = _two_gathers(PARAM_UNSHARD)
    root = torch.nn.Module()
    root.body = inner
    graph = fx.Graph()
    x = graph.placeholder("x")
    outer = graph.call_function(C.all_reduce.default, (x, "sum", "dp"))
    graph.output(graph.call_function(torch.ops.higher_order.invoke_subgraph, (graph.get_attr("body"), "b", x, outer)))
    gm = fx.GraphModule(root, graph)
    found = classify(gm)
    assert [i and i.role for i in found.values()] == [GRAD_REPLICATE_REDUCE, PARAM_UNSHARD, PARAM_UNSHARD]
    inside = [n for n in found if n.graph is gm.body.graph]
    assert [n.name for n in inside] == [one.name, two.name]
