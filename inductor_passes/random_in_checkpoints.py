"""Random operators in checkpointed regions: saved for backward where torch would misplace their generator's state.

Recomputing a random operator (dropout, scaled dot products) in backward needs the generator's state of forward. The
partitioner returns those states as extra outputs of the forward graph, after the opaque objects that backward needs;
AOTAutograd expects opaque objects there, and stops with "expected all tensors_saved_with_vc_check to be Tensors".
Any DTensor parameter brings such an object, its mesh. Read in torch 2.11.0 to 2.15.0 (``functionalize_rng_ops``,
torch/_functorch/partitioners.py; ``ViewAndMutationMeta``, torch/_functorch/_aot_autograd/schemas.py);
docs/upstream/checkpoint-random-opaque.md. States that a device takes as graph inputs (CUDA's) are not concerned.
"""

from __future__ import annotations

from torch import fx

from .contract import LiteBehaviour, PassContext, PassContract, PassOutcome
from .upstream import mark_save, misplaced_random_ops


class RandomInCheckpoints:
    """Joint-graph pass: keep the results of random operators that a checkpoint would recompute, where torch cannot."""

    contract = PassContract(
        name="random_in_checkpoints",
        lite=LiteBehaviour.CAPTURE,
        provides=frozenset({"random_in_checkpoints"}),
        stage="joint",
    )

    def __call__(self, gm: fx.GraphModule, context: PassContext) -> PassOutcome:
        """Mark; what is saved is what would have been computed again, so values stay the same."""
        found = misplaced_random_ops(gm)
        for node in found:
            mark_save(node)
        return PassOutcome(changed=False, summary={"saved": len(found)})
