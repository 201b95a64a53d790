"""Which nodes of a joint graph the reshard pass marks for recompute: the gathers it was asked for, and their chains."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import fx
from torch.utils.checkpoint import CheckpointPolicy

import fsdp_hooks.reshard
from collective_identity import GRAD_REDUCE_SHARD, PARAM_UNSHARD
from inductor_passes.contract import PassContext
from inductor_passes.lite_mode import LiteState
from inductor_passes.options import BackendOptions
from inductor_passes.reshard import RESHARD_KEY, Reshard
from tests.graphs import Builder, Collective

aten = torch.ops.aten
CONTEXT = PassContext(kind="joint", lite=LiteState.OFF, observe=False, options=BackendOptions(), log=None)


def asked(collective: Collective) -> Collective:
    """With the producer's mark, beside the payload."""
    custom = collective.start.meta.setdefault("custom", {})
    collective.start.meta["custom"] = {**custom, RESHARD_KEY: True}
    return collective


def marked(b: Builder, context: PassContext = CONTEXT) -> set[str]:
    gm = b.module()
    outcome = Reshard()(gm, context)
    assert outcome.changed is False
    found = set()
    for node in gm.graph.nodes:
        if "recompute" in node.meta:
            assert node.meta["recompute"] is CheckpointPolicy.MUST_RECOMPUTE
            found.add(node.name)
    assert outcome.summary["marked"] == len(found)
    return found


def names(*nodes: fx.Node) -> set[str]:
    return {node.name for node in nodes}


def test_producer_and_pass_mean_the_same_key() -> None:
    """The packages do not import each other."""
    assert RESHARD_KEY == fsdp_hooks.reshard.RESHARD_KEY


def test_a_gather_with_what_it_is_made_from_and_what_only_rearranges_it() -> None:
    b = Builder()
    x, w = b.placeholder("x", (3, 8)), b.placeholder("w", (3, 8))
    cast = b.cast(w, torch.bfloat16)
    padded = b.pad(cast, [0, 0, 0, 1])
    gather = asked(b.all_gather(padded, role=PARAM_UNSHARD))
    cut = b.slice(gather.wait, 0, 7)
    back = b.cast(cut, torch.float32)
    turned = b.call(aten.permute.default, back, [1, 0])
    product = b.call(aten.mm.default, x, turned)
    activated = b.call(aten.relu.default, product)
    b.output(activated)
    assert marked(b) == names(cast, padded, gather.start, gather.wait, cut, back, turned)


def test_arithmetic_on_a_parameter_is_not_its_storage() -> None:
    """A pointwise result is another tensor: saving or recomputing it is the partitioner's choice."""
    b = Builder()
    gather = asked(b.all_gather(b.placeholder("w"), role=PARAM_UNSHARD))
    halved = b.call(aten.mul.Tensor, gather.wait, 0.5)
    b.output(b.view(halved, [64]))
    assert marked(b) == names(gather.start, gather.wait)


def test_two_parameters_in_one_cat_are_not_marked_beyond_it() -> None:
    b = Builder()
    one = asked(b.all_gather(b.placeholder("v"), role=PARAM_UNSHARD))
    two = asked(b.all_gather(b.placeholder("w"), role=PARAM_UNSHARD))
    b.output(b.cat([one.wait, two.wait]))
    assert marked(b) == names(one.start, one.wait, two.start, two.wait)


def test_backward_users_are_not_marked() -> None:
    b = Builder()
    gather = asked(b.all_gather(b.placeholder("w"), role=PARAM_UNSHARD))
    view = b.view(gather.wait, [64])
    used = b.view(gather.wait, [16, 4])
    used.meta["partitioner_tag"] = "is_backward"
    b.output(view, used)
    assert marked(b) == names(gather.start, gather.wait, view)


def test_what_was_not_asked_for_stays() -> None:
    """No mark; a mark on another role; a mark that is not exactly True; a mark without an identity."""
    b = Builder()
    plain = b.all_gather(b.placeholder("w0"), role=PARAM_UNSHARD)
    other = asked(b.all_gather(b.placeholder("w1"), group="tp", role="tp.gather"))
    off = asked(b.all_gather(b.placeholder("w2"), role=PARAM_UNSHARD))
    off.start.meta["custom"] = {**off.start.meta["custom"], RESHARD_KEY: 1}
    scatter = asked(b.reduce_scatter(plain.wait, role=GRAD_REDUCE_SHARD))
    wrong = asked(b.all_reduce(b.placeholder("w3"), role=PARAM_UNSHARD))
    b.output(plain.wait, other.wait, off.wait, scatter.wait, wrong.wait)
    assert marked(b) == set()


@pytest.mark.parametrize(
    "context", [replace(CONTEXT, observe=True), replace(CONTEXT, lite=LiteState.FULL)], ids=["observe", "lite"]
)
def test_it_marks_where_nothing_may_be_optimised(context: PassContext) -> None:
    """What is freed after forward is the producer's promise, not an optimisation."""
    b = Builder()
    gather = asked(b.all_gather(b.placeholder("w"), role=PARAM_UNSHARD))
    b.output(gather.wait)
    assert marked(b, context) == names(gather.start, gather.wait)


def test_two_gathers_of_one_cast_mark_it_once() -> None:
    b = Builder()
    cast = b.cast(b.placeholder("w"), torch.bfloat16)
    one, two = (asked(b.all_gather(cast, group=group, role=PARAM_UNSHARD)) for group in ("dp", "other"))
    b.output(one.wait, two.wait)
    assert marked(b) == names(cast, one.start, one.wait, two.start, two.wait)


def test_a_copy_that_one_rank_makes_for_itself_and_its_views() -> None:
    b = Builder()
    x, w = b.placeholder("x", (8, 8)), b.placeholder("w", (8, 8))
    cast = b.cast(w, torch.bfloat16)
    cast.meta["custom"] = {RESHARD_KEY: True}
    turned = b.call(aten.t.default, cast)
    other = b.cast(x, torch.bfloat16)
    product = b.call(aten.mm.default, other, turned)
    product.meta["custom"] = {RESHARD_KEY: True}  # computed: whatever says so, it is no copy
    b.output(product)
    assert marked(b) == names(cast, turned)


def test_what_a_sub_graph_gathers_is_marked_there() -> None:
    b, outer = Builder(), Builder()
    gather = asked(b.all_gather(b.placeholder("w"), role=PARAM_UNSHARD))
    b.output(gather.wait)
    outer.root.body = b.module()
    w, body = outer.placeholder("w"), outer.graph.get_attr("body")
    outer.output(outer.graph.call_function(torch.ops.higher_order.invoke_subgraph, (body, "body", w)))
    outcome = Reshard()(outer.module(), CONTEXT)
    assert outcome.summary == {"resharded": 1, "marked": 2}
    assert "recompute" in gather.start.meta and "recompute" in gather.wait.meta
