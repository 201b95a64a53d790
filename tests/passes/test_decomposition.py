"""A collective in another form keeps its identity; fused, lowered or split into something else it loses it by name."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch._inductor.fx_passes.control_dependencies  # defines control_deps
import torch.distributed._symmetric_memory  # registers symm_mem
from torch import fx

from collective_identity import absence_of, codes, identity_of, store
from inductor_passes.decomposition import replaced, split
from tests.graphs import Builder, aten, identity

C, S = torch.ops._c10d_functional, torch.ops.symm_mem
UNSHARD, REDUCE, REPLICATE = "fsdp.param_unshard", "fsdp.grad_reduce_shard", "fsdp.grad_replicate_reduce"


def wrapped(b: Builder, target: Any, *args: Any) -> fx.Node:
    """A collective inside ``control_deps``, as the overlap scheduler leaves it."""
    inner = fx.Graph()
    inner.output(inner.call_function(target, (inner.placeholder("x"), *args[1:])))
    name = f"body{len(b.graph.nodes)}"
    setattr(b.root, name, fx.GraphModule(torch.nn.Module(), inner))
    body = b.graph.create_node("get_attr", name)
    return b.graph.call_function(torch.ops.higher_order.control_deps, ((args[0],), body, args[0]))


def new(b: Builder, form: str, x: fx.Node) -> fx.Node:
    call = b.graph.call_function
    return {
        "plain": lambda: call(C.all_gather_into_tensor.default, (x, 2, "dp")),
        "out": lambda: call(C.all_gather_into_tensor_out.default, (x, 2, "dp"), {"out": x}),
        "low_contention": lambda: call(S._low_contention_all_gather.default, (x, "dp")),
        "control_deps": lambda: wrapped(b, C.all_gather_into_tensor.default, x, 2, "dp"),
        "fused": lambda: call(S.fused_all_gather_matmul.default, (x, [x], 0, "dp")),
        "reduce": lambda: call(C.all_reduce.default, (x, "sum", "dp")),
        "copy": lambda: call(aten.clone.default, (x,)),
    }[form]()


@pytest.mark.parametrize("form", ["plain", "out", "low_contention", "control_deps"])
def test_another_form_of_the_same_transport_keeps_it_by_value(form: str) -> None:
    b = Builder()
    old = b.all_gather(b.placeholder("w"), role=UNSHARD, params=("w",)).start
    node = new(b, form, old.args[0])  # type: ignore[arg-type]
    node.meta["custom"] = old.meta["custom"]  # as upstream leaves it
    fx.GraphModule(b.root, b.graph)
    outcome = replaced(old, node, pass_name="lowering")
    assert outcome.code is None and identity_of(node) == identity(UNSHARD, params=("w",))
    assert node.meta["custom"] is not old.meta["custom"]


@pytest.mark.parametrize("form", ["fused", "reduce", "copy"])
def test_anything_else_loses_it_as_opaque(form: str) -> None:
    b = Builder()
    old = b.all_gather(b.placeholder("w"), role=UNSHARD).start
    node = new(b, form, old.args[0])  # type: ignore[arg-type]
    node.meta["custom"] = old.meta["custom"]
    replaced(old, node, pass_name="lowering")
    absence = absence_of(node)
    assert absence is not None and (absence.kind, absence.code, absence.pass_name) == (
        "dropped", codes.DROPPED_OPAQUE, "lowering"
    )
    assert not store.has_payload(node) and UNSHARD in absence.detail


def test_nothing_is_lost_where_nothing_was_and_an_earlier_loss_stays() -> None:
    b = Builder()
    plain, dropped = (b.all_gather(b.placeholder(n)).start for n in "ab")
    store.drop(dropped, codes.DROPPED_MIXED, "somebody", "a with b")
    first, second = (new(b, "low_contention", n.args[0]) for n in (plain, dropped))  # type: ignore[arg-type]
    for old, node in ((plain, first), (dropped, second)):
        assert replaced(old, node, pass_name="lowering").code is None
    assert absence_of(first) is store.NEVER_HAD
    assert absence_of(second) == store.Absence("dropped", codes.DROPPED_MIXED, "somebody", "a with b")


def test_the_provenance_of_a_bucket_goes_along() -> None:
    b = Builder()
    old = b.all_gather(b.placeholder("w"), role=UNSHARD).start
    record = store.BucketRecord("bucketing", (store.Member("a", identity(UNSHARD)),))
    store.set_members(old, record)
    node = new(b, "low_contention", old.args[0])  # type: ignore[arg-type]
    replaced(old, node, pass_name="lowering")
    assert store.members_of(node) is record


@pytest.mark.parametrize("role", [REPLICATE, "tp.output_reduce"])
def test_an_all_reduce_split_into_scatter_and_gather_is_on_neither(role: str) -> None:
    b = Builder()
    x = b.placeholder("x")
    old = b.all_reduce(x, role=role).start
    scatter, gather = b.reduce_scatter(x), b.all_gather(x)
    outcomes = split(old, [scatter.start, scatter.wait, gather.start, gather.wait], pass_name="decomp")
    assert [o.code for o in outcomes] == [codes.DROPPED_DECOMPOSED, None, codes.DROPPED_DECOMPOSED, None]
    for part in (scatter.start, gather.start):
        absence = absence_of(part)
        assert absence is not None and (absence.kind, absence.code) == ("dropped", codes.DROPPED_DECOMPOSED)
        assert identity_of(part) is None
    assert absence_of(scatter.wait) is None


def test_a_gather_in_pieces_is_on_each_piece() -> None:
    b = Builder()
    x = b.placeholder("x")
    old = b.all_gather(x, role=UNSHARD, params=("w",)).start
    parts = [b.all_gather(b.slice(x, i, i + 1)).start for i in range(4)]
    split(old, parts, pass_name="pieces")
    assert [identity_of(p) for p in parts] == [identity(UNSHARD, params=("w",))] * 4
    assert len({id(p.meta["custom"]) for p in parts}) == 4, "each a dict of its own"


def test_only_a_collective_can_be_split() -> None:
    b = Builder()
    with pytest.raises(ValueError, match="expected a collective to split"):
        split(b.placeholder("x"), [], pass_name="decomp")


def test_torchs_own_low_contention_lowering_and_ours_agree_on_what_is_a_gather() -> None:
    from collective_identity import Transport, launch_of

    b = Builder()
    x = b.placeholder("x")
    b.root = torch.nn.Module()
    for form in ("low_contention", "control_deps", "out"):
        node = new(b, form, x)
        fx.GraphModule(b.root, b.graph)
        launch = launch_of(node)
        assert launch is not None and launch.transport is Transport.ALL_GATHER
    assert launch_of(new(b, "fused", x)) is None
