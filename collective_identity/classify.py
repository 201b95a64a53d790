"""What is each collective, all evidence weighed? Precedence: explicit payload, then structure, then nothing.

1. A valid explicit identity wins.
2. Inference never overwrites one and never turns into one.
3. Where explicit and structure disagree, explicit is used and the mismatch recorded.
4. Where the payload is missing or malformed, structure decides; a stored inferred payload is no evidence.
5. The role of a backward collective is never derived from a forward payload (`store.verdict_for`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TYPE_CHECKING, Final, Literal

from torch import fx

from . import codes, compat, store
from .codes import Code
from .identity import VERSION, Identity, Source, Verdict
from .normalize import PASS_NAME, NormalizationPlan, plan_scanned
from .roles import DEFAULT_ROLES, RoleTable, is_fsdp
from .scan import scan_graphs
from .store import Absence
from .transports import Launch, Transport

if TYPE_CHECKING:
    from .view import Rules

STRUCTURE: Final = "structure"
"""Producer of an inferred identity."""

_NO_GUESS: Final = (codes.DROPPED_MIXED, codes.DROPPED_OPAQUE, codes.DROPPED_DECOMPOSED)


@dataclass(frozen=True, slots=True)
class Mismatch:
    """An explicit identity that the shape of the graph does not bear out. The identity is used all the same.

    Attributes:
        node: the start node.
        identity: what the producer says.
        structure_role: what structure says, None for "no FSDP collective".
        detail: both, in words.
    """

    node: fx.Node
    identity: Identity
    structure_role: str | None
    detail: str


@dataclass(frozen=True, slots=True)
class Classification:
    """The verdict on every collective of a graph and its sub-graphs.

    Attributes:
        identities: start node → identity, None for none; in graph order.
        mismatches: explicit identities that structure doubts. Only known where structure was looked at.
        absences: why there is no identity, or none from the producer: every node without an identity, and
            those whose payload was refuted although structure then gave them a role.
        notes: remarks on valid payloads.
        structure_built: whether any collective needed the structural fallback.
        normalization: where each payload belongs, as it was taken into account.
    """

    identities: Mapping[fx.Node, Identity | None]
    mismatches: tuple[Mismatch, ...] = ()
    absences: Mapping[fx.Node, Absence] = field(default_factory=dict)
    notes: tuple[tuple[fx.Node, Code], ...] = ()
    structure_built: bool = False
    normalization: NormalizationPlan = NormalizationPlan()


def classify(
    gm: fx.GraphModule,
    *,
    rules: Literal["extended", "compatible"] = "extended",
    roles: RoleTable = DEFAULT_ROLES,
) -> Mapping[fx.Node, Identity | None]:
    """The identity of every collective, keyed by start node, in graph order, sub-graphs included.

    Reads only; works on a graph that is not normalised yet as if it were.

    Args:
        gm: the graph.
        rules: ``"extended"``, or ``"compatible"`` for exactly the installed torch's structural verdict.
        roles: role × transport rows.

    Raises:
        ValueError: unknown rules.
    """
    return classify_report(gm, rules=rules, roles=roles).identities


def classify_report(
    gm: fx.GraphModule,
    *,
    rules: Literal["extended", "compatible"] = "extended",
    roles: RoleTable = DEFAULT_ROLES,
) -> Classification:
    """As `classify`, with what was missing, refuted or doubted. Reads only; linear in nodes + edges."""
    if rules not in ("extended", "compatible"):
        raise ValueError(f"expected rules 'extended' or 'compatible', found {rules!r}")
    with compat.collector_paused():
        return _classified(gm, rules, roles)


def _classified(gm: fx.GraphModule, rules: Rules, roles: RoleTable) -> Classification:
    scans = scan_graphs(gm)
    plan = plan_scanned(scans, roles)
    identities: dict[fx.Node, Identity | None] = {}
    absences: dict[fx.Node, Absence] = {}
    notes: list[tuple[fx.Node, Code]] = []
    open_nodes: set[fx.Node] = set()
    for scan in scans:
        for node, launch in scan.launches.items():
            verdict = store.verdict_for(node, launch, plan.payloads_at(node), roles=roles)
            identity = identities[node] = _settled(node, verdict)
            if verdict.notes:
                notes += [(node, note) for note in verdict.notes]
            if identity is not None:
                continue
            dropped = store.dropped_of(node)
            absence = store.absence_from(verdict, dropped)
            if absence is store.NEVER_HAD and node in plan.refused:
                refusal = plan.refused[node]
                absence = Absence("dropped", refusal.lost_as, PASS_NAME, refusal.detail)
            if absence is not None:
                absences[node] = absence
            if dropped is None or dropped.code not in _NO_GUESS:
                open_nodes.add(node)
    graphs = [scan.launches for scan in scans]
    mismatches: list[Mismatch] = []
    if open_nodes:
        groups = {
            launch.group
            for starts in graphs
            for node, launch in starts.items()
            if launch.group is not None and _is_fsdp(identities[node])
        }
        asked = [starts for starts in graphs if not open_nodes.isdisjoint(starts)]
        guesses = _guess(asked, rules, groups, open_nodes)
        for starts in asked:
            _resolve(starts, guesses, open_nodes, identities, absences, mismatches)
    return Classification(
        identities=MappingProxyType(identities),
        mismatches=tuple(mismatches),
        absences=MappingProxyType(absences),
        notes=tuple(notes),
        structure_built=bool(open_nodes),
        normalization=plan,
    )


def _settled(node: fx.Node, verdict: Verdict) -> Identity | None:
    """The identity that needs no structure: an explicit one, or that of a merged node.

    The structure of a merged node's members was judged before the merge and is gone since.
    """
    identity = verdict.identity
    if identity is None or identity.explicit:
        return identity
    return identity if store.members_of(node) is not None else None


def _is_fsdp(identity: Identity | None) -> bool:
    return identity is not None and is_fsdp(identity.role)


def _guess(
    graphs: Sequence[Mapping[fx.Node, Launch]],
    rules: Rules,
    groups: set[str],
    open_nodes: set[fx.Node],
) -> dict[fx.Node, str | None]:
    from . import structure, view  # networkx is imported only where structure is asked

    settled = {node for starts in graphs for node in starts if node not in open_nodes}
    views = [view.build_view(starts, rules) for starts in graphs]
    return structure.structural_roles(views, rules, fsdp_groups=groups, settled=settled)


def _resolve(
    starts: Mapping[fx.Node, Launch],
    guesses: Mapping[fx.Node, str | None],
    open_nodes: set[fx.Node],
    identities: dict[fx.Node, Identity | None],
    absences: dict[fx.Node, Absence],
    mismatches: list[Mismatch],
) -> None:
    shared: dict[tuple[str, str | None], Identity] = {}
    for node, launch in starts.items():
        role = guesses.get(node)
        settled = identities[node]
        if node in open_nodes:
            if role is not None:
                key = role, launch.group
                if key not in shared:
                    shared[key] = Identity(VERSION, role, Source.INFERRED, STRUCTURE, launch.group)
                identities[node] = shared[key]
                if absences.get(node) is store.NEVER_HAD:
                    del absences[node]
            elif node not in absences:
                absences[node] = store.NEVER_HAD
        elif settled is not None and settled.explicit and _disagree(settled, role, launch):
            found = role or "no FSDP collective"
            detail = f"{settled.producer} says {settled.role}, structure says {found}"
            mismatches.append(Mismatch(node, settled, role, detail))


def _disagree(identity: Identity, role: str | None, launch: Launch) -> bool:
    """All-reduces have no structure of their own, other transports no FSDP role: nothing to doubt."""
    if launch.transport not in (Transport.ALL_GATHER, Transport.REDUCE_SCATTER):
        return False
    return is_fsdp(identity.role) != is_fsdp(role)
