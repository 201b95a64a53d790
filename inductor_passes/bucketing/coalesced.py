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
    values = [build.fresh(member, list(member.meta["val"].shape)) for member in bucket.members]
    known = None if any(value is None for value in values) else values
    start = build.call(coalesced_overload(key.transport), key.arguments(lying), launch, known)
    items: list[fx.Node] = []
    results: list[list[fx.Node]] = []
    for place in range(len(sent)):
        result: list[fx.Node] = []
        build.wait(build.item(start, place, items), result)
        results.append(result)
    return launch, items, results


def _packed(build: NodeBuilder, bucket: Bucket, sent: Sequence[fx.Node], launch: list[fx.Node]) -> list[fx.Node]:
    """What each member sends: a view of one buffer where something above it went, else the tensor itself."""
    pieces = [piece for piece in bucket.pieces if piece.above]
    packed = pack(build, pieces, 1, bucket.key.dtype, launch)
    parts = build.split(packed, [piece.width for piece in pieces], 0, launch)
    lying, number = list(sent), 0
    for place, piece in enumerate(bucket.pieces):
        if piece.above:
            part = build.item(parts, number, launch)
            lying[place] = build.reshape(part, list(sent[place].meta["val"].shape), launch)
            number += 1
    return lying
