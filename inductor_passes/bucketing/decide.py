"""Which collectives become one? The decision, without any change to the graph."""

from __future__ import annotations

import heapq
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Literal, get_args

import torch
from torch import fx

from collective_identity.classify import classify
from collective_identity.identity import Identity
from collective_identity.transports import Transport

from ..uses import behind
from . import reasons
from .apart import apart as parts_of
from .coalesced import can_coalesce
from .hazards import Hazards, hazards_of
from .levels import depths
from .pieces import with_kernels
from .plan import MIB, Bucket, BucketKey, Plan, Refusal
from .survey import BUCKETED, SHARED, Candidate, survey

Order = Literal["param_group", "graph", "fqn"]
KERNELS = ("ops", "triton", "auto")
UNNAMED_CAP_MB = 500.0
"""Cap in MiB on a bucket whose members name no unit, when the caller gives none: without units, no cap would
gather a whole model at once."""

_Class = tuple[object, ...]


def plan_buckets(
    gm: fx.GraphModule,
    *,
    kinds: Iterable[Transport | str] = BUCKETED,
    cap_mb: float | Sequence[float] | None = None,
    order: str = "param_group",
    fqns: Sequence[str] = (),
    mixed_dtypes: bool = False,
    coalesced: Iterable[Transport | str] = (),
    kernels: str = "ops",
    apart: bool = False,
    identities: Mapping[fx.Node, Identity | None] | None = None,
) -> Plan:
    """Decide which FSDP collectives of a graph become one, and why the others do not. Changes nothing.

    Members share role, transport, group, group size, dtype, device, reduce op, half of the step, and level
    (`levels.depths`): no member waits for another, and no two buckets wait for each other. No tensor that a
    bucketable collective sends is written between two members. Collectives without a role, or with one
    outside ``fsdp.``, are never merged. Contract: RFC-0057, "N to 1, all covered".

    Args:
        gm: a graph whose payloads are on the start nodes (`normalize`); tensors carry ``meta['val']``.
        kinds: transports to bucket.
        cap_mb: largest bucket in MiB, counting per member the larger of input and output. A sequence gives
            the cap of the first, second, … bucket of each key, its last value all further ones. A member
            larger than the cap stays alone; the next is tried. None: no cap where the producer named its
            units or ``order`` is ``"graph"``, `UNNAMED_CAP_MB` for members without a unit otherwise.
        order: ``"param_group"`` keeps to the producer's units, in graph order within one; ``"fqn"`` likewise,
            sorted by parameter name within one (``layers.2`` before ``layers.10``), or as `fqns` has them;
            ``"graph"`` fills buckets in graph order across units.
        fqns: with ``order="fqn"``, names in the order wanted. ``[n for n, _ in model.named_parameters()]`` lays
            a unit out as eager FSDP2 does, so that its reductions add up in the same order.
        mixed_dtypes: gathers of several element types may share a bucket and go as bytes: exact, since a gather
            only moves them, and aligned, since each piece is copied into memory of its own. Never reductions.
        coalesced: transports whose buckets are sent member by member in one call, see `Bucket`.
        kernels: what packs and unpacks the others: ``"ops"``, torch's operators; ``"triton"``, two of our own
            (`inductor_passes.kernels`) but for several element types or symbolic sizes; ``"auto"``, those on CUDA.
        apart: members of a unit that others are needed between (`apart.apart`) do not share a bucket.
        identities: what `classify` says of this graph; asked for here when None.

    Raises:
        ValueError: an unknown kind, order or kind of kernels, a cap that is not positive.
    """
    wanted, in_place = _kinds(kinds), _kinds(coalesced)
    caps = _caps(cap_mb)
    if order not in get_args(Order):
        raise ValueError(f"expected order {' | '.join(get_args(Order))}, found {order!r}")
    if not isinstance(fqns, Sequence) or isinstance(fqns, str):
        raise ValueError(f"expected fqns to be parameter names in a list or a tuple, found {fqns!r}")
    if kernels not in KERNELS:
        raise ValueError(f"expected kernels {' | '.join(KERNELS)}, found {kernels!r}")
    nodes = list(gm.graph.nodes)
    verdicts = classify(gm) if identities is None else identities
    candidates, refusals = survey(nodes, verdicts, wanted)
    place, several = {node: i for i, node in enumerate(nodes)}, len(candidates) > 1
    parts = parts_of(candidates, place) if apart and order != "graph" else {}
    sent = [c.launch.inputs[0] for c in candidates]
    hazards = hazards_of(nodes, [*sent, *map(behind, sent)]) if several else Hazards({}, ())
    classes = {c.node: _class_of(c, hazards, order, mixed_dtypes, parts.get(c.node, 0)) for c in candidates}
    levels = _levels(place, hazards, candidates, classes) if several else {c.node: 0 for c in candidates}
    together: dict[_Class, list[Candidate]] = {}
    for c in candidates:
        together.setdefault((classes[c.node], levels[c.node]), []).append(c)
    rank = {name: i for i, name in enumerate(fqns)}
    buckets: list[Bucket] = []
    alone: list[Candidate] = []
    over_cap: set[fx.Node] = set()
    for members in together.values():
        named = order == "graph" or members[0].identity.param_group is not None
        for part in _fill(_sorted(members, order, rank), caps or (() if named else (UNNAMED_CAP_MB,))):
            if len(part) > 1:
                buckets.append(_bucket(part, levels[part[0].node], order, in_place))
            else:
                alone += part
                if len(members) > 1:
                    over_cap.add(part[0].node)
    explain = _Explanation(candidates, classes, over_cap)
    refusals += [explain.refusal(c) for c in alone]
    if kernels != "ops":
        buckets = with_kernels(nodes, buckets, auto=kernels == "auto")
    buckets.sort(key=lambda b: min(place[m] for m in b.members))
    refusals.sort(key=lambda r: place[r.node])
    return Plan(tuple(buckets), tuple(refusals), order)


