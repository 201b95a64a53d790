"""Which word counts, the producer's or structure's, and what that makes of process groups."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import fx

from collective_identity import (
    GRAD_REDUCE_SHARD,
    GRAD_REPLICATE_REDUCE,
    PARAM_UNSHARD,
    Identity,
    Source,
    classify,
    classify_report,
    codes,
    stamp,
    store,
)
from collective_identity.compat import torch_version
from tests.graphs import Builder, Collective, annotate, aten, identity, payload

Group = Callable[[list[int]], str]
STRUCTURE = "structure"


def roles(gm: fx.GraphModule, *asked: Collective, rules: Any = "extended") -> list[str | None]:
    found = classify(gm, rules=rules)
    return [None if (i := found[one.start]) is None else i.role for one in asked]


def sources(gm: fx.GraphModule, *asked: Collective) -> list[Source | None]:
    found = classify(gm)
    return [None if (i := found[one.start]) is None else i.source for one in asked]


def mixed(b: Builder, name: str) -> fx.Node:
    """Two inputs added up: structure sees no parameter in it."""
    return b.call(aten.add.Tensor, b.placeholder(f"{name}0"), b.placeholder(f"{name}1"))


# --- one collective --------------------------------------------------------------------------------------

PAYLOADS = {
    "none": None,
    "malformed": payload("unshard"),
    "explicit fsdp": payload(PARAM_UNSHARD),
    "explicit other": payload("tp.activation_gather"),
    "inferred fsdp": payload(PARAM_UNSHARD, source="inferred", producer="earlier"),
    "inferred other": payload("tp.activation_gather", source="inferred", producer="earlier"),
}


@pytest.mark.parametrize("looks_like_fsdp", [True, False])
@pytest.mark.parametrize("kind", PAYLOADS)
def test_the_order(kind: str, looks_like_fsdp: bool) -> None:
    """Explicit, then structure; a stored inference is neither, and never becomes explicit."""
    b = Builder()
    asked = b.all_gather(b.placeholder("w") if looks_like_fsdp else mixed(b, "x"))
    other = b.all_gather(b.placeholder("other"), group="another")
    b.output(asked.wait, other.wait)
    if PAYLOADS[kind] is not None:
        annotate(asked.start, PAYLOADS[kind])
    report = classify_report(b.module())

    guess = Identity(1, PARAM_UNSHARD, Source.INFERRED, STRUCTURE, "dp") if looks_like_fsdp else None
    said = {"explicit fsdp": identity(PARAM_UNSHARD), "explicit other": identity("tp.activation_gather")}.get(kind)
    assert report.identities[asked.start] == (said or guess)
    doubted = said is not None and (said.role == PARAM_UNSHARD) != looks_like_fsdp
    assert [m.node for m in report.mismatches] == [asked.start] * doubted
    absence = report.absences.get(asked.start)
    if kind == "malformed":
        assert absence is not None and (absence.kind, absence.code) == ("malformed", codes.BAD_ROLE)
    else:
        assert absence == (store.NEVER_HAD if said is None and guess is None else None)


@pytest.mark.parametrize("role", [PARAM_UNSHARD, "user.weights"])
def test_classifying_twice_changes_nothing(role: str) -> None:
    b = Builder()
    one, two = b.all_gather(b.placeholder("w"), role=role), b.all_gather(b.placeholder("v"))
    b.output(one.wait, two.wait)
    gm = b.module()
    first = classify(gm)
    stored = first[two.start]
    assert stored is not None and stored.source is Source.INFERRED
    stamp(two.start, stored)
    assert classify(gm) == first, "what was inferred and stored is inferred again, no more"


# --- process groups --------------------------------------------------------------------------------------


def test_a_replicate_axis_on_another_group_than_the_gathers() -> None:
    """HSDP: structure knows nothing of the replicate group; the producer does, for each collective it marks."""
    b = Builder()
    gathered = b.all_gather(b.placeholder("w"), group="shard")
    scattered = b.reduce_scatter(b.placeholder("g"), group="shard")
    reduced = b.all_reduce(scattered.wait, group="replicate")
    loss = b.all_reduce(b.placeholder("loss", ()), group="shard")
    norm = b.all_reduce(b.placeholder("norm", ()), group="replicate")
    b.output(gathered.wait, reduced.wait, loss.wait, norm.wait)
    gm = b.module()
    assert roles(gm, gathered, scattered, reduced, norm) == [PARAM_UNSHARD, GRAD_REDUCE_SHARD, None, None]
    assert roles(gm, loss) == [GRAD_REPLICATE_REDUCE], "on the shard group, as torch would say"
    stamp(reduced.start, identity(GRAD_REPLICATE_REDUCE, group="replicate"))
    assert roles(gm, reduced, norm) == [GRAD_REPLICATE_REDUCE, None], "a number is no shard's gradient"
    assert roles(gm, norm, rules="compatible") == [GRAD_REPLICATE_REDUCE if torch_version() >= (2, 13) else None]
    assert sources(gm, reduced, norm) == [Source.EXPLICIT, None]
    for one, role in ((norm, "user.grad_norm"), (loss, "user.loss")):
        stamp(one.start, identity(role))
    assert roles(gm, gathered, scattered, reduced, loss, norm) == [
        PARAM_UNSHARD,
        GRAD_REDUCE_SHARD,
        GRAD_REPLICATE_REDUCE,
        "user.loss",
        "user.grad_norm",
    ]


def test_separate_communicators_over_the_same_ranks(new_group: Group) -> None:
    """A group is its name: what runs on the other communicator is not FSDP's, and a payload cannot say so."""
    first, second = new_group([0, 1]), new_group([0, 1])
    b = Builder()
    gathered = b.all_gather(b.placeholder("w"), group=first, role=PARAM_UNSHARD)
    same, other = (b.all_reduce(b.placeholder(f"x{g}"), group=g) for g in (first, second))
    b.output(gathered.wait, same.wait, other.wait)
    gm = b.module()
    assert roles(gm, same, other) == [GRAD_REPLICATE_REDUCE, None]
    annotate(other.start, payload(GRAD_REPLICATE_REDUCE, group=first))
    report = classify_report(gm)
    assert report.identities[other.start] is None
    assert report.absences[other.start].code is codes.GROUP_MISMATCH
    annotate(other.start, payload(GRAD_REPLICATE_REDUCE, group=second))
    assert roles(gm, other) == [GRAD_REPLICATE_REDUCE]


