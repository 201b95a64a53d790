"""How does a bucket look that copies nothing? One coalesced collective, and a wait for each member's own result.

Members that are cast before they are sent are written anew anyway: where kernels pack, one of them casts all.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import fx

from collective_identity.transports import coalesced_overload

from ..sizes import is_static
from .node_builder import NodeBuilder
from .packed import pack
from .plan import Bucket


def can_coalesce(dtype: torch.dtype, sent: Sequence[fx.Node]) -> bool:
    """Whether each tensor may be sent where it lies: of this element type, contiguous, of known size > 0."""
    return all(
        value.dtype is dtype
        and is_static(value)
        and value.numel() > 0
        and value.is_contiguous()
        and not value.is_neg()
        and not value.is_conj()
        for value in (node.meta["val"] for node in sent)
    )


def build_coalesced(
    build: NodeBuilder, bucket: Bucket, sent: Sequence[fx.Node]
) -> tuple[list[fx.Node], list[fx.Node], list[list[fx.Node]]]:
    """The nodes up to the start node, the item of each member, and what each member ends in: its own wait."""
    key = bucket.key
    launch: list[fx.Node] = []
    lying = _packed(build, bucket, sent, launch) if bucket.pieces else list(sent)
    values = [_received(build, member) for member in bucket.members]
    known = None if any(value is None for value in values) else values
    start = build.call(coalesced_overload(key.transport), key.arguments(lying), launch, known)
    items: list[fx.Node] = []
    results: list[list[fx.Node]] = []
    for place in range(len(sent)):
        result: list[fx.Node] = []
        waits = bucket.results(place)
        build.wait(build.item(start, place, items), result, build.handed_over(waits[0]) if len(waits) == 1 else None)
        results.append(result)
    return launch, items, results


def _received(build: NodeBuilder, member: fx.Node) -> torch.Tensor | None:
    value = build.handed_over(member)
    return build.fresh(member, list(member.meta["val"].shape)) if value is None else value


def _packed(build: NodeBuilder, bucket: Bucket, sent: Sequence[fx.Node], launch: list[fx.Node]) -> list[fx.Node]:
    """What each member sends: a view of one buffer where something above it went, else the tensor itself."""
    pieces = [piece for piece in bucket.pieces if piece.above]
    packed = pack(build, pieces, 1, bucket.key.dtype, launch)
    places = [place for place, piece in enumerate(bucket.pieces) if piece.above]
    shapes = [list(sent[place].meta["val"].shape) for place in places]
    parts, values = build.row_of_pieces(packed, shapes, launch)
    lying = list(sent)
    for number, (place, shape, value) in enumerate(zip(places, shapes, values, strict=True)):
        lying[place] = build.reshape(build.item(parts, number, launch), shape, launch, value)
    return lying