def _class_of(c: Candidate, hazards: Hazards, order: str, mixed_dtypes: bool, part: int) -> _Class:
    """What must be equal, but for the level."""
    unit = None if order == "graph" else c.identity.param_group
    return (*c.family, *c.shared(mixed_dtypes), c.phase, hazards.epoch(c.position), unit, part)


def _levels(
    index: Mapping[fx.Node, int],
    hazards: Hazards,
    candidates: Sequence[Candidate],
    classes: Mapping[fx.Node, _Class],
) -> dict[fx.Node, int]:
    """Levels among the collectives that have company; one without could only push others apart."""
    sizes: dict[_Class, int] = {}
    for c in candidates:
        sizes[classes[c.node]] = sizes.get(classes[c.node], 0) + 1
    counted, late = [False] * len(index), [False] * len(index)
    for c in candidates:
        counted[c.position] = sizes[classes[c.node]] > 1
        late[c.position] = c.launch.transport is not Transport.ALL_GATHER
    before = [
        [*(index[n] for n in node.all_input_nodes), *hazards.before.get(i, ())]
        for node, i in index.items()
    ]
    found = depths(before, counted, late)
    return {c.node: found[c.position] for c in candidates}


def _sorted(members: list[Candidate], order: str, rank: Mapping[str, int]) -> list[Candidate]:
    if order != "fqn":
        return members
    last = len(rank)

    def key(c: Candidate) -> tuple[object, ...]:
        params = c.identity.params or ()
        places = tuple((rank.get(p, last), _natural(p)) for p in params)
        return (c.identity.params is None, places, c.position)

    return sorted(members, key=key)


def _natural(name: str) -> tuple[tuple[int, int, str], ...]:
    """A sort key by which numbers in a name count as numbers."""
    return tuple((0, int(part), "") if part.isdigit() else (1, 0, part) for part in re.split(r"(\d+)", name) if part)


def _fill(members: Sequence[Candidate], caps: Sequence[float]) -> list[list[Candidate]]:
    """Cut a class into buckets: each takes what comes next up to the cap; what exceeds all stays alone.

    A member that stayed alone because the next one did not fit waits for one that does (the smallest waits in
    front), so that under one cap no two of those left alone fit together in the end.
    """
    if not caps:
        return [list(members)]
    parts: list[list[Candidate]] = []
    too_large: list[list[Candidate]] = []
    waiting: list[tuple[int, int, int, Candidate]] = []  # a heap of (bytes, position, number of the bucket, member)
    part: list[Candidate] = []
    size, number, used = 0, 0, 0

    def close() -> None:
        if len(part) == 1:
            heapq.heappush(waiting, (part[0].nbytes, part[0].position, number, part[0]))
        elif part:
            parts.append(part)

    for c in members:
        if size + c.nbytes <= _cap(caps, number) * MIB:
            part.append(c)
            size += c.nbytes
            continue
        if waiting and waiting[0][0] + c.nbytes <= _cap(caps, waiting[0][2]) * MIB:
            smallest, _, back, one = heapq.heappop(waiting)
            close()
            part, size, number = [one, c], smallest + c.nbytes, back
            continue
        earliest = used + 1 if part else used
        later = range(earliest, max(len(caps), earliest + 1))
        fitting = [k for k in later if c.nbytes <= _cap(caps, k) * MIB]
        if not fitting:
            too_large.append([c])
            continue
        close()
        part, size, number = [c], c.nbytes, fitting[0]
        used = max(used, number)
    close()
    return [*parts, *([one] for *_, one in sorted(waiting, key=lambda w: w[1])), *too_large]


