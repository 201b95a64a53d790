"""Where an identity lives on a node: reading, stamping, dropping, and never into a dict somebody else sees."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import fx
from torch.fx.experimental.proxy_tensor import make_fx

from collective_identity import (
    GRAD_REDUCE_SHARD,
    PARAM_UNSHARD,
    BucketRecord,
    Member,
    absence_of,
    clear,
    codes,
    identity_of,
    members_of,
    stamp,
    start_nodes,
    store,
)
from tests.graphs import BACKWARD_PAYLOAD_KEY, PAYLOAD_KEY, Builder, annotate, aten, identity, payload

UNSHARD, REDUCE = payload(PARAM_UNSHARD), payload(GRAD_REDUCE_SHARD)


def _gather(**marks: Any) -> fx.Node:
    b = Builder()
    gathered = b.all_gather(b.placeholder("w"), group="dp")
    b.output(gathered.wait)
    gathered.start.meta.update(marks)
    return gathered.start


def _scatter(**marks: Any) -> fx.Node:
    b = Builder()
    scattered = b.reduce_scatter(b.placeholder("g"), group="dp")
    b.output(scattered.wait)
    scattered.start.meta.update(marks)
    return scattered.start


def test_the_keys_are_the_contracts() -> None:
    assert (store.KEY, store.BACKWARD_KEY) == (PAYLOAD_KEY, BACKWARD_PAYLOAD_KEY)


def test_stamp_and_read() -> None:
    node = _gather()
    assert identity_of(node) is None and absence_of(node) == store.Absence("never_had")
    stamp(node, identity(PARAM_UNSHARD, group="dp"))
    assert identity_of(node) == identity(PARAM_UNSHARD, group="dp") and absence_of(node) is None
    assert node.meta["custom"] == {PAYLOAD_KEY: payload(PARAM_UNSHARD, group="dp")}
    clear(node)
    assert identity_of(node) is None and "custom" not in node.meta
    assert absence_of(node) == store.Absence("never_had")


def test_other_custom_keys_survive() -> None:
    node = _gather(custom={"mine": 1})
    stamp(node, identity(PARAM_UNSHARD))
    clear(node)
    assert node.meta["custom"] == {"mine": 1}


def test_stamping_something_else_is_refused() -> None:
    with pytest.raises(TypeError, match="expected an Identity for node 'all_gather_into_tensor_default'"):
        stamp(_gather(), UNSHARD)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("raw", "code"),
    [
        ("fsdp.param_unshard", codes.WRONG_TYPE),
        (payload(GRAD_REDUCE_SHARD), codes.ROLE_TRANSPORT),
        (payload(PARAM_UNSHARD, group="tp"), codes.GROUP_MISMATCH),
        ({"role": PARAM_UNSHARD}, codes.MISSING_FIELD),
    ],
)
def test_a_refuted_payload_is_absent_with_its_code(raw: object, code: codes.Code) -> None:
    node = annotate(_gather(), raw)
    absence = absence_of(node)
    assert identity_of(node) is None
    assert absence is not None and (absence.kind, absence.code) == ("malformed", code) and absence.detail


def test_custom_may_be_anything() -> None:
    for custom in (None, 1, "x", [PAYLOAD_KEY], {}):
        node = _gather(custom=custom)
        assert identity_of(node) is None and not store.has_payload(node)
        stamp(node, identity(PARAM_UNSHARD))
        assert identity_of(node) is not None


def test_only_start_nodes_have_an_identity() -> None:
    start = _gather()
    wait = next(iter(start.users))
    stamp(wait, identity(PARAM_UNSHARD))
    assert identity_of(wait) is None and absence_of(wait) is None and store.has_payload(wait)


# --- the backward key ------------------------------------------------------------------------------------

BACKWARD = [{"partitioner_tag": "is_backward"}, {"autograd_backward": True}]
TWIN = [
    {"partitioner_tag": "is_forward"},
    {"partitioner_tag": "is_forward", "autograd_backward": True},
    {"autograd_backward": False},
    {},
]


@pytest.mark.parametrize("marks", BACKWARD)
def test_a_backward_node_reads_the_backward_key_alone(marks: dict[str, Any]) -> None:
    node = annotate(_scatter(**marks), UNSHARD, backward=REDUCE)
    assert identity_of(node) == identity(GRAD_REDUCE_SHARD)
    fits = annotate(_scatter(**marks), REDUCE)
    absence = absence_of(fits)
    assert identity_of(fits) is None, "a forward payload that merely fits is no proof"
    assert absence is not None and absence.code is codes.SEQ_NR_COPY


@pytest.mark.parametrize("marks", BACKWARD)
def test_a_gather_in_backward_needs_proof_of_recompute(marks: dict[str, Any]) -> None:
    node = annotate(_gather(**marks), UNSHARD)
    absence = absence_of(node)
    assert identity_of(node) is None and absence is not None and absence.code is codes.SEQ_NR_COPY


@pytest.mark.parametrize("marks", TWIN)
def test_a_recomputed_copy_keeps_its_identity(marks: dict[str, Any]) -> None:
    node = annotate(_gather(**marks), UNSHARD, backward=REDUCE)
    assert identity_of(node) == identity(PARAM_UNSHARD)


def test_a_copy_made_by_rematerialisation_keeps_its_identity() -> None:
    node = annotate(_gather(autograd_backward=True, recompute="MUST_RECOMPUTE"), UNSHARD)
    assert identity_of(node) is None
    node.name = node.name + "_recomputed"
    assert identity_of(node) == identity(PARAM_UNSHARD)
    del node.meta["recompute"]
    assert identity_of(node) is None, "a name alone is no proof"


@pytest.mark.parametrize("marks", BACKWARD)
def test_stamping_a_backward_node_outlasts_another_copy_of_forward_metadata(marks: dict[str, Any]) -> None:
    node = _scatter(**marks)
    stamp(node, identity(GRAD_REDUCE_SHARD))
    node.meta["custom"] = {**node.meta["custom"], PAYLOAD_KEY: UNSHARD}
    assert identity_of(node) == identity(GRAD_REDUCE_SHARD)
    clear(node)
    assert not store.has_payload(node)


def test_a_malformed_backward_payload_does_not_fall_back_to_the_forward_one() -> None:
    node = annotate(_scatter(partitioner_tag="is_backward"), REDUCE, backward=UNSHARD)
    absence = absence_of(node)
    assert absence is not None and absence.code is codes.ROLE_TRANSPORT


# --- losses and provenance -------------------------------------------------------------------------------


def test_a_drop_has_a_name() -> None:
    node = _gather()
    stamp(node, identity(PARAM_UNSHARD))
    store.drop(node, codes.DROPPED_MIXED, "dedup", "fsdp met tp")
    assert identity_of(node) is None
    assert absence_of(node) == store.Absence("dropped", codes.DROPPED_MIXED, "dedup", "fsdp met tp")
    stamp(node, identity(PARAM_UNSHARD))
    assert absence_of(node) is None
    clear(node)
    assert absence_of(node) == store.Absence("never_had")


def test_an_operator_that_swallowed_a_collective_keeps_the_loss() -> None:
    b = Builder()
    node = b.call(aten.relu.default, b.placeholder("x"))
    assert absence_of(node) is None
    store.drop(node, codes.DROPPED_OPAQUE, "fusion")
    assert absence_of(node) == store.Absence("dropped", codes.DROPPED_OPAQUE, "fusion")


def test_provenance_is_one_shared_record() -> None:
    record = BucketRecord("bucketing", (Member("ag_0", identity(PARAM_UNSHARD)), Member("ag_1", None)))
    start = _gather()
    wait = next(iter(start.users))
    for node in (start, wait):
        store.set_members(node, record)
    stamp(start, identity(PARAM_UNSHARD))
    clear(start)
    assert members_of(start) is members_of(wait) is record
    twin = next(n for n in copy.deepcopy(start.graph).nodes if n.name == start.name)
    assert members_of(twin) == record, "a copied graph keeps its provenance"


# --- aliasing: copied nodes share the nested dict ----------------------------------------------


def _copies(graph: fx.Graph) -> dict[str, Callable[[], list[fx.Node]]]:
    def node_copy() -> list[fx.Node]:
        other, env = fx.Graph(), {}
        for n in graph.nodes:
            env[n] = other.node_copy(n, lambda z: env[z])
        return list(other.nodes)

    def graph_copy() -> list[fx.Node]:
        other = fx.Graph()
        other.graph_copy(graph, {})
        return list(other.nodes)

    def deep() -> list[fx.Node]:
        return list(copy.deepcopy(graph).nodes)

    return {"node_copy": node_copy, "graph_copy": graph_copy, "deepcopy": deep}


@pytest.mark.parametrize("how", ["node_copy", "graph_copy", "deepcopy"])
@pytest.mark.parametrize("change", ["stamp", "clear", "drop"])
def test_changing_a_copy_leaves_the_original_alone(how: str, change: str) -> None:
    b = Builder()
    gathered = b.all_gather(b.placeholder("w"), role=PARAM_UNSHARD, params=("w",))
    b.output(gathered.wait)
    start = gathered.start
    twin = next(n for n in _copies(b.graph)[how]() if n.name == start.name)
    assert identity_of(twin) == identity_of(start) == identity(PARAM_UNSHARD, params=("w",))
    before = copy.deepcopy(start.meta["custom"])
    for changed, kept in ((twin, start), (start, twin)):
        if change == "stamp":
            stamp(changed, identity(PARAM_UNSHARD, params=("w",)).inferred())
        elif change == "clear":
            clear(changed)
        else:
            store.drop(changed, codes.DROPPED_OPAQUE, "test")
        assert kept.meta["custom"] == before
        assert identity_of(kept) == identity(PARAM_UNSHARD, params=("w",))
        assert kept.meta["custom"] is not changed.meta.get("custom")
        stamp(changed, identity(PARAM_UNSHARD, params=("w",)))


def test_a_stamp_does_not_share_its_lists() -> None:
    b = Builder()
    one, two = (b.all_gather(b.placeholder(n)).start for n in ("w0", "w1"))
    same = identity(PARAM_UNSHARD, params=("w",))
    stamp(one, same)
    stamp(two, same)
    one.meta["custom"][PAYLOAD_KEY]["params"].append("x")
    assert identity_of(two) == same
    store.put(one, store.raw_payloads(two))
    two.meta["custom"][PAYLOAD_KEY]["params"].append("y")
    assert identity_of(one) == same


# --- retrace -----------------------------------------------------------------------------------


def test_roles_after_a_retrace(new_group: Callable[[list[int]], str]) -> None:
    dp = new_group([0, 2])
    ops = torch.ops._c10d_functional

    def f(w: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return x @ ops.wait_tensor(ops.all_gather_into_tensor(w, 2, dp))

    args = (torch.randn(4, 8), torch.randn(3, 8))
    gm = make_fx(f, tracing_mode="fake")(*args)
    stamp(start_nodes(gm)[0], identity(PARAM_UNSHARD))
    with fx.traceback.preserve_node_meta():
        kept = make_fx(lambda *a: fx.Interpreter(gm).run(*a), tracing_mode="fake")(*args)
    assert [identity_of(n) for n in start_nodes(kept)] == [identity(PARAM_UNSHARD)]
    plain = make_fx(gm, tracing_mode="fake")(*args)
    assert [absence_of(n) for n in start_nodes(plain)] == [store.Absence("never_had")]
    clear(start_nodes(kept)[0])
    assert identity_of(start_nodes(gm)[0]) == identity(PARAM_UNSHARD), "the retraced graph aliases the original"
