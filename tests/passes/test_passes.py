"""The bucket pass of the pipeline merges what a producer named and nothing that only looks like it."""

from __future__ import annotations

from collective_identity import GRAD_REPLICATE_REDUCE, PARAM_UNSHARD, identity_of, start_nodes
from inductor_passes.contract import PassContext
from inductor_passes.lite_mode import LiteState
from inductor_passes.options import BackendOptions
from inductor_passes.passes import Bucket
from tests.graphs import Builder


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