def _cap(caps: Sequence[float], number: int) -> float:
    return caps[min(number, len(caps) - 1)]


def _bucket(members: Sequence[Candidate], depth: int, order: str, coalesced: frozenset[Transport]) -> Bucket:
    first = members[0]
    assert first.launch.group is not None
    one_dtype = len({c.dtype for c in members}) == 1
    key = BucketKey(
        role=first.identity.role,
        transport=first.launch.transport,
        group=first.launch.group,
        group_size=first.launch.group_size,
        dtype=first.dtype if one_dtype else torch.uint8,
        device=first.device,
        reduce_op=first.launch.reduce_op,
        param_group=None if order == "graph" else first.identity.param_group,
        depth=depth,
    )
    return Bucket(
        key,
        tuple(c.node for c in members),
        tuple(c.identity for c in members),
        sum(c.nbytes for c in members),
        key.transport in coalesced and can_coalesce(key.dtype, [c.launch.inputs[0] for c in members]),
    )


class _Explanation:
    """Says of a collective that found no partner which condition kept the nearest one away."""

    def __init__(
        self, candidates: Sequence[Candidate], classes: Mapping[fx.Node, _Class], over_cap: set[fx.Node]
    ) -> None:
        self._classes, self._over_cap = classes, over_cap
        self._families: dict[_Class, list[Candidate]] = {}
        self._sharing: dict[_Class, list[Candidate]] = {}
        self._equal: dict[_Class, list[Candidate]] = {}
        for c in candidates:
            for table, key in (
                (self._families, c.family),
                (self._sharing, self._without_phase(c)),
                (self._equal, classes[c.node]),
            ):
                found = table.setdefault(key, [])
                if len(found) < 2:  # one besides the node itself is enough to name
                    found.append(c)

    def refusal(self, c: Candidate) -> Refusal:
        if c.node in self._over_cap:
            return Refusal(c.node, reasons.OVER_CAP, f"{c.nbytes / MIB:.2f} MiB")
        equal = self._other(self._equal[self._classes[c.node]], c)
        if equal is not None:
            return Refusal(c.node, reasons.DEPENDS, f"not beside {equal.node.name}")
        near = self._other(self._sharing[self._without_phase(c)], c)
        if near is not None and near.phase != c.phase:
            return Refusal(c.node, reasons.PHASE, f"{c.phase}; {near.node.name} runs in {near.phase}")
        if near is not None and self._classes[near.node][-1] != self._classes[c.node][-1]:
            return Refusal(c.node, reasons.APART, f"other units are needed between it and {near.node.name}")
        if near is not None:
            return Refusal(c.node, reasons.MUTATED, f"a write stands between it and {near.node.name}")
        relative = self._other(self._families[c.family], c)
        if relative is None:
            return Refusal(c.node, reasons.ALONE, f"no other {c.identity.role}")
        names = [n for n, a, b in zip(SHARED, c.shared(), relative.shared(), strict=True) if a != b]
        differs = ", ".join(names) or "param_group"
        return Refusal(c.node, reasons.INCOMPATIBLE, f"differs from {relative.node.name} in {differs}")

    def _without_phase(self, c: Candidate) -> _Class:
        *same, _phase, _epoch, unit, _part = self._classes[c.node]
        return (*same, unit)

    @staticmethod
    def _other(found: Sequence[Candidate], c: Candidate) -> Candidate | None:
        return next((o for o in found if o.node is not c.node), None)


def _kinds(kinds: Iterable[Transport | str]) -> frozenset[Transport]:
    allowed = {t.value: t for t in BUCKETED}
    if not isinstance(kinds, Iterable):
        raise ValueError(f"expected kinds out of {', '.join(allowed)}, found {kinds!r}")
    names = [kinds] if isinstance(kinds, str) else list(kinds)
    for name in names:
        if str(name) not in allowed:
            raise ValueError(f"expected kinds out of {', '.join(allowed)}, found {str(name)!r}")
    return frozenset(allowed[str(name)] for name in names)


def _caps(cap_mb: float | Sequence[float] | None) -> tuple[float, ...]:
    if cap_mb is None:
        return ()
    caps = tuple(cap_mb) if isinstance(cap_mb, Sequence) else (cap_mb,)
    numbers = all(isinstance(c, (int, float)) and not isinstance(c, bool) for c in caps)
    if not caps or not numbers or not all(c > 0 and not math.isnan(c) for c in caps):
        raise ValueError(f"expected cap_mb to be a positive number of MiB or several, found {cap_mb!r}")
    return tuple(float(c) for c in caps)
