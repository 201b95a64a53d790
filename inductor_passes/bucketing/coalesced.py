"""How does a bucket look that copies nothing? One coalesced collective, and a wait for each member's own result."""

from __future__ import annotations

from collections.abc import Sequence

from torch import fx

from collective_identity.transports import WAIT, Transport, coalesced_overload

from ..sizes import is_static
from .node_builder import NodeBuilder
from .plan import Bucket


def can_coalesce(bucket: Bucket, sent: Sequence[fx.Node]) -> bool:
    """Whether each member's tensor may be sent where it lies: of one element type, contiguous, of known size > 0."""
    return all(
        value.dtype is bucket.key.dtype
        and is_static(value)
        and value.numel() > 0
        and value.is_contiguous()
        and not value.is_neg()
        and not value.is_conj()
        for value in (node.meta["val"] for node in sent)
    )


def build_coalesced(
    build: NodeBuilder, bucket: Bucket, sent: Sequence[fx.Node]
) -> tuple[fx.Node, list[fx.Node], list[list[fx.Node]]]:
    """The start node, the item of each member, and what each member ends in: its own wait."""
    key = bucket.key
    reduce_op = () if key.reduce_op is None else (key.reduce_op,)
    size = () if key.transport is Transport.ALL_REDUCE else (key.group_size,)
    start = build.call(coalesced_overload(key.transport), (list(sent), *reduce_op, *size, key.group), [])
    items: list[fx.Node] = []
    results: list[list[fx.Node]] = []
    for place in range(len(sent)):
        result: list[fx.Node] = []
        build.call(WAIT, (build.item(start, place, items),), result)
        results.append(result)
    return start, items, results
