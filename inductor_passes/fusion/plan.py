"""Which collectives become part of a matrix product? The decision, without any change to the graph."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import fx

from collective_identity import absence_of, store
from collective_identity.classify import classify
from collective_identity.codes import Code
from collective_identity.identity import Identity
from collective_identity.roles import is_fsdp
from collective_identity.transports import WAIT, Launch, Transport, launches

from ..bucketing.hazards import Hazards, hazards_of
from ..bucketing.plan import Refusal, left_alone
from ..device_policy import OperatorPolicy, replacement_allowed
from . import reasons
from .match import GatherMatmul, MatmulScatter, gather_matmul, known, matmul_scatter

_FUSED = (Transport.ALL_GATHER, Transport.REDUCE_SCATTER)


@dataclass(frozen=True, slots=True)
class Fusion:
    """One collective that goes into one fused operator.

    Attributes:
        match: what is fused.
        identity: what the collective carried; None when nothing was said and structure denies FSDP.
        group: process-group name.
        reduce_op: of a reduce-scatter, None for gathers.
    """

    match: GatherMatmul | MatmulScatter
    identity: Identity | None
    group: str
    reduce_op: str | None


@dataclass(frozen=True, slots=True)
class FusionPlan:
    """A decision over every collective of a graph: each start node is fused or has one refusal.

    Attributes:
        fusions: in graph order.
        refusals: in graph order.
    """

    fusions: tuple[Fusion, ...]
    refusals: tuple[Refusal, ...]

    def describe(self) -> str:
        """The plan in a few lines: one per fusion, one per reason of refusal."""
        lines = [f"fusion plan: {len(self.fusions)} collectives fused, {len(self.refusals)} left alone"]
        for one in self.fusions:
            role = one.identity.role if one.identity is not None else "no role"
            products = one.match.products if isinstance(one.match, GatherMatmul) else (one.match.product,)
            lines.append(f"  {one.match.start.name} ({role}, dimension {one.match.dim}) with "
                         f"{', '.join(p.name for p in products)}")
        lines += left_alone(self.refusals)
        return "\n".join(lines)

    def to_dict(self) -> dict[str, Any]:
        """The plan as JSON values: node names instead of nodes."""
        return {
            "fusions": [
                {
                    "node": one.match.start.name,
                    "role": one.identity.role if one.identity is not None else None,
                    "dim": one.match.dim,
                    "products": [p.name for p in one.match.products] if isinstance(one.match, GatherMatmul)
                    else [one.match.product.name],
                }
                for one in self.fusions
            ],
            "refusals": [refusal.to_dict() for refusal in self.refusals],
        }


def plan_fusions(
    gm: fx.GraphModule,
    *,
    enabled: Callable[[str], bool],
    identities: Mapping[fx.Node, Identity | None] | None = None,
    policy: OperatorPolicy | None = None,
) -> FusionPlan:
    """Decide which collectives are fused with matrix products, and why the others are not. Changes nothing.

    Only tensor parallelism's: an explicit ``tp.`` role, or a collective that nobody ever labelled and that the
    shape of the graph does not take for FSDP's.

    Args:
        gm: a normalised graph; tensors carry ``meta['val']``.
        enabled: whether the fused operators may run on a process group, by name.
        identities: what `classify` says of this graph; asked for here when None.
        policy: the operator policy of this compile; it, or the one registered for a collective's device, may forbid.
    """
    verdicts = classify(gm) if identities is None else identities
    nodes = list(gm.graph.nodes)
    place = {node: i for i, node in enumerate(nodes)}
    fusions: list[Fusion] = []
    refusals: list[Refusal] = []
    for start, launch in launches(gm).items():
        found = _examine(start, launch, verdicts.get(start), enabled, policy)
        if isinstance(found, Fusion):
            fusions.append(found)
        else:
            refusals.append(found)
    kept = []
    if fusions:
        watched = [read for one in fusions for read, _ in _reads(one.match)]
        hazards = hazards_of(nodes, watched)
        taken: set[fx.Node] = set()
        for one in fusions:
            wrong = _in_the_way(one.match, hazards, place, taken)
            if wrong is not None:
                refusals.append(Refusal(one.match.start, *wrong))
                continue
            taken.update(_consumed(one.match))
            kept.append(one)
    refusals.sort(key=lambda r: place[r.node])
    return FusionPlan(tuple(kept), tuple(refusals))


def _examine(
    start: fx.Node,
    launch: Launch,
    identity: Identity | None,
    enabled: Callable[[str], bool],
    policy: OperatorPolicy | None,
) -> Fusion | Refusal:
    if launch.transport not in _FUSED or launch.form != "default" or len(launch.inputs) != 1:
        return Refusal(start, reasons.OTHER_TRANSPORT, f"{launch.transport.value}, form {launch.form}")
    role = _role_refusal(start, identity)
    if role is not None:
        return role
    if not replacement_allowed(start, None if identity is None else identity.role, "fused", policy):
        return Refusal(start, reasons.POLICY, f"role {'unknown' if identity is None else identity.role}")
    if launch.group is None or launch.group_size is None:
        return Refusal(start, reasons.GROUP_UNKNOWN, f"group {launch.group}, group size {launch.group_size}")
    if not enabled(launch.group):
        return Refusal(start, reasons.NOT_ENABLED, f"group {launch.group}")
    users = list(start.users)
    if len(users) != 1 or users[0].target is not WAIT or users[0].args != (start,):
        return Refusal(start, reasons.OTHER_USERS, f"{len(users)} users instead of one plain wait")
    if not known(launch.inputs[0], start):
        return Refusal(start, reasons.NO_META, "what it sends or yields is not known")
    if launch.transport is Transport.ALL_GATHER:
        gather = gather_matmul(start, launch)
        if gather is None:
            return Refusal(start, reasons.NO_MATMUL, "no product can take it")
        return Fusion(gather, identity, launch.group, None)
    if launch.reduce_op not in ("sum", "avg"):
        return Refusal(start, reasons.REDUCE_OP, f"reduces by {launch.reduce_op}")
    scatter = matmul_scatter(start, launch)
    if isinstance(scatter, str):
        reason = reasons.NO_MATMUL if scatter == "no product" else reasons.OTHER_USERS
        return Refusal(start, reason, scatter)
    return Fusion(scatter, identity, launch.group, launch.reduce_op)


def _role_refusal(start: fx.Node, identity: Identity | None) -> Refusal | None:
    if identity is not None and identity.explicit and identity.role.startswith("tp."):
        return None
    if identity is not None and is_fsdp(identity.role):
        return Refusal(start, reasons.FSDP, f"role {identity.role} ({identity.source})")
    if identity is not None:
        return Refusal(start, reasons.OTHER_ROLE, f"role {identity.role} ({identity.source})")
    absence = absence_of(start)
    if absence is not None and absence.kind != store.NEVER_HAD.kind:
        return Refusal(start, reasons.LOST_ROLE, f"{absence.kind}: {absence.code.slug if absence.code else ''}")
    return None


def _reads(match: GatherMatmul | MatmulScatter) -> Sequence[tuple[fx.Node, fx.Node]]:
    if isinstance(match, GatherMatmul):
        return match.reads
    return [(match.left, match.product), (match.product.args[1], match.product)]  # type: ignore[list-item]


def _consumed(match: GatherMatmul | MatmulScatter) -> tuple[fx.Node, ...]:
    return match.products if isinstance(match, GatherMatmul) else (match.product,)


def _in_the_way(
    match: GatherMatmul | MatmulScatter, hazards: Hazards, place: Mapping[fx.Node, int], taken: set[fx.Node]
) -> tuple[Code, str] | None:
    """A write between where an operand is read and where it will be, or a product that another fusion takes."""
    if not taken.isdisjoint(_consumed(match)):
        return reasons.OTHER_USERS, "its product is fused with another collective"
    at = match.first if isinstance(match, GatherMatmul) else match.start
    for read, by in _reads(match):
        if hazards.epoch(place[by]) != hazards.epoch(place[at]):
            return reasons.MUTATED, f"a write stands between {by.name} and {at.name}, which read {read.name}"
    return None
