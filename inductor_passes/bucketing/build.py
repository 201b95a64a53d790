"""How does a bucket look in the graph? Builds its nodes directly: ``cat``, one collective, a wait, ``split``.

Or, where the plan says so, as `coalesced` or `packed` has it.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import Final

import torch
from torch import fx

from collective_identity import merge, store
from collective_identity.transports import Transport, launch_of

from ..sizes import is_static
from .coalesced import build_coalesced
from .node_builder import NodeBuilder, mode_of
from .packed import build_packed
from .plan import Bucket

PASS_NAME: Final = "bucketing"
"""Producer of the identities written here, and the pass named in the provenance records."""

_ATEN: Final = torch.ops.aten
# Where the code came from, and in which half of the step it runs: taken from the first member.
_HANDED_ON: Final = ("stack_trace", "nn_module_stack", "partitioner_tag", "autograd_backward")

Size = int | fx.Node


@dataclass(frozen=True, slots=True)
class Built:
    """The nodes of one bucket, in order: up to the start node, up to the common buffer, and per member."""

    launch: list[fx.Node]
    wait: list[fx.Node]
    results: list[list[fx.Node]]


def build_bucket(graph: fx.Graph, bucket: Bucket) -> Built:
    """Build one bucket at the graph's insertion point. A member's result is the last of its nodes.

    The buffer has one row per rank where rows are scattered or gathered. Sizes that are symbolic are read from
    the tensors as the graph runs.
    """
    key, members = bucket.key, bucket.members
    sent = [sent_by(m) for m in members]
    build = NodeBuilder(
        graph, mode_of(sent), {k: members[0].meta[k] for k in _HANDED_ON if k in members[0].meta}
    )
    if bucket.coalesced or bucket.pieces:
        built = Built(*(build_coalesced(build, bucket, sent) if bucket.coalesced else build_packed(build, bucket)))
        _identify(built.launch[-1], bucket)
        return built
    ranks = key.group_size or 1
    rows = ranks if key.transport is Transport.REDUCE_SCATTER else 1
    received_rows = ranks if key.transport is Transport.ALL_GATHER else 1

    launch: list[fx.Node] = []
    flat = [_flat(build, node, rows, key.dtype, launch) for node in sent]
    sizes = [build.size(node, -1, launch) for node in flat]
    along = (1,) if rows > 1 else ()
    joined = build.call(_ATEN.cat.default, (flat, *along), launch, build.joined(flat, *along or (0,)))
    joined = build.reshape(joined, [_elements(joined)], launch)
    shapes = [_shape(build, m, s, key.transport, ranks, launch) for m, s in zip(members, sent, strict=True)]
    start = build.collective(key, joined, launch)
    _identify(start, bucket)

    wait: list[fx.Node] = []
    received = build.wait(start, wait)
    if received_rows > 1:
        received = build.reshape(received, [received_rows, _elements(received, received_rows)], wait)
    split = build.split(received, sizes, 1 if received_rows > 1 else 0, wait)
    results = []
    for place, (member, shape) in enumerate(zip(members, shapes, strict=True)):
        result: list[fx.Node] = []
        piece = build.item(split, place, result)
        like: torch.Tensor = member.meta["val"]
        if like.dtype is not key.dtype:
            piece = build.call(_ATEN.clone.default, (piece,), result, memory_format=torch.contiguous_format)
            piece = build.reshape(piece, [piece.meta["val"].numel()], result)  # an empty row has no strides to divide
            piece = build.call(_ATEN.view.dtype, (piece, like.dtype), result)
        build.contiguous(piece, like, shape, result)
        results.append(result)
    return Built(launch, wait, results)


def sent_by(member: fx.Node) -> fx.Node:
    """The one tensor that a member sends."""
    launch = launch_of(member)
    if launch is None or len(launch.inputs) != 1:
        raise ValueError(f"expected {member.name!r} to send one tensor, found {member.format_node()}")
    return launch.inputs[0]


def _flat(build: NodeBuilder, node: fx.Node, rows: int, dtype: torch.dtype, into: list[fx.Node]) -> fx.Node:
    """The tensor in one dimension, or in one row per rank; as bytes where the bucket's type is another."""
    value = build.value(node)
    if value.dtype is not dtype and (value.is_neg() or not value.is_contiguous()):  # bytes have no sign to be applied
        node = build.call(_ATEN.clone.default, (node,), into, memory_format=torch.contiguous_format)
    size = _elements(node, rows)
    node = build.reshape(node, [rows, size] if rows > 1 else [size], into)
    return node if value.dtype is dtype else build.call(_ATEN.view.dtype, (node, dtype), into)


def _elements(node: fx.Node, rows: int = 1) -> int:
    """The number of elements in a row; -1, which `reshape` works out, where a size is symbolic."""
    value: torch.Tensor = node.meta["val"]
    return value.numel() // rows if is_static(value) else -1


def _shape(
    build: NodeBuilder, member: fx.Node, sent: fx.Node, transport: Transport, ranks: int, into: list[fx.Node]
) -> list[Size]:
    """The shape of what a member yields, symbolic sizes as nodes."""
    value: torch.Tensor = member.meta["val"]
    if is_static(value):
        return list(value.shape)
    shape = [build.size(sent, dim, into) for dim in range(value.dim())]
    if transport is not Transport.ALL_REDUCE:
        combine = operator.mul if transport is Transport.ALL_GATHER else operator.floordiv
        shape[0] = build.arithmetic(combine, shape[0], ranks, into)
    return shape


def _identify(start: fx.Node, bucket: Bucket) -> None:
    members = tuple(store.Member(m.name, i) for m, i in zip(bucket.members, bucket.identities, strict=True))
    store.set_members(start, store.BucketRecord(PASS_NAME, members))
    identity = merge.combine(bucket.identities, producer=PASS_NAME)
    if identity is None:
        raise ValueError(f"expected one role in the bucket of {bucket.members[0].name!r}, found several")
    store.stamp(start, identity)
