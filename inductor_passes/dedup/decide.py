"""Which reduce-scatters of a sum become one? The decision, without any change to the graph.

Scattering a sum is summing the scattered: ``RS(a) + RS(b) = RS(a + b)``, where the reduction is linear, the
addition neither scales, broadcasts nor promotes, and nothing else sees the addends.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Literal, get_args

import torch
from torch import fx

from collective_identity import merge
from collective_identity.identity import Identity
from collective_identity.store import identity_of, runs_in_backward
from collective_identity.transports import WAIT, Launch, Transport, launches

from ..bucketing.hazards import hazards_of
from ..bucketing.plan import Refusal
from . import reasons
from .plan import DedupPlan, Merge
from .trees import ADD, Sum, adds_equals, alike, is_scaled, sums_of

Mixed = Literal["drop", "refuse"]
PASS_NAME: Final = "dedup"
"""Producer of the identities written here, and the pass named in the provenance records."""

_IN_PLACE: Final = (torch.ops.aten.add_.Tensor, torch.ops.aten.add.out)


@dataclass(frozen=True, slots=True)
class _Addend:
    """A reduce-scatter whose result is an addend of a plain addition and nothing else."""

    start: fx.Node
    wait: fx.Node
    launch: Launch
    identity: Identity | None

    def shared(self) -> tuple[object, ...]:
        """What members must share besides shape, element type and device, which the sum asks for."""
        return (self.launch.group, self.launch.group_size, self.launch.reduce_op, runs_in_backward(self.start))

    @property
    def role(self) -> str | None:
        return None if self.identity is None else self.identity.role


def plan_dedup(
    gm: fx.GraphModule, *, mixed: str = "drop", identities: Mapping[fx.Node, Identity | None] | None = None
) -> DedupPlan:
    """Decide which reduce-scatters of a graph are scattered as one sum, and why the others are not.

    Changes nothing. Members share group (by name: same ranks under another name is another group), group size,
    reduce operation, half of the step, and the tree of additions that they are addends of; their tensors share
    shape, element type and device. Their order of addition changes: the result is the same sum, reassociated.

    Args:
        gm: a graph whose payloads are on the start nodes (`normalize`); tensors carry ``meta['val']``.
        mixed: what to do where roles differ or one is missing: ``"drop"`` merges all the same, and the new
            collective has no role, recorded as dropped (contract, "N → 1 by algebra"); ``"refuse"`` merges
            equals only. Collectives that all have none merge either way and lose nothing.
        identities: identity by start node; the payloads themselves when None.

    Raises:
        ValueError: an unknown ``mixed``.
    """
    if mixed not in get_args(Mixed):
        raise ValueError(f"expected mixed {' | '.join(get_args(Mixed))}, found {mixed!r}")
    nodes = list(gm.graph.nodes)
    addends: dict[fx.Node, _Addend] = {}
    refused: dict[fx.Node, Refusal] = {}
    order: list[fx.Node] = []
    for start, launch in launches(gm).items():
        if launch.transport is not Transport.REDUCE_SCATTER:
            continue
        order.append(start)
        identity = identity_of(start) if identities is None else identities.get(start)
        found = _examine(start, launch, identity)
        if isinstance(found, _Addend):
            addends[found.wait] = found
        else:
            refused[start] = found
    merges: list[Merge] = []
    if addends:
        for one in sums_of(nodes):
            merges += _merges(one, addends, mixed == "refuse", refused)
    merges = _undisturbed(nodes, merges, refused)
    return DedupPlan(tuple(merges), tuple(refused[start] for start in order if start in refused), mixed)


def _examine(start: fx.Node, launch: Launch, identity: Identity | None) -> _Addend | Refusal:
    if launch.form != "default" or len(launch.inputs) != 1:
        return Refusal(start, reasons.OTHER_FORM, f"form {launch.form}, {len(launch.inputs)} inputs")
    if launch.group is None or launch.group_size is None:
        return Refusal(start, reasons.GROUP_UNKNOWN, f"group {launch.group}, group size {launch.group_size}")
    sent, received = launch.inputs[0].meta.get("val"), start.meta.get("val")
    if not isinstance(sent, torch.Tensor) or not isinstance(received, torch.Tensor):
        return Refusal(start, reasons.NO_META, "what it sends or yields is unknown")
    if not _is_linear(launch.reduce_op, sent.dtype) or sent.dtype != received.dtype:
        return Refusal(start, reasons.NOT_LINEAR, f"{launch.reduce_op} of {sent.dtype}, yields {received.dtype}")
    users = list(start.users)
    wait = users[0] if users else None
    if wait is None or len(users) != 1 or wait.target is not WAIT or wait.args != (start,):
        return Refusal(start, reasons.OTHER_USERS, f"{len(users)} users instead of one plain wait")
    if len(wait.users) != 1:
        return Refusal(start, reasons.OTHER_USERS, f"{wait.name} has {len(wait.users)} users")
    (user,) = wait.users
    wrong = _not_added(wait, user)
    if wrong is not None:
        return Refusal(start, wrong, f"{wait.name} goes to {user.name}")
    return _Addend(start, wait, launch, identity)


def _is_linear(reduce_op: str | None, dtype: torch.dtype) -> bool:
    """Sums of integers wrap around and still distribute; an average of integers rounds."""
    if dtype is torch.bool:
        return False
    return reduce_op == "sum" or (reduce_op == "avg" and (dtype.is_floating_point or dtype.is_complex))


def _not_added(wait: fx.Node, user: fx.Node) -> reasons.Code | None:
    """What is wrong with the only use of a result as an addend, or None."""
    if user.target in _IN_PLACE:
        return reasons.IN_PLACE
    if user.target is not ADD:
        return reasons.NOT_ADDED
    if is_scaled(user):
        return reasons.SCALED
    if user.args[0] is user.args[1]:
        return reasons.OTHER_USERS
    return None if adds_equals(user) and alike(wait.meta.get("val"), user.meta.get("val")) else reasons.UNEQUAL


def _merges(
    one: Sum, addends: Mapping[fx.Node, _Addend], refuse: bool, refused: dict[fx.Node, Refusal]
) -> list[Merge]:
    """The merges of one sum; members that find no partner are refused."""
    members = [addends[leaf] for leaf in one.addends if leaf in addends]
    classes: dict[tuple[object, ...], list[_Addend]] = {}
    shared: dict[tuple[object, ...], int] = {}
    for a in members:
        classes.setdefault((*a.shared(), a.role if refuse else None), []).append(a)
        shared[a.shared()] = shared.get(a.shared(), 0) + 1
    found = []
    for several in classes.values():
        if len(several) > 1:
            several.sort(key=lambda a: a.start)
            identities = tuple(a.identity for a in several)
            outcome = merge.merge_outcome(identities, producer=PASS_NAME)
            found.append(Merge(tuple(a.start for a in several), identities, outcome, one))
            continue
        (lone,) = several
        if len(members) == 1:
            why, detail = reasons.ALONE, f"in the sum {one.root.name}"
        elif shared[lone.shared()] > 1:
            why, detail = reasons.OTHER_ROLE, f"role {lone.role}"
        else:
            why, detail = reasons.INCOMPATIBLE, f"group {lone.launch.group}, {lone.launch.reduce_op}"
        refused[lone.start] = Refusal(lone.start, why, detail)
    return found


def _undisturbed(
    nodes: Sequence[fx.Node], merges: Sequence[Merge], refused: dict[fx.Node, Refusal]
) -> list[Merge]:
    """Without the merges of sums that read something written meanwhile: the rewrite reads addends later."""
    if not merges:
        return []
    sums = {m.sum.root: m.sum for m in merges}  # one sum may have a merge for each role or group
    watched = [leaf for one in sums.values() for leaf in one.addends]
    watched += [sent for m in merges for start in m.members for sent in start.all_input_nodes]
    hazards = hazards_of(nodes, watched)
    if not hazards.writes:
        return list(merges)
    place = {node: i for i, node in enumerate(nodes)}
    kept = []
    for one in merges:
        if hazards.epoch(place[one.members[0]]) == hazards.epoch(place[one.sum.root]):
            kept.append(one)
            continue
        detail = f"a write stands between {one.members[0].name} and {one.sum.root.name}"
        refused.update((start, Refusal(start, reasons.MUTATED, detail)) for start in one.members)
    return kept
