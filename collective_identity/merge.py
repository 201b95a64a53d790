"""What does a transformation do to identities? One table, and pure functions that carry it out.

Not preserved unless shown sound; wrong is worse than missing; a deliberate loss has a name.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

from . import codes
from .codes import Code
from .identity import VERSION, Identity, Source
from .roles import DEFAULT_ROLES, RoleTable
from .transports import Transport


@dataclass(frozen=True, slots=True)
class Rule:
    """What happens to identities in one event.

    Attributes:
        event: what a pass does.
        kept: what the new node carries, and when.
        lost: the name of the loss otherwise; None where nothing can be lost.
        carried_out_by: the public function, or functions, that a pass calls.
    """

    event: str
    kept: str
    lost: Code | None
    carried_out_by: str


MOVE: Final = Rule("move, stable topological sort", "the identity, untouched", None, "-")
COPY: Final = Rule(
    "clone, `node_copy`, graph copy, recomputed copy",
    "the identity, by value: copies share a dict, which no write of ours changes",
    None,
    "`stamp`, `clear`, `store.drop`",
)
REPLACE: Final = Rule(
    "one collective by one other node",
    "the identity, if the new node is an ordinary collective whose transport fits the role",
    codes.DROPPED_OPAQUE,
    "`merge.replacement_outcome`",
)
BUCKET: Final = Rule(
    "several collectives by one (bucket)",
    "one role, if every member has it: explicit only if every member is; producer: the pass; group and param_group: "
    "the common value, else none; params: the sorted union, none if any is none",
    codes.DROPPED_MIXED,
    "`combine`, `merge.merge_outcome`, `store.set_members`",
)
ALGEBRA: Final = Rule(
    "several collectives by algebra (reduce-scatter dedup)",
    "as for a bucket; without one common role the rewrite may stay, without a role",
    codes.DROPPED_MIXED,
    "`merge.merge_outcome`",
)
CSE: Final = Rule(
    "two collectives found equal (CSE)",
    "as for a bucket, whichever of the two stays",
    codes.DROPPED_MIXED,
    "`merge.merge_outcome`",
)
FUSE: Final = Rule(
    "fusion into an operator that computes and communicates",
    "nothing; the provenance stays",
    codes.DROPPED_OPAQUE,
    "`merge.replacement_outcome`",
)
SPLIT: Final = Rule(
    "one collective by several: split, decomposition, lowering",
    "the identity, on each part of the same transport",
    codes.DROPPED_DECOMPOSED,
    "`merge.split_outcome`",
)
HELPER: Final = Rule("helper nodes (copies, splits, views, pads) and the wait", "nothing, ever", None, "`normalize`")
UNKNOWN: Final = Rule(
    "a pass that says nothing",
    "what it left, validated again",
    codes.DROPPED_UNKNOWN,
    "`losses.snapshot`, `losses.record_losses`",
)

RULES: Final = (MOVE, COPY, REPLACE, BUCKET, ALGEBRA, CSE, FUSE, SPLIT, HELPER, UNKNOWN)
"""Every event that has a rule; `docs/contract.md` shows this table."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a new node may carry.

    Attributes:
        identity: what to stamp, None for nothing.
        code: the name of the loss, for `store.drop`; None when nothing was lost.
        detail: what met what, in words.
    """

    identity: Identity | None
    code: Code | None = None
    detail: str = ""


def combine(identities: Iterable[Identity | None], *, producer: str) -> Identity | None:
    """The identity of one collective that does the work of several (N → 1).

    None absorbs; different roles give None. The result is explicit only if every one is; ``group`` and
    ``param_group`` are the common value, else None; ``params`` is the sorted union, None if any is None.
    Neither order nor nesting matters.

    Args:
        identities: of the members, at least one.
        producer: the pass that merges; becomes the producer of the result.

    Raises:
        ValueError: no identities.
    """
    found = tuple(identities)
    if not found:
        raise ValueError("expected at least one identity to combine, found none; a merge has members")
    members = [identity for identity in found if identity is not None]
    if len(members) < len(found) or len({m.role for m in members}) != 1:
        return None
    first = members[0]
    params: tuple[str, ...] | None = None
    if all(m.params is not None for m in members):
        params = tuple(sorted({p for m in members for p in m.params or ()}))
    return Identity(
        version=VERSION,
        role=first.role,
        source=Source.EXPLICIT if all(m.explicit for m in members) else Source.INFERRED,
        producer=producer,
        group=_common([m.group for m in members]),
        param_group=_common([m.param_group for m in members]),
        params=params,
    )


def merge_outcome(identities: Iterable[Identity | None], *, producer: str) -> Outcome:
    """Bucket, reduce-scatter dedup and CSE: the combined identity, or drop(mixed).

    Collectives that never had an identity lose none: no identity and no code.
    """
    found = tuple(identities)
    identity = combine(found, producer=producer)
    if identity is not None or all(i is None for i in found):
        return Outcome(identity)
    met = sorted({"no role" if i is None else i.role for i in found})
    return Outcome(None, BUCKET.lost, f"{producer} merged {' with '.join(met)}")


def replacement_outcome(
    identity: Identity | None,
    transport: Transport | None,
    *,
    producer: str,
    roles: RoleTable = DEFAULT_ROLES,
) -> Outcome:
    """1 → 1 replacement, fusion: preserved if the new node is an ordinary collective that fits.

    Else drop(opaque).

    Args:
        identity: of the node replaced.
        transport: of the new node; None when it is no ordinary collective.
        producer: the pass that replaces, for the detail; the identity's own producer stays.
        roles: role × transport rows.
    """
    if identity is None:
        return Outcome(None)
    if transport is not None and roles.allows(identity.role, transport):
        return Outcome(identity)
    became = "an operator that is no ordinary collective" if transport is None else transport.value
    return Outcome(None, REPLACE.lost, f"{producer} turned {identity.role} into {became}")


def split_outcome(
    identity: Identity | None,
    transport: Transport,
    parts: Sequence[Transport | None],
    *,
    producer: str,
) -> tuple[Outcome, ...]:
    """1 → N split, decomposition, lowering: kept on parts of the same transport, else drop(decomposed).

    Args:
        identity: of the node that is split.
        transport: of that node.
        parts: transport of each new node in order; None for one that is no collective, which carries nothing
            and loses nothing.
        producer: the pass that splits.
    """
    lost = Outcome(
        None,
        SPLIT.lost,
        f"{producer} decomposed {identity.role if identity else 'a collective'} ({transport.value})",
    )
    return tuple(
        Outcome(None) if identity is None or part is None else Outcome(identity) if part is transport else lost
        for part in parts
    )


def _common(values: Sequence[str | None]) -> str | None:
    return values[0] if len(set(values)) == 1 else None
