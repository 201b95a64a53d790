"""What does a kernel read and write for a member? Through the casts, pads and chunks around it, which it does too."""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Final

import torch
from torch import fx

from collective_identity.transports import Launch, Transport, launch_of, waits_of

from ..kernels import available, can_move, layout_of
from ..sizes import is_static
from .hazards import hazards_of
from .plan import Bucket, Piece

_ATEN: Final = torch.ops.aten
_CASTS: Final = (_ATEN._to_copy.default, torch.ops.prims.convert_element_type.default)
_SPLITS: Final = (_ATEN.split.Tensor, _ATEN.split_with_sizes.default)
_FLOATS: Final = (torch.float32, torch.bfloat16, torch.float16)


def with_kernels(nodes: Sequence[fx.Node], buckets: Sequence[Bucket], *, auto: bool) -> list[Bucket]:
    """The buckets of a graph with the pieces that kernels pack, where they can; with `auto`, where they run as such.

    A node around a member is only left out where nothing that is then read is written between the first and the last
    node of its bucket.
    """
    candidates = {
        number: tuple((_sent_piece if bucket.coalesced else _piece)(start) for start in bucket.members)
        for number, bucket in enumerate(buckets)
        if (not bucket.coalesced or bucket.key.transport is Transport.ALL_GATHER) and _suits(bucket, auto)
    }
    if not candidates:
        return list(buckets)
    read = [node for pieces in candidates.values() for p in pieces for node in (p.source, *p.above, *p.below)]
    place, hazards = {node: i for i, node in enumerate(nodes)}, hazards_of(nodes, read)
    result = list(buckets)
    for number, pieces in candidates.items():
        bucket = buckets[number]
        around = [n for member, p in zip(bucket.members, pieces, strict=True) for n in (member, *p.above, *p.below)]
        places = [place[node] for node in around]
        if hazards.epoch(min(places)) != hazards.epoch(max(places)):
            pieces = tuple(_bare(start) for start in bucket.members)
        written = [piece for piece in pieces if piece.above] if bucket.coalesced else pieces
        if written and _fits(bucket, written):
            result[number] = replace(bucket, pieces=pieces)
    return result


def _suits(bucket: Bucket, auto: bool) -> bool:
    """Whether the members are of one real element type and of known sizes, and not all empty."""
    dtype = bucket.key.dtype
    values = [value for start in bucket.members for value in (start.meta["val"], _launch(start).inputs[0].meta["val"])]
    return (
        (not auto or available(bucket.key.device))
        and not dtype.is_complex
        and all(value.dtype is dtype and is_static(value) for value in values)
        and any(value.numel() for value in values)
    )


def _fits(bucket: Bucket, pieces: Sequence[Piece]) -> bool:
    """Whether the kernels can do it on a device that has them: the graph is the same everywhere."""
    rows = _rows(_launch(bucket.members[0]))
    sources = [piece.source.meta["val"] for piece in pieces]
    layout = layout_of(
        tuple(p.width for p in pieces), tuple(p.outer for p in pieces), tuple(v.numel() for v in sources), rows
    )
    return can_move([value.dtype for value in sources], bucket.key.dtype, layout)


def _bare(start: fx.Node) -> Piece:
    """The member alone."""
    return _alone(_launch(start), waits_of(start))


