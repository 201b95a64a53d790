"""Dedup: reduce-scatters whose results are added up become one, of the sum. First a plan, then the surgery."""

from __future__ import annotations

from collections.abc import Mapping

from torch import fx

from collective_identity.compat import collector_paused
from collective_identity.identity import Identity

from .decide import PASS_NAME, Mixed, plan_dedup
from .emit import apply_dedup
from .plan import DedupPlan, Merge
from .reasons import REASONS
from .trees import Sum

__all__ = [
    "PASS_NAME", "REASONS", "DedupPlan", "Merge", "Mixed", "Sum", "apply_dedup", "dedup_reduce_scatters", "plan_dedup",
]


def dedup_reduce_scatters(
    gm: fx.GraphModule, *, mixed: str = "drop", identities: Mapping[fx.Node, Identity | None] | None = None
) -> DedupPlan:
    """Replace ``RS(a) + RS(b)`` by ``RS(a + b)`` in place, and return what was decided; arguments: `plan_dedup`.

    The sum is reassociated: exact for integers, for others each element differs by at most the number of
    addends (per rank, times ranks) · eps · Σ|x|. A 16-bit sum may overflow where the terms of it, averaged
    first, did not.

    Raises:
        ValueError: an unknown ``mixed``.
    """
    with collector_paused():
        plan = plan_dedup(gm, mixed=mixed, identities=identities)
        if apply_dedup(gm, plan):
            gm.recompile()
    return plan
