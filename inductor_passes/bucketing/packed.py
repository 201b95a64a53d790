"""How does a bucket look that kernels pack? ``pack``, one collective, a wait, and ``unpack`` after a gather."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import fx

from collective_identity.transports import Transport

from .node_builder import NodeBuilder, flattened
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
    shapes = [list(like.meta["val"].shape) for like in likes]
    known: Sequence[torch.Tensor | None]
    if key.transport is Transport.ALL_GATHER:
        lengths = [math.prod(shape) for shape in shapes]
        outers = [piece.outer_below for piece in pieces]
        known = handed = [build.handed_over(like) for like in likes]
        values = [value for value in handed if value is not None]
        parts = build.call(
            torch.ops.inductor_passes.unpack.default,
            (received, widths, outers, lengths, ranks),
            wait,
            flattened(values) if len(values) == len(known) else None,
        )
    else:
        parts, known = build.row_of_pieces(received, shapes, wait)
    results: list[list[fx.Node]] = []
    for place, (shape, value) in enumerate(zip(shapes, known, strict=True)):
        result: list[fx.Node] = []
        last = build.reshape(build.item(parts, place, result), shape, result, value)
        if value is not None:
            last.meta["val"] = value
        results.append(result)
    return launch, wait, results
