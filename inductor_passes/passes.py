"""The pipeline's own passes over one graph: normalise, on request fuse and dedup, bucket by role, then order.

None generates code: the pipeline does, once, when all are done.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from torch import fx

from collective_identity import (
    Identity,
    NormalizationPlan,
    Source,
    apply_normalization,
    classify,
    plan_normalization,
)

from . import symmetric
from .bucketing import apply_plan, plan_buckets
from .contract import GraphPass, LiteBehaviour, PassContext, PassContract, PassOutcome
from .dedup import apply_dedup, plan_dedup
from .fusion import apply_fusions, plan_fusions
from .lite_mode import lite_parts
from .options import BackendOptions
from .overlap import apply_overlap, plan_overlap


def graph_passes(options: BackendOptions) -> list[GraphPass]:
    """The passes that these options ask for, in order: what is fused is no longer there to merge."""
    passes: list[GraphPass] = [Normalize()]
    if options.fusion:
        passes.append(Fuse())
    if options.dedup != "off":
        passes.append(Dedup())
    if options.bucketing:
        passes.append(Bucket())
    if options.overlap:
        passes.append(Overlap())
    return passes


class Normalize:
    """Move every payload to its start node and remove what is left elsewhere."""

    contract = PassContract(
        name="normalize", lite=LiteBehaviour.READ_ONLY, provides=frozenset({"normalized"}), stage="graph"
    )

    def __call__(self, gm: fx.GraphModule, context: PassContext) -> PassOutcome:
        """Write only where writing is allowed; classification reads a graph that is not normalised as well.

        The summary counts payloads moved, removed and refused; the refused are events of the graph already.
        """
        plan = plan_normalization(gm)
        changed = False if context.read_only else apply_normalization(gm, _outside(plan, lite_parts(gm)))
        return PassOutcome(changed=changed, summary=plan.summary())


def _outside(plan: NormalizationPlan, parts: Sequence[fx.GraphModule]) -> NormalizationPlan:
    """What of the plan touches no node of ``parts``: lite regions of a graph that is not lite itself."""
    if not parts:
        return plan
    fixed = {node for part in parts for node in part.graph.nodes}
    return replace(
        plan,
        moves=tuple(move for move in plan.moves if not {move.origin, move.target} & fixed),
        removals=tuple(removal for removal in plan.removals if removal.node not in fixed),
        refused={start: removal for start, removal in plan.refused.items() if start not in fixed},
    )


class Fuse:
    """Fuse tensor parallelism's collectives with matrix products, where symmetric memory is enabled."""

    contract = PassContract(
        name="fusion",
        lite=LiteBehaviour.SKIP,
        requires=frozenset({"normalized"}),
        provides=frozenset({"fused"}),
        stage="graph",
    )

    def __call__(self, gm: fx.GraphModule, context: PassContext) -> PassOutcome:
        """Plan, then emit; the plan goes into the report."""
        plan = plan_fusions(gm, enabled=symmetric.is_enabled, policy=context.options.policy)
        return PassOutcome(changed=apply_fusions(gm, plan), summary=plan.to_dict())


class Dedup:
    """Scatter a sum once instead of its addends one by one."""

    contract = PassContract(
        name="dedup",
        lite=LiteBehaviour.SKIP,
        requires=frozenset({"normalized"}),
        provides=frozenset({"deduplicated"}),
        stage="graph",
    )

    def __call__(self, gm: fx.GraphModule, context: PassContext) -> PassOutcome:
        """Plan, then emit; the plan goes into the report."""
        plan = plan_dedup(gm, mixed=context.options.dedup)
        return PassOutcome(changed=apply_dedup(gm, plan), summary=plan.to_dict())


class Bucket:
    """Merge FSDP collectives of one role, group, dtype, device and reduce operation."""

    contract = PassContract(
        name="bucket",
        lite=LiteBehaviour.SKIP,
        requires=frozenset({"normalized"}),
        provides=frozenset({"bucketed"}),
        stage="graph",
    )

    def __call__(self, gm: fx.GraphModule, context: PassContext) -> PassOutcome:
        """Plan, then emit; the plan goes into the report.

        Only what a producer named: a collective that merely looks like FSDP's, a loss all-reduce on the same group,
        is never merged with FSDP's.
        """
        options = context.options
        identities: Mapping[fx.Node, Identity | None] = {
            node: identity if identity is not None and identity.source is Source.EXPLICIT else None
            for node, identity in classify(gm).items()
        }
        plan = plan_buckets(
            gm, kinds=options.kinds, cap_mb=options.cap_mb, order=options.order, fqns=options.fqns,
            mixed_dtypes=options.mixed_dtypes, coalesced=options.coalesced,
            kernels=options.kernels, apart=options.overlap > 0, identities=identities,
        )
        return PassOutcome(changed=apply_plan(gm, plan), summary=plan.to_dict())


class Overlap:
    """Start FSDP's gathers ahead of their use and wait for its reductions later."""

    contract = PassContract(
        name="overlap",
        lite=LiteBehaviour.SKIP,
        requires=frozenset({"normalized"}),
        provides=frozenset({"overlapped"}),
        stage="graph",
    )

    def __call__(self, gm: fx.GraphModule, context: PassContext) -> PassOutcome:
        """Plan, then move; the plan goes into the report."""
        plan = plan_overlap(gm, ahead=context.options.overlap)
        return PassOutcome(changed=apply_overlap(gm, plan), summary=plan.to_dict())
