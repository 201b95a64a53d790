"""What was decided? The plan of a bucketing pass as a value: readable, comparable, without any surgery."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from collective_identity.codes import Code
from collective_identity.identity import Identity
from collective_identity.transports import Transport, waits_of

MIB = 1024 * 1024
"""Bytes per unit of `cap_mb`."""


@dataclass(frozen=True, slots=True)
class BucketKey:
    """What the members of a bucket share.

    Attributes:
        role: the ``fsdp.`` role.
        transport: all-gather, reduce-scatter or all-reduce.
        group: process-group name. Same ranks under another name is another group.
        group_size: ranks in the group; None only for an all-reduce, whose operator does not say.
        dtype: element type sent, gathered and reduced; no member is ever cast. ``torch.uint8`` where gathers of
            several element types are sent as bytes.
        device: device of the tensor sent.
        reduce_op: as the operator spells it, None for gathers.
        param_group: the producer's unit (module FQN); None when the producer gave none or `order="graph"`
            buckets across units.
        depth: level in the graph of mergeable collectives, see `levels.depths`.
    """

    role: str
    transport: Transport
    group: str
    group_size: int | None
    dtype: torch.dtype
    device: torch.device
    reduce_op: str | None
    param_group: str | None
    depth: int

    def arguments(self, sent: Any) -> tuple[Any, ...]:
        """What the collective is called with, in the operators' order; see `transports.default_overload`."""
        reduce_op = () if self.reduce_op is None else (self.reduce_op,)
        size = () if self.transport is Transport.ALL_REDUCE else (self.group_size,)
        return (sent, *reduce_op, *size, self.group)


@dataclass(frozen=True, slots=True)
class Piece:
    """A member of a bucket that kernels pack and unpack.

    Attributes:
        source: what is packed.
        above: nodes between it and the start node that nothing else needs: the packing does their work.
        outer: the runs of what is packed, see `kernels.Layout`.
        width: elements in a row of the buffer.
        result: what the unpacking yields: the wait or a node below it; None where there are several waits.
        below: the wait and the nodes down to `result`, where that is no wait.
        outer_below: the runs of what is unpacked.
    """

    source: fx.Node
    above: tuple[fx.Node, ...]
    outer: int
    width: int
    result: fx.Node | None
    below: tuple[fx.Node, ...]
    outer_below: int

    @property
    def nodes(self) -> tuple[fx.Node, ...]:
        """The nodes that go."""
        return (*self.above, *self.below)


@dataclass(frozen=True, slots=True)
class Bucket:
    """Two or more collectives that become one.

    Attributes:
        key: what they share.
        members: start nodes in the order in which they are laid out in the buffer.
        identities: the identity of each member, by which the bucket's own is combined.
        nbytes: sum over the members of the larger of input and output, in bytes; a symbolic size counts as its hint.
        pieces: how kernels pack and unpack each member; none where plain operators do. In a coalesced bucket, how
            they write what is sent; a member with nothing above it lies as it is.
        coalesced: send each member where it lies, in one call, instead of copying all into one buffer; never where a
            member is not contiguous, empty, of symbolic size or of another element type.
    """

    key: BucketKey
    members: tuple[fx.Node, ...]
    identities: tuple[Identity, ...]
    nbytes: int
    coalesced: bool = False
    pieces: tuple[Piece, ...] = ()

    def left_out(self, place: int) -> tuple[fx.Node, ...]:
        """The nodes around a member that the kernels stand for."""
        return self.pieces[place].nodes if self.pieces else ()

    def results(self, place: int) -> list[fx.Node]:
        """The nodes that what a member yields takes the place of."""
        result = self.pieces[place].result if self.pieces else None
        return waits_of(self.members[place]) if result is None else [result]


@dataclass(frozen=True, slots=True)
class Refusal:
    """A collective that stays as it is.

    Attributes:
        node: its start node.
        reason: a code of `reasons.REASONS`.
        detail: what was found on this node.
    """

    node: fx.Node
    reason: Code
    detail: str

    def to_dict(self) -> dict[str, str]:
        """As JSON values: the node by its name."""
        return {"node": self.node.name, "reason": self.reason.id, "slug": self.reason.slug, "detail": self.detail}


def left_alone(refusals: Iterable[Refusal], *, named: bool = False) -> list[str]:
    """One line for each reason of refusal, with up to four nodes where they are to be ``named``."""
    by_reason: dict[Code, list[fx.Node]] = {}
    for refusal in refusals:
        by_reason.setdefault(refusal.reason, []).append(refusal.node)
    return [
        f"  left alone: {len(nodes)} x {reason.id} {reason.slug}, {reason.text}{f': {_names(nodes)}' if named else ''}"
        for reason, nodes in by_reason.items()
    ]


@dataclass(frozen=True, slots=True)
class Plan:
    """A decision over every collective of a graph: each start node is in one bucket or has one refusal.

    Attributes:
        buckets: in graph order of their earliest member.
        refusals: in graph order.
        order: the order that was asked for.
    """

    buckets: tuple[Bucket, ...]
    refusals: tuple[Refusal, ...]
    order: str = "param_group"

    def describe(self) -> str:
        """The plan in a few lines: one per bucket, one per reason of refusal."""
        merged = sum(len(b.members) for b in self.buckets)
        lines = [f"bucketing plan (order {self.order}): {merged} collectives into {len(self.buckets)} "
                 f"buckets, {len(self.refusals)} left alone"]
        for number, bucket in enumerate(self.buckets):
            key = bucket.key
            extra = [str(key.dtype).removeprefix("torch."), str(key.device)]
            extra += [key.reduce_op] if key.reduce_op else []
            extra += [f"depth {key.depth}"] if key.depth else []
            extra += ["coalesced"] if bucket.coalesced else []
            extra += ["kernels"] if bucket.pieces else []
            unit = f" of {key.param_group!r}" if key.param_group is not None else ""
            lines.append(f"  bucket {number}: {len(bucket.members)} x {key.role} ({key.transport.value})"
                         f"{unit} on group {key.group}, {bucket.nbytes / MIB:.2f} MiB, {', '.join(extra)}: "
                         f"{_names(bucket.members)}")
        lines += left_alone(self.refusals, named=True)
        return "\n".join(lines)

    def to_dict(self) -> dict[str, Any]:
        """The plan as JSON values: node names instead of nodes, sizes in bytes."""
        return {
            "order": self.order,
            "buckets": [
                {
                    "role": b.key.role,
                    "transport": b.key.transport.value,
                    "group": b.key.group,
                    "group_size": b.key.group_size,
                    "dtype": str(b.key.dtype).removeprefix("torch."),
                    "device": str(b.key.device),
                    "reduce_op": b.key.reduce_op,
                    "param_group": b.key.param_group,
                    "depth": b.key.depth,
                    "nbytes": b.nbytes,
                    "coalesced": b.coalesced,
                    "kernels": bool(b.pieces),
                    "members": [m.name for m in b.members],
                }
                for b in self.buckets
            ],
            "refusals": [refusal.to_dict() for refusal in self.refusals],
        }


def _names(nodes: tuple[fx.Node, ...] | list[fx.Node]) -> str:
    """Up to four names, then how many more."""
    shown = ", ".join(n.name for n in nodes[:4])
    return shown if len(nodes) <= 4 else f"{shown}, and {len(nodes) - 4} more"
