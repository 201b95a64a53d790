"""How does a bucket look that copies nothing? One coalesced collective, and a wait for each member's own result."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import fx

from collective_identity.transports import WAIT, coalesced_overload

from ..sizes import is_static
from .node_builder import NodeBuilder
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
) -> tuple[fx.Node, list[fx.Node], list[list[fx.Node]]]:
    """The start node, the item of each member, and what each member ends in: its own wait."""
    key = bucket.key
    start = build.call(coalesced_overload(key.transport), key.arguments(list(sent)), [])
    items: list[fx.Node] = []
    results: list[list[fx.Node]] = []
    for place in range(len(sent)):
        result: list[fx.Node] = []
        build.call(WAIT, (build.item(start, place, items),), result)
        results.append(result)
    return start, items, results