def test_a_backward_graph_with_no_gather() -> None:
    """Nothing was resharded: torch finds no FSDP group there; a reduce-scatter marks one as well."""
    b = Builder()
    scattered = b.reduce_scatter(b.placeholder("g"), group="shard")
    reduced = b.all_reduce(scattered.wait, group="replicate")
    loss = b.all_reduce(b.placeholder("loss"), group="shard")
    b.output(reduced.wait, loss.wait)
    gm = b.module()
    assert roles(gm, scattered, loss, reduced) == [GRAD_REDUCE_SHARD, GRAD_REPLICATE_REDUCE, None]
    assert roles(gm, loss, reduced, rules="compatible") == [None, None]
    stamp(scattered.start, identity(GRAD_REDUCE_SHARD, group="shard"))
    assert roles(gm, loss, rules="compatible") == ([GRAD_REPLICATE_REDUCE] if torch_version() >= (2, 13) else [None]), (
        "an explicit role marks the group under either rule set"
    )


def test_gathers_and_gradients_on_different_groups() -> None:
    """Separate communicators for the two directions."""
    b = Builder()
    gathered = b.all_gather(b.placeholder("w"), group="gathers")
    scattered = b.reduce_scatter(b.placeholder("g"), group="gradients")
    on = {g: b.all_reduce(b.placeholder(f"x_{g}"), group=g) for g in ("gathers", "gradients", "neither")}
    b.output(gathered.wait, scattered.wait, *(one.wait for one in on.values()))
    gm = b.module()
    assert roles(gm, *on.values()) == [GRAD_REPLICATE_REDUCE, GRAD_REPLICATE_REDUCE, None]
    stamp(scattered.start, identity("tp.output_reduce_scatter"))
    assert roles(gm, *on.values()) == [GRAD_REPLICATE_REDUCE, None, None], "what is settled otherwise marks no group"
    stamp(gathered.start, identity("tp.activation_gather"))
    assert roles(gm, *on.values()) == [None, None, None]


