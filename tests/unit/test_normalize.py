"""Payloads beside a collective go to its start node, or go."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import fx

from collective_identity import (
    GRAD_REDUCE_SHARD,
    GRAD_REPLICATE_REDUCE,
    PARAM_UNSHARD,
    apply_normalization,
    classify_report,
    codes,
    identity_of,
    normalize,
    plan_normalization,
    stamp,
    store,
)
from tests.graphs import PAYLOAD_KEY, Builder, annotate, aten, counting_edges, identity, payload

UNSHARD = payload(PARAM_UNSHARD, params=["w"])


def _chain() -> tuple[fx.GraphModule, dict[str, fx.Node]]:
    """placeholder → cast → pad → cat → all-gather → wait → slice → view → matmul → output."""
    b = Builder()
    n: dict[str, fx.Node] = {}
    n["placeholder"] = b.placeholder("w", (3, 8))
    n["cast"] = b.cast(n["placeholder"], torch.bfloat16)
    n["pad"] = b.pad(n["cast"], [0, 0, 0, 1])
    n["cat"] = b.cat([n["pad"]])
    gathered = b.all_gather(n["cat"])
    n["start"], n["wait"] = gathered.start, gathered.wait
    n["slice"] = b.slice(n["wait"], 0, 6)
    n["view"] = b.view(n["slice"], [8, 6])
    n["mm"] = b.call(aten.mm.default, b.placeholder("x", (3, 8), dtype=torch.bfloat16), n["view"])
    b.output(n["mm"])
    return b.module(), n


def _metas(gm: fx.GraphModule) -> list[Any]:
    return [copy.deepcopy(n.meta.get("custom")) for n in gm.graph.nodes]


@pytest.mark.parametrize("place", ["placeholder", "cast", "pad", "cat", "wait", "slice", "view"])
def test_a_payload_beside_one_collective_moves_to_it(place: str) -> None:
    gm, n = _chain()
    annotate(n[place], UNSHARD)
    before = _metas(gm)
    plan = plan_normalization(gm)
    assert [(m.origin, m.target, m.code) for m in plan.moves] == [(n[place], n["start"], codes.MOVED_PAYLOAD)]
    assert plan.removals == () and plan.payloads_at(n["start"]) == {PAYLOAD_KEY: UNSHARD}
    assert _metas(gm) == before, "planning wrote"
    assert normalize(gm)
    assert identity_of(n["start"]) == identity(PARAM_UNSHARD, params=("w",))
    assert [m for m in gm.graph.nodes if store.has_payload(m)] == [n["start"]]
    assert not normalize(gm), "a second time changes something"


def test_a_whole_annotated_region_leaves_one_payload() -> None:
    gm, n = _chain()
    for name in ("placeholder", "cast", "pad", "cat", "start", "wait", "slice", "view"):
        annotate(n[name], UNSHARD)
    plan = plan_normalization(gm)
    assert plan.moves == () and {r.code for r in plan.removals} == {codes.REMOVED_PAYLOAD}
    assert normalize(gm)
    assert [m for m in gm.graph.nodes if store.has_payload(m)] == [n["start"]]


def test_equal_payloads_move_as_one() -> None:
    gm, n = _chain()
    for name in ("cast", "wait", "view"):
        annotate(n[name], dict(UNSHARD))
    plan = plan_normalization(gm)
    assert [m.origin for m in plan.moves] == [n["cast"]] and len(plan.removals) == 2
    assert normalize(gm) and identity_of(n["start"]) is not None


def test_different_payloads_for_one_collective_are_ambiguous() -> None:
    gm, n = _chain()
    annotate(n["cast"], UNSHARD)
    annotate(n["view"], payload(PARAM_UNSHARD, params=["other"]))
    plan = plan_normalization(gm)
    assert plan.moves == () and [r.code for r in plan.removals] == [codes.AMBIGUOUS_PAYLOAD] * 2
    assert normalize(gm) and not any(store.has_payload(m) for m in gm.graph.nodes)


def test_a_payload_that_does_not_fit_goes_and_leaves_the_other() -> None:
    gm, n = _chain()
    annotate(n["cast"], UNSHARD)
    annotate(n["wait"], payload(GRAD_REDUCE_SHARD))
    annotate(n["view"], payload(PARAM_UNSHARD, group="another"))
    plan = plan_normalization(gm)
    assert [m.origin for m in plan.moves] == [n["cast"]]
    assert [codes.ROLE_TRANSPORT.id in r.detail or codes.GROUP_MISMATCH.id in r.detail for r in plan.removals] == [
        True,
        True,
    ]


def test_the_start_nodes_own_payload_stays_even_malformed() -> None:
    gm, n = _chain()
    annotate(n["start"], payload(GRAD_REDUCE_SHARD))
    annotate(n["wait"], UNSHARD)
    assert normalize(gm)
    assert identity_of(n["start"]) is None and not store.has_payload(n["wait"])
    absence = store.absence_of(n["start"])
    assert absence is not None and absence.code is codes.ROLE_TRANSPORT


def test_a_recorded_loss_is_not_undone() -> None:
    gm, n = _chain()
    store.drop(n["start"], codes.DROPPED_MIXED, "dedup")
    annotate(n["wait"], UNSHARD)
    assert normalize(gm)
    absence = store.absence_of(n["start"])
    assert absence is not None and absence.kind == "dropped"


def test_computation_carries_no_payload() -> None:
    gm, n = _chain()
    annotate(n["mm"], UNSHARD)
    plan = plan_normalization(gm)
    assert plan.moves == () and [(r.node, r.code) for r in plan.removals] == [(n["mm"], codes.REMOVED_PAYLOAD)]


def test_a_parameter_gathered_twice_is_ambiguous() -> None:
    b = Builder()
    w = b.placeholder("w")
    one, two = b.all_gather(w), b.all_gather(b.cast(w, torch.bfloat16))
    b.output(one.wait, two.wait)
    annotate(w, UNSHARD)
    gm = b.module()
    assert [r.code for r in plan_normalization(gm).removals] == [codes.AMBIGUOUS_PAYLOAD]
    assert normalize(gm) and identity_of(one.start) is None and identity_of(two.start) is None
    annotate(w, UNSHARD)
    for c in (one, two):
        stamp(c.start, identity(PARAM_UNSHARD))
    assert [r.code for r in plan_normalization(gm).removals] == [codes.REMOVED_PAYLOAD], "nothing was lost"


def test_a_wait_belongs_to_its_own_collective_only() -> None:
    b = Builder()
    scattered = b.reduce_scatter(b.placeholder("g"), group="shard")
    reduced = b.all_reduce(scattered.wait, group="replicate")
    b.output(reduced.wait)
    gm = b.module()
    annotate(scattered.wait, payload(GRAD_REDUCE_SHARD))
    annotate(reduced.wait, payload(GRAD_REPLICATE_REDUCE))
    assert normalize(gm)
    assert identity_of(scattered.start) == identity(GRAD_REDUCE_SHARD)
    assert identity_of(reduced.start) == identity(GRAD_REPLICATE_REDUCE)


def test_a_view_between_two_collectives_is_ambiguous() -> None:
    b = Builder()
    scattered = b.reduce_scatter(b.placeholder("g"))
    between = b.view(scattered.wait, [16])
    reduced = b.all_reduce(between, group="replicate")
    b.output(reduced.wait)
    gm = b.module()
    annotate(between, payload(GRAD_REDUCE_SHARD))
    assert [r.code for r in plan_normalization(gm).removals] == [codes.AMBIGUOUS_PAYLOAD]


def test_a_cat_of_two_gathers_is_ambiguous() -> None:
    b = Builder()
    waits = [b.all_gather(b.placeholder(n)).wait for n in ("w0", "w1")]
    both = b.cat(waits)
    b.output(both)
    annotate(both, UNSHARD)
    assert [r.code for r in plan_normalization(b.module()).removals] == [codes.AMBIGUOUS_PAYLOAD]


def test_backward_payloads_move_with_their_key() -> None:
    b = Builder()
    scattered = b.reduce_scatter(b.placeholder("g"))
    b.output(scattered.wait)
    gm = b.module()
    for node in (scattered.start, scattered.wait):
        node.meta["partitioner_tag"] = "is_backward"
    reduce = payload(GRAD_REDUCE_SHARD)
    annotate(scattered.wait, UNSHARD, backward=reduce)
    assert normalize(gm) and identity_of(scattered.start) == identity(GRAD_REDUCE_SHARD)


def test_a_forward_payload_on_a_backward_wait_moves_nowhere() -> None:
    b = Builder()
    scattered = b.reduce_scatter(b.placeholder("g"))
    b.output(scattered.wait)
    gm = b.module()
    for node in (scattered.start, scattered.wait):
        node.meta["partitioner_tag"] = "is_backward"
    annotate(scattered.wait, payload(GRAD_REDUCE_SHARD))
    (removal,) = plan_normalization(gm).removals
    assert codes.SEQ_NR_COPY.id in removal.detail
    assert normalize(gm) and identity_of(scattered.start) is None


def test_sub_graphs_are_normalised_too() -> None:
    inner, n = _chain()
    annotate(n["wait"], UNSHARD)
    root = torch.nn.Module()
    root.body = inner
    graph = fx.Graph()
    x = graph.placeholder("x")
    body = graph.get_attr("body")
    call = graph.call_function(torch.ops.higher_order.invoke_subgraph, (body, "body", x, x))
    annotate(call, UNSHARD)
    graph.output(call)
    gm = fx.GraphModule(root, graph)
    assert normalize(gm)
    start = next(m for m in gm.body.graph.nodes if m.name == n["start"].name)
    assert identity_of(start) is not None and not store.has_payload(call)
    assert start in classify_report(gm).identities


def test_the_bodies_of_wrapped_collectives_hold_no_second_copy() -> None:
    from torch._inductor.fx_passes.control_dependencies import preserve_node_ordering
    from torch.utils._ordered_set import OrderedSet

    b = Builder()
    other = b.call(aten.relu.default, b.placeholder("x"))
    gathered = b.all_gather(b.placeholder("w"), role=PARAM_UNSHARD)
    b.output(gathered.wait, other)
    gm = b.module()
    name = gathered.start.name
    preserve_node_ordering(gm.graph, {gathered.start: OrderedSet([other])})
    wrapped = next(m for m in gm.graph.nodes if m.name == name)
    assert identity_of(wrapped) == identity(PARAM_UNSHARD)
    assert normalize(gm) and not normalize(gm)
    assert identity_of(wrapped) == identity(PARAM_UNSHARD)
    annotate(wrapped.args[2], UNSHARD)  # type: ignore[arg-type]
    assert normalize(gm) and identity_of(wrapped) == identity(PARAM_UNSHARD)


def test_a_plan_for_another_graph_is_refused() -> None:
    gm, n = _chain()
    annotate(n["wait"], UNSHARD)
    other, _ = _chain()
    with pytest.raises(ValueError, match="'wait_tensor_default'.*plan again"):
        apply_normalization(other, plan_normalization(gm))


def test_moving_does_not_write_into_shared_dicts() -> None:
    gm, n = _chain()
    shared = {PAYLOAD_KEY: UNSHARD, "mine": 1}
    for name in ("cast", "wait", "mm"):
        n[name].meta["custom"] = shared
    assert normalize(gm)
    assert shared == {PAYLOAD_KEY: UNSHARD, "mine": 1}
    assert n["wait"].meta["custom"] == {"mine": 1}


def test_classification_sees_the_graph_as_if_normalised() -> None:
    gm, n = _chain()
    annotate(n["cast"], UNSHARD)
    before = _metas(gm)
    report = classify_report(gm)
    assert report.identities[n["start"]] == identity(PARAM_UNSHARD, params=("w",))
    assert not report.structure_built and _metas(gm) == before
    normalize(gm)
    assert classify_report(gm).identities == report.identities


@pytest.mark.parametrize("shape", ["wide", "deep"])
def test_planning_is_linear(shape: str) -> None:
    """Counted in reads of inputs and users, not in seconds."""

    def looks(size: int) -> int:
        b = Builder()
        node = b.placeholder("w")
        outs = []
        for _ in range(size):
            if shape == "deep":
                node = annotate(b.view(node, [4, 8]), UNSHARD)
            else:
                outs.append(annotate(b.view(node, [4, 8]), UNSHARD))
        outs.append(node)
        start = b.all_gather(node).start
        b.output(start, *outs)
        gm = b.module()
        with counting_edges() as edges:
            plan_normalization(gm)
        return edges()

    small, large = looks(50), looks(200)
    assert large <= 5 * small
