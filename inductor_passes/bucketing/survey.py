"""Which collectives may be bucketed at all, and what does each need the others to share?"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import fx

from collective_identity.identity import Identity
from collective_identity.roles import is_fsdp
from collective_identity.store import runs_in_backward
from collective_identity.transports import WAIT, Launch, Transport, launches_among, waits_of

from ..sizes import Size, hinted_numel, is_static, surely_divides, surely_same, unhinted
from . import reasons
from .plan import Refusal

BUCKETED: tuple[Transport, ...] = (Transport.ALL_GATHER, Transport.REDUCE_SCATTER, Transport.ALL_REDUCE)
"""The transports that have a bucketed form."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """A collective that may be merged if another is like it.

    Attributes:
        node: start node.
        position: its place in the graph.
        identity: valid, with an ``fsdp.`` role.
        launch: what it launches.
        dtype: element type of the tensor sent.
        device: device of the tensor sent.
        phase: ``"forward"``, ``"recompute"`` or ``"backward"``: buckets do not span them. A forward's collective
            that stands after the first backward node of its graph is a recomputed one: in a whole training step a
            parameter's second gather must not join the first, which would keep the full parameter all along.
        nbytes: the larger of input and output, in bytes; of a symbolic size its hint.
        static: no size or stride is symbolic.
    """

    node: fx.Node
    position: int
    identity: Identity
    launch: Launch
    dtype: torch.dtype
    device: torch.device
    phase: str
    nbytes: int
    static: bool

    @property
    def family(self) -> tuple[str, Transport]:
        """Role and transport: without these in common nothing else matters."""
        return self.identity.role, self.launch.transport

    def shared(self, mixed_dtypes: bool = False) -> tuple[object, ...]:
        """What else a bucket must share but unit, writes and place in the graph; `SHARED` has the names."""
        launch = self.launch
        dtype = None if mixed_dtypes and self.goes_as_bytes else self.dtype
        return (launch.group, launch.group_size, dtype, self.device, launch.reduce_op)

    @property
    def goes_as_bytes(self) -> bool:
        """Whether it may be sent as bytes beside other element types.

        A gather moves bytes and computes nothing, and what arrives is copied into memory of its own, which is
        aligned for any type. Complex tensors may be conjugated lazily; a symbolic size proves no length.
        """
        return self.launch.transport is Transport.ALL_GATHER and self.static and not self.dtype.is_complex


SHARED: tuple[str, ...] = ("group", "group_size", "dtype", "device", "reduce_op")


def survey(
    nodes: Collection[fx.Node],
    identities: Mapping[fx.Node, Identity | None],
    kinds: Collection[Transport],
) -> tuple[list[Candidate], list[Refusal]]:
    """Every collective of a graph, as a candidate or refused on its own account; both in graph order."""
    candidates: list[Candidate] = []
    refusals: list[Refusal] = []
    backward_began = False
    launches = launches_among(nodes)
    for position, node in enumerate(nodes):
        backward_began = backward_began or runs_in_backward(node)
        launch = launches.get(node)
        if launch is None:
            continue
        found = _examine(node, position, launch, identities.get(node), kinds, backward_began)
        if isinstance(found, Candidate):
            candidates.append(found)
        else:
            refusals.append(found)
    return candidates, refusals


def _examine(
    node: fx.Node,
    position: int,
    launch: Launch,
    identity: Identity | None,
    kinds: Collection[Transport],
    backward_began: bool,
) -> Candidate | Refusal:
    if launch.transport not in kinds:
        return Refusal(node, reasons.NOT_REQUESTED, f"transport {launch.transport.value}")
    if identity is None:
        return Refusal(node, reasons.NO_ROLE, "no identity")
    if not is_fsdp(identity.role):
        return Refusal(node, reasons.OTHER_ROLE, f"role {identity.role}")
    if launch.form != "default" or len(launch.inputs) != 1:
        return Refusal(node, reasons.OTHER_FORM, f"form {launch.form}, {len(launch.inputs)} inputs")
    if launch.group is None or (launch.group_size is None and launch.transport is not Transport.ALL_REDUCE):
        return Refusal(node, reasons.GROUP_UNKNOWN, f"group {launch.group}, group size {launch.group_size}")
    if launch.reduce_op is None and launch.transport is not Transport.ALL_GATHER:
        return Refusal(node, reasons.REDUCE_OP, "the reduce operation is an object or a node")
    for carrier in (launch.inputs[0], node):
        unfit = _unfit_value(node, carrier)
        if unfit is not None:
            return unfit
    sent, received = launch.inputs[0].meta["val"], node.meta["val"]
    users = _other_user(node)
    if users is not None:
        return Refusal(node, reasons.OTHER_USERS, f"used by {users.name}")
    if not node.users:
        return Refusal(node, reasons.NO_WAIT, "no users")
    wrong = _size_conflict(launch, sent, received)
    if wrong is not None:
        return Refusal(node, reasons.SIZES_DISAGREE, wrong)
    in_backward = runs_in_backward(node)
    recomputed = not in_backward and (backward_began or node.meta.get("autograd_backward") is True)
    return Candidate(
        node=node,
        position=position,
        identity=identity,
        launch=launch,
        dtype=sent.dtype,
        device=sent.device,
        phase="backward" if in_backward else "recompute" if recomputed else "forward",
        nbytes=max(hinted_numel(sent), hinted_numel(received)) * sent.element_size(),
        static=is_static(sent) and is_static(received),
    )


def _unfit_value(node: fx.Node, carrier: fx.Node) -> Refusal | None:
    """Why the size of ``carrier``'s tensor cannot be counted on, or None."""
    value = carrier.meta.get("val")
    if not isinstance(value, torch.Tensor):
        found = type(value).__name__
        return Refusal(node, reasons.NO_META, f"{carrier.name}.meta['val'] is {found}, not a tensor")
    if value.layout is not torch.strided or value.is_quantized:
        return Refusal(node, reasons.LAYOUT, f"{carrier.name} is {value.layout}")
    symbols = unhinted(value)
    if symbols:
        return Refusal(node, reasons.SYMBOLIC_SIZE, f"{carrier.name} has {', '.join(symbols)}")
    return None


def _other_user(node: fx.Node) -> fx.Node | None:
    """A user of the start node that is no plain wait for it, or None."""
    waits = [w for w in waits_of(node) if w.target is WAIT and w.args == (node,)]
    return next((user for user in node.users if user not in waits), None)


def _size_conflict(launch: Launch, sent: torch.Tensor, received: torch.Tensor) -> str | None:
    """What is wrong with the sizes, in words; None when sent and received fit."""
    if received.dtype != sent.dtype:
        return f"sends {sent.dtype}, yields {received.dtype}"
    shape, size = list(sent.shape), launch.group_size or 1
    expected: Callable[[], Sequence[Size]] = {
        Transport.ALL_GATHER: lambda: [shape[0] * size, *shape[1:]],
        Transport.REDUCE_SCATTER: lambda: [shape[0] // size, *shape[1:]],
        Transport.ALL_REDUCE: lambda: shape,
    }[launch.transport]
    if launch.transport is not Transport.ALL_REDUCE and not shape:
        return "a 0-dim tensor has nothing to gather or scatter along"
    if launch.transport is Transport.REDUCE_SCATTER and not surely_divides(shape[0], size):
        return f"dimension 0 of {shape} does not divide by {size} ranks"
    if not surely_same(received.shape, expected()):
        return f"sends {shape} on {size} ranks, yields {list(received.shape)}, expected {expected()}"
    return None
