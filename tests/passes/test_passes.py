"""The bucket pass of the pipeline merges what a producer named and nothing that only looks like it."""

from __future__ import annotations

from types import SimpleNamespace

import torch
from torch import fx

from collective_identity import GRAD_REPLICATE_REDUCE, PARAM_UNSHARD, identity_of, plan_normalization, start_nodes
from inductor_passes.contract import PassContext
from inductor_passes.lite_mode import LiteState
from inductor_passes.manager import Pipeline
from inductor_passes.options import BackendOptions
from inductor_passes.passes import Bucket, Normalize
from tests.graphs import Builder, annotate, payload


def test_a_loss_all_reduce_on_the_group_of_the_gradients_is_left_alone(fake_world: int) -> None:
    """Structure takes it for a gradient's: the gathers make its group an FSDP group."""
    b = Builder()
    gather = b.all_gather(b.parameter("w"), role=PARAM_UNSHARD)
    named = [b.all_reduce(b.placeholder(f"g{i}"), role=GRAD_REPLICATE_REDUCE) for i in range(2)]
    loss = b.all_reduce(b.placeholder("loss"))
    b.output(gather.wait, *(one.wait for one in named), loss.wait)
    gm = b.module()
    context = PassContext(
        kind="backward", lite=LiteState.OFF, observe=False, options=BackendOptions(order="graph"), log=None
    )
    outcome = Bucket()(gm, context)
    assert outcome.changed
    left = [node for node in start_nodes(gm) if "all_reduce" in str(node.target)]
    assert loss.start in left and len(left) == 2
    (merged,) = (node for node in left if node is not loss.start)
    identity = identity_of(merged)
    assert identity is not None and identity.role == GRAD_REPLICATE_REDUCE and identity.source.value == "explicit"


def test_payloads_of_a_lite_region_stay_where_they_are(fake_world: int) -> None:
    """Of a graph that is not lite itself; its other sub-graphs are normalised."""

    def builder(root: torch.nn.Module | None = None) -> tuple[Builder, fx.Node]:
        b = Builder(root)
        gather = b.all_gather(b.parameter("w"))
        annotate(gather.wait, payload(PARAM_UNSHARD))
        return b, gather.wait

    parts = torch.nn.Module()
    for name in ("lite", "normal"):
        b, wait = builder()
        b.output(wait)
        parts.add_module(name, b.module())
    b, wait = builder(parts)
    b.output(wait, *(b.graph.call_module(name, (next(iter(b.graph.nodes)),)) for name in ("lite", "normal")))
    gm = b.module()
    gm.lite.meta["nested_region_config"] = SimpleNamespace(inductor_config_patches={"fallback_by_default": True})
    context = PassContext(kind="forward", lite=LiteState.OFF, observe=False, options=BackendOptions(), log=None)
    assert Pipeline([Normalize()]).run(gm, context)
    assert plan_normalization(gm.lite).changes
    assert not plan_normalization(gm.normal).changes and identity_of(start_nodes(gm.normal)[0]) is not None
    assert not Pipeline([Normalize()]).run(gm, context)
