"""How does a bucket look that kernels pack? ``pack``, one collective, a wait, and ``unpack`` after a gather."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import fx

from collective_identity.transports import Transport

from .node_builder import NodeBuilder
from .plan import Bucket, Piece


def pack(build: NodeBuilder, pieces: Sequence[Piece], rows: int, dtype: torch.dtype, into: list[fx.Node]) -> fx.Node:
    """The node that writes pieces into one buffer of so many rows."""
    sources, widths, outers = [p.source for p in pieces], [p.width for p in pieces], [p.outer for p in pieces]
    known = build.fresh(sources[0], [rows * sum(widths)], dtype)
    return build.call(torch.ops.inductor_passes.pack.default, (sources, widths, outers, rows, dtype), into, known)


def build_packed(build: NodeBuilder, bucket: Bucket) -> tuple[list[fx.Node], list[fx.Node], list[list[fx.Node]]]:
    """The nodes up to the start node, those up to the common buffer, and those of each member.

    What a reduction yields lies in the buffer in one piece and stays there: a view each, as in a plain bucket.
    """
    key, pieces = bucket.key, bucket.pieces
    ranks = key.group_size or 1
    rows = ranks if key.transport is Transport.REDUCE_SCATTER else 1
    widths = [piece.width for piece in pieces]
    launch: list[fx.Node] = []
    start = build.collective(key, pack(build, pieces, rows, key.dtype, launch), launch)
    wait: list[fx.Node] = []
    received = build.wait(start, wait)
    likes = [member if piece.result is None else piece.result for member, piece in
             zip(bucket.members, pieces, strict=True)]
    values: list[torch.Tensor] = [like.meta["val"] for like in likes]
    if key.transport is Transport.ALL_GATHER:
        lengths = [math.prod(value.shape) for value in values]
        outers = [piece.outer_below for piece in pieces]
        parts = build.call(
            torch.ops.inductor_passes.unpack.default, (received, widths, outers, lengths, ranks), wait
        )
    else:
        parts = build.split(received, widths, 0, wait)
    results: list[list[fx.Node]] = []
    for place, value in enumerate(values):
        result: list[fx.Node] = []
        piece = build.item(parts, place, result)
        last = build.reshape(piece, list(value.shape), result)
        one_mode = getattr(value, "fake_mode", None) is last.meta["val"].fake_mode
        if key.transport is Transport.ALL_GATHER and one_mode and value.is_contiguous():
            last.meta["val"] = value  # as what it replaces: what shares memory with that further down still says so
        results.append(result)
    return launch, wait, results