def test_a_group_is_marked_by_a_resolved_role_not_by_a_look() -> None:
    """One gather that looks like a parameter's does not make its whole group FSDP's once it is known to be none."""
    b = Builder()
    looks = b.all_gather(b.placeholder("act"), group="tp", role="tp.activation_gather")
    truly = b.all_gather(mixed(b, "w"), group="dp", role=PARAM_UNSHARD)
    on_tp, on_dp = (b.all_reduce(b.placeholder(f"x_{g}"), group=g) for g in ("tp", "dp"))
    b.output(looks.wait, truly.wait, on_tp.wait, on_dp.wait)
    gm = b.module()
    assert roles(gm, on_tp, on_dp) == [None, GRAD_REPLICATE_REDUCE]
    report = classify_report(gm)
    assert [m.node for m in report.mismatches] == [looks.start, truly.start]


def test_explicit_roles_mark_groups_across_sub_graphs() -> None:
    inner, outer = Builder(), fx.Graph()
    reduced = inner.all_reduce(inner.placeholder("x"), group="replicate")
    inner.output(reduced.wait)
    root = torch.nn.Module()
    root.body = inner.module()
    x = outer.placeholder("x")
    start = outer.call_function(torch.ops._c10d_functional.all_reduce.default, (x, "avg", "replicate"))
    call = outer.call_function(torch.ops.higher_order.invoke_subgraph, (outer.get_attr("body"), "body", x))
    outer.output((start, call))
    gm = fx.GraphModule(root, outer)
    assert list(classify(gm).values()) == [None, None]
    stamp(start, identity(GRAD_REPLICATE_REDUCE))
    found = list(classify(gm).values())
    assert found[1] == Identity(1, GRAD_REPLICATE_REDUCE, Source.INFERRED, STRUCTURE, "replicate")


def test_a_malformed_role_marks_no_group() -> None:
    b = Builder()
    claimed = b.all_gather(mixed(b, "w"))
    annotate(claimed.start, payload(PARAM_UNSHARD, version=9))
    reduced = b.all_reduce(b.placeholder("x"))
    b.output(claimed.wait, reduced.wait)
    assert roles(b.module(), claimed, reduced) == [None, None]


def test_a_group_without_a_name_marks_nothing() -> None:
    """Two group nodes that resolve to no name are not the same group for all that."""
    b = Builder()
    gathered = b.all_gather(b.placeholder("w"), group=b.graph.placeholder("g0"), role=PARAM_UNSHARD)
    reduced = b.all_reduce(b.placeholder("x"), group=b.graph.placeholder("g1"))
    b.output(gathered.wait, reduced.wait)
    assert roles(b.module(), gathered, reduced) == [PARAM_UNSHARD, None]


@pytest.mark.parametrize("rules", ["extended", "compatible"])
def test_both_rule_sets_obey_the_same_order(rules: Any) -> None:
    b = Builder()
    explicit = b.all_gather(mixed(b, "w"), role=PARAM_UNSHARD)
    other = b.all_gather(b.placeholder("act"), role="tp.activation_gather")
    plain = b.all_gather(b.placeholder("v"))
    b.output(explicit.wait, other.wait, plain.wait)
    assert roles(b.module(), explicit, other, plain, rules=rules) == [
        PARAM_UNSHARD,
        "tp.activation_gather",
        PARAM_UNSHARD,
    ]
