"""Fusion: tensor parallelism's collectives become part of matrix products. First a plan, then the surgery."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from torch import fx

from collective_identity.identity import Identity

from .. import symmetric
from ..device_policy import OperatorPolicy
from .emit import PASS_NAME, apply_fusions
from .match import GatherMatmul, MatmulScatter
from .plan import Fusion, FusionPlan, plan_fusions
from .reasons import REASONS

__all__ = [
    "PASS_NAME", "REASONS", "Fusion", "FusionPlan", "GatherMatmul", "MatmulScatter", "apply_fusions",
    "fuse_tensor_parallel", "plan_fusions",
]


def fuse_tensor_parallel(
    gm: fx.GraphModule,
    *,
    enabled: Callable[[str], bool] | None = None,
    identities: Mapping[fx.Node, Identity | None] | None = None,
    policy: OperatorPolicy | None = None,
) -> FusionPlan:
    """Fuse all-gather + matmul and matmul + reduce-scatter into ``symm_mem.fused_*`` in place; see `plan_fusions`.

    The fused reduce-scatter adds up the ranks' partial products in an order of its own: equal for two ranks but
    for the rounding of 16-bit partial sums, as near as any other order for more.

    Args:
        gm: a normalised graph.
        enabled: whether the fused operators may run on a process group; by default whether this torch says that
            symmetric memory is enabled for it.
        identities: what `classify` says of this graph; asked for here when None.
        policy: the operator policy of this compile; it, or the one registered for a collective's device, may forbid.
    """
    asked = symmetric.is_enabled if enabled is None else enabled
    plan = plan_fusions(gm, enabled=asked, identities=identities, policy=policy)
    if apply_fusions(gm, plan):
        gm.recompile()
    return plan