def _alone(launch: Launch, waits: Sequence[fx.Node]) -> Piece:
    (sent,), rows = launch.inputs, _rows(launch)
    return Piece(sent, (), 1, sent.meta["val"].numel() // rows, waits[0] if len(waits) == 1 else None, (), 1)


def _piece(start: fx.Node) -> Piece:
    """The member with what is around it."""
    launch = _launch(start)
    bare = _alone(launch, waits_of(start))
    source, outer, above = _above(start, bare.source, _rows(launch))
    made = replace(bare, source=source, above=above, outer=outer)
    if launch.transport is Transport.ALL_GATHER and bare.result is not None:
        result, outer_below, below = _below(bare.result, launch.group_size or 1)
        made = replace(made, result=result, outer_below=outer_below, below=below)
    return made


def _sent_piece(start: fx.Node) -> Piece:
    """The member with what is above it; what it yields is its own."""
    bare = _alone(_launch(start), ())
    source, outer, above = _above(start, bare.source, 1)
    return replace(bare, source=source, above=above, outer=outer)


def _launch(start: fx.Node) -> Launch:
    launch = launch_of(start)
    assert launch is not None
    return launch


def _rows(launch: Launch) -> int:
    """Rows of what is sent: one a rank that it is scattered to."""
    return (launch.group_size or 1) if launch.transport is Transport.REDUCE_SCATTER else 1


def _above(start: fx.Node, sent: fx.Node, rows: int) -> tuple[fx.Node, int, tuple[fx.Node, ...]]:
    """Up from what is sent through chunks of a later dimension, padding at the end of the chunked one, and a cast."""
    gone: list[fx.Node] = []
    node, user, outer, dim = sent, start, 1, 0
    if rows > 1:
        chunked = _chunks(node, user, rows, 0)
        if chunked is not None:
            split, dim, members = chunked
            gone += members
            user, node = split, _first(split)
            outer = math.prod(node.meta["val"].shape[:dim])
    cast = False
    while list(node.users) == [user] and node.op == "call_function":
        is_cast, padded = not cast and _is_cast(node), _padded(node)
        if padded is not None and rows == 1 and outer == 1:
            dim, outer = padded, math.prod(node.meta["val"].shape[:padded])
        if not is_cast and (padded is None or padded != dim):
            break
        cast = cast or is_cast
        gone.append(node)
        user, node = node, _first(node)
    return node, outer, tuple(gone)


def _below(wait: fx.Node, ranks: int) -> tuple[fx.Node, int, tuple[fx.Node, ...]]:
    """Down from a wait through the joining of chunks along a later dimension and the cut at its end."""
    node, user, outer, dim, gone = wait, _only_user(wait), 1, 0, [wait]
    joined = _only_user(next(iter(user.users), None)) if user is not None and user.target in _SPLITS else None
    chunked = None if joined is None else _chunks(joined, None, ranks, None)
    if joined is not None and chunked is not None and chunked[0] is user and _first(user) is wait:
        shape, (_, dim, members) = wait.meta["val"].shape, chunked
        outer = math.prod((shape[0] // ranks, *shape[1:dim]))
        gone += reversed(members)
        node, user = joined, _only_user(joined)
    if user is not None and user.target is _ATEN.slice.Tensor and _first(user) is node:
        given: list[Any] = [*user.args[1:], *(0, 0, None, 1)[len(user.args) - 1:]]
        if given[0] == dim and given[1] in (0, None) and given[3] == 1 and user.meta["val"].is_contiguous():
            gone.append(user)
            node = user
    return node, outer, tuple(gone) if node is not wait else ()


def _chunks(
    node: fx.Node, user: fx.Node | None, ranks: int, along: int | None
) -> tuple[fx.Node, int, list[fx.Node]] | None:
    """The split of which ``node`` joins the ``ranks`` equal pieces along another dimension, that one, and what goes.

    With ``along`` 0, pieces of a later dimension are joined along the first; with None the other way round.
    """
    if node.target is not _ATEN.cat.default or (user is not None and list(node.users) != [user]):
        return None
    pieces: list[fx.Node] = list(node.args[0])  # type: ignore[arg-type]
    join: Any = node.args[1] if len(node.args) > 1 else node.kwargs.get("dim", 0)
    splits = {_first(piece) for piece in pieces if piece.target is operator.getitem}
    if len(pieces) != ranks or len(splits) != 1:
        return None
    (split,) = splits
    dims = node.meta["val"].dim()
    cut: Any = split.args[2] if len(split.args) > 2 else split.kwargs.get("dim", 0)
    join, cut = join % dims, cut % dims
    dim = cut if along == 0 else join
    if split.target not in _SPLITS or dim == 0 or min(cut, join) != 0 or (join if along == 0 else cut) != 0:
        return None
    in_order = [piece.args for piece in pieces] == [(split, place) for place in range(ranks)]
    if not in_order or set(split.users) != set(pieces) or any(list(piece.users) != [node] for piece in pieces):
        return None
    equal = len({tuple(piece.meta["val"].shape) for piece in pieces}) == 1
    return (split, dim, [node, *pieces, split]) if equal else None


def _is_cast(node: fx.Node) -> bool:
    """A change of the element type alone, between types that the kernels turn into each other."""
    if node.target not in _CASTS:
        return False
    before, after = _first(node).meta["val"], node.meta["val"]
    return (
        before.device == after.device
        and before.layout is after.layout
        and set(node.kwargs) <= {"dtype", "layout", "device"}
        and before.dtype in _FLOATS
        and after.dtype in _FLOATS
    )


def _padded(node: fx.Node) -> int | None:
    """The one dimension behind whose end the node puts zeros."""
    if node.target is not _ATEN.constant_pad_nd.default:
        return None
    amount: Any = node.args[1]
    value = node.args[2] if len(node.args) > 2 else 0
    last = node.meta["val"].dim() - len(amount) // 2
    return last if value == 0 and amount and not any(amount[:-1]) and amount[-1] > 0 else None


def _first(node: fx.Node) -> fx.Node:
    """The tensor that an operator of one tensor takes."""
    (source,) = node.all_input_nodes
    return source


def _only_user(node: fx.Node | None) -> fx.Node | None:
    users = [] if node is None else list(node.users)
    return users[0] if len(users) == 1 and users[0].op == "call_function" else None
