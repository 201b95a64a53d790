"""Bucketing: FSDP collectives of one role become one collective. First a plan, then the surgery."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from torch import fx

from collective_identity.compat import collector_paused
from collective_identity.identity import Identity
from collective_identity.transports import Transport

from .build import PASS_NAME
from .decide import UNNAMED_CAP_MB, Order, plan_buckets
from .emit import apply_plan
from .plan import Bucket, BucketKey, Plan, Refusal
from .reasons import REASONS
from .survey import BUCKETED

__all__ = [
    "BUCKETED",
    "PASS_NAME",
    "REASONS",
    "UNNAMED_CAP_MB",
    "Bucket",
    "BucketKey",
    "Order",
    "Plan",
    "Refusal",
    "apply_plan",
    "bucket_collectives",
    "plan_buckets",
]


def bucket_collectives(
    gm: fx.GraphModule,
    *,
    kinds: Iterable[Transport | str] = BUCKETED,
    cap_mb: float | Sequence[float] | None = None,
    order: str = "param_group",
    fqns: Sequence[str] = (),
    mixed_dtypes: bool = False,
    coalesced: Iterable[Transport | str] = (),
    kernels: str = "ops",
    identities: Mapping[fx.Node, Identity | None] | None = None,
) -> Plan:
    """Merge FSDP collectives in place and return what was decided; arguments as for `plan_buckets`.

    The nodes a plan names are those of the graph before: merged members are no longer in it. The values that
    the graph computes stay the same, bit for bit for gathers; a reduction adds up the same numbers, in an
    order that the communication library chooses by buffer size.

    Raises:
        ValueError: an unknown kind, order or kind of kernels, a cap that is not positive.
    """
    with collector_paused():
        plan = plan_buckets(
            gm, kinds=kinds, cap_mb=cap_mb, order=order, fqns=fqns, mixed_dtypes=mixed_dtypes, coalesced=coalesced,
            kernels=kernels, identities=identities,
        )
        if apply_plan(gm, plan):
            gm.recompile()
    return plan
