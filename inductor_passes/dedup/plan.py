"""What was decided? The plan of dedup as a value: readable, comparable, without any surgery."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import fx

from collective_identity.identity import Identity
from collective_identity.merge import Outcome

from ..bucketing.plan import Refusal, left_alone
from .trees import Sum


@dataclass(frozen=True, slots=True)
class Merge:
    """Two or more reduce-scatters of one sum that become one.

    Attributes:
        members: start nodes in graph order.
        identities: the identity of each member, None for none.
        outcome: what the merged collective carries, or the name of the loss.
        sum: the sum that they are addends of.
    """

    members: tuple[fx.Node, ...]
    identities: tuple[Identity | None, ...]
    outcome: Outcome
    sum: Sum


@dataclass(frozen=True, slots=True)
class DedupPlan:
    """A decision over every reduce-scatter of a graph: each is in one merge or has one refusal.

    Attributes:
        merges: in graph order of their sums.
        refusals: in graph order.
        mixed: what was asked for where roles differ, ``"drop"`` or ``"refuse"``.
    """

    merges: tuple[Merge, ...]
    refusals: tuple[Refusal, ...]
    mixed: str = "drop"

    def describe(self) -> str:
        """The plan in a few lines: one per merge, one per reason of refusal."""
        members = sum(len(m.members) for m in self.merges)
        lines = [f"dedup plan (mixed roles: {self.mixed}): {members} reduce-scatters into {len(self.merges)}, "
                 f"{len(self.refusals)} left alone"]
        for merge in self.merges:
            identity, code = merge.outcome.identity, merge.outcome.code
            carries = identity.role if identity else f"no role ({code.slug})" if code else "no role"
            lines.append(f"  {len(merge.members)} of the sum {merge.sum.root.name}: {carries}")
        lines += left_alone(self.refusals)
        return "\n".join(lines)

    def to_dict(self) -> dict[str, Any]:
        """The plan as JSON values: node names instead of nodes."""
        return {
            "mixed": self.mixed,
            "merges": [
                {
                    "members": [m.name for m in merge.members],
                    "sum": merge.sum.root.name,
                    "role": merge.outcome.identity.role if merge.outcome.identity else None,
                    "lost": merge.outcome.code.slug if merge.outcome.code else None,
                    "detail": merge.outcome.detail,
                }
                for merge in self.merges
            ],
            "refusals": [refusal.to_dict() for refusal in self.refusals],
        }
