"""Is a gather followed by matrix products, or a reduce-scatter preceded by one? Reads the graph's shapes.

The operators are those of PyTorch ``torch/distributed/_symmetric_memory/__init__.py`` (2.11.0, 2.12.0, 2.13.0,
2.14.1, 2.15.0, same schemas): ``fused_all_gather_matmul(A, Bs, gather_dim, group, *, return_A)`` and
``fused_matmul_reduce_scatter(A, B, reduce_op, scatter_dim, group)``. A dimension other than the first is gathered
by a split along the first and a ``cat``, and scattered by a split along it and a ``cat`` along the first, as
``torch/distributed/_functional_collectives.py`` does.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import torch
from torch import fx

from collective_identity.transports import Launch

from ..sizes import is_static

aten = torch.ops.aten
MM: Final = aten.mm.default
_RESHAPES: Final = (aten.view.default, aten.reshape.default, aten._unsafe_view.default)
_SPLITS: Final = (aten.split.Tensor, aten.split_with_sizes.default)
# What may stand between a weight and the product, and is moved up with it: views, of one tensor each.
_VIEWS: Final = (
    aten.t.default, aten.transpose.int, aten.permute.default, aten.view.default, aten.expand.default, aten.alias.default
)


@dataclass(frozen=True, slots=True)
class GatherMatmul:
    """An all-gather and the products that take what it yields as left operand.

    Attributes:
        start: start node of the gather.
        gathered: the gathered tensor, rearranged to `dim`; the wait itself for the first dimension.
        dim: the dimension gathered along.
        products: the ``mm`` nodes.
        raised: views of right operands that the fused operator needs earlier than they stand.
        first: the earliest user of `gathered`; the fused operator stands before it.
        through: nodes that go with the gather: wait, split, pieces.
    """

    start: fx.Node
    gathered: fx.Node
    dim: int
    products: tuple[fx.Node, ...]
    raised: tuple[fx.Node, ...]
    first: fx.Node
    through: tuple[fx.Node, ...]

    @property
    def reads(self) -> tuple[tuple[fx.Node, fx.Node], ...]:
        """(what is read, by whom it is read now) for every operand; all will be read at `first`."""
        operands = [(self.start.args[0], self.start), *((p.args[1], p) for p in self.products)]
        operands += [(self.gathered, p) for p in self.products]
        return tuple((read, by) for read, by in operands if isinstance(read, fx.Node))


@dataclass(frozen=True, slots=True)
class MatmulScatter:
    """A product and the reduce-scatter of it.

    Attributes:
        start: start node of the reduce-scatter.
        wait: its wait.
        product: the ``mm`` node.
        left: left operand of the fused operator, with the leading dimensions of what is scattered.
        shape: that operand's shape; `left` is reshaped to it where it has another.
        dim: the dimension scattered along.
        through: nodes that go: reshape, split, pieces, cat.
    """

    start: fx.Node
    wait: fx.Node
    product: fx.Node
    left: fx.Node
    shape: tuple[int, ...]
    dim: int
    through: tuple[fx.Node, ...]


def gather_matmul(start: fx.Node, launch: Launch) -> GatherMatmul | None:
    """The products that a gather feeds, as far as they can take their right operands earlier; None for none."""
    wait = next(iter(start.users))
    gathered, dim, through = _rearranged(wait, launch.group_size or 0)
    if not known(gathered):
        return None
    value = gathered.meta["val"]
    if value.dim() < 2 or dim >= value.dim() - 1 or not value.numel():
        return None
    flat = (value.numel() // value.shape[-1], value.shape[-1])
    candidates = []
    for user in gathered.users:
        if _is_product_of(user, gathered):
            candidates.append(user)
        elif user.target in _RESHAPES and known(user) and tuple(user.meta["val"].shape) == flat:
            candidates += [p for p in user.users if _is_product_of(p, user)]
    if not candidates:
        return None
    first = min(gathered.users)
    products: list[fx.Node] = []
    raised: list[fx.Node] = []
    for product in sorted(set(candidates)):
        right = product.args[1]
        assert isinstance(right, fx.Node)
        chain = _raisable(right, first, gathered)
        if chain is not None and right.meta["val"].dtype == value.dtype:
            products.append(product)
            raised += chain
    if not products:
        return None
    return GatherMatmul(start, gathered, dim, tuple(products), tuple(sorted(set(raised))), first, through)


def matmul_scatter(start: fx.Node, launch: Launch) -> MatmulScatter | str:
    """The product that a reduce-scatter scatters, or in words what is in the way."""
    sent = launch.inputs[0]
    scattered, dim, through = _unsplit(sent, launch.group_size or 0)
    product = scattered
    if scattered.target in _RESHAPES:
        inner = scattered.args[0]
        assert isinstance(inner, fx.Node)
        product = inner
        through = (scattered, *through)
    if product.op != "call_function" or product.target is not MM or not known(scattered, product, *product.args):
        return "no product"
    value = scattered.meta["val"]
    inner_size = product.args[0].meta["val"].shape[-1]  # type: ignore[union-attr]
    shape = (*value.shape[:-1], inner_size)
    if value.dim() < 2 or value.shape[-1] != product.meta["val"].shape[-1] or dim >= value.dim() - 1:
        return "no product"
    if not value.numel():
        return "no product"
    allowed = {product, *through, start}
    for node in (product, *through):
        for user in node.users:
            if user not in allowed:
                return f"{node.name} is used by {user.name}"
    left = product.args[0]
    assert isinstance(left, fx.Node)
    before = left.args[0] if left.target in _RESHAPES else None
    if known(before) and isinstance(before, fx.Node) and tuple(before.meta["val"].shape) == shape:
        left = before
    return MatmulScatter(start, next(iter(start.users)), product, left, shape, dim, through)


def known(*nodes: object) -> bool:
    """Whether every node has a strided example value without symbols."""
    return all(
        isinstance(n, fx.Node)
        and isinstance(n.meta.get("val"), torch.Tensor)
        and n.meta["val"].layout is torch.strided
        and is_static(n.meta["val"])
        for n in nodes
    )


def _is_product_of(node: fx.Node, left: fx.Node) -> bool:
    return node.target is MM and node.args[0] is left and node.args[1] is not left and known(node, node.args[1])


def flattened(match: GatherMatmul) -> list[fx.Node]:
    """The reshapes of the gathered tensor that only the products read, and that go with them."""
    products = set(match.products)
    return [
        user for user in match.gathered.users
        if user.target in _RESHAPES and user.users and all(one in products for one in user.users)
    ]


def _raisable(right: fx.Node, limit: fx.Node, gathered: fx.Node) -> list[fx.Node] | None:
    """The views to move so that ``right`` is known before ``limit``; None when something else is late."""
    chain = []
    node = right
    while not node < limit:
        if node.op != "call_function" or node.target not in _VIEWS:
            return None
        chain.append(node)
        (node,) = node.all_input_nodes
    return None if node is gathered else chain[::-1]


def _rearranged(wait: fx.Node, ranks: int) -> tuple[fx.Node, int, tuple[fx.Node, ...]]:
    """The gathered tensor, the dimension gathered along, and what lies before it; the wait, 0 unless rearranged."""
    plain: tuple[fx.Node, int, tuple[fx.Node, ...]] = (wait, 0, ())
    users = list(wait.users)
    split = users[0] if len(users) == 1 and users[0].target in _SPLITS else wait
    joined = {user for piece in (users if split is wait else split.users) for user in piece.users}
    if len(joined) != 1 or not known(wait):
        return plain
    (cat,) = joined
    pieces, dim = _parts(cat)
    rows = wait.meta["val"].shape[0]
    if len(pieces) != ranks or rows % ranks or not _are_pieces(pieces, split, rows // ranks, 0):
        return plain
    if split is not wait and not _splits_evenly(split, rows // ranks, 0):
        return plain
    return cat, dim % wait.meta["val"].dim(), (wait, *([split] if split is not wait else []), *pieces)


def _unsplit(sent: fx.Node, ranks: int) -> tuple[fx.Node, int, tuple[fx.Node, ...]]:
    """The tensor scattered, the dimension scattered along, and what lies between; ``sent``, 0 unless rearranged."""
    plain: tuple[fx.Node, int, tuple[fx.Node, ...]] = (sent, 0, ())
    pieces, along = _parts(sent)
    origins = {piece.args[0] for piece in pieces if piece.args and isinstance(piece.args[0], fx.Node)}
    split = origins.pop() if len(origins) == 1 else None
    if len(pieces) != ranks or along != 0 or split is None:
        return plain
    source = split.args[0] if split.target in _SPLITS else split
    if not isinstance(source, fx.Node) or not known(source):
        return plain
    dim = _dim_of(split if split is not source else pieces[0], source)
    size = source.meta["val"].shape[dim]
    if size % ranks or not _are_pieces(pieces, split, size // ranks, dim):
        return plain
    if split is not source and not _splits_evenly(split, size // ranks, dim):
        return plain
    return source, dim, (*([split] if split is not source else []), *pieces, sent)


def _parts(cat: fx.Node) -> tuple[list[fx.Node], int]:
    """What a ``cat`` joins and along which dimension; nothing for any other node."""
    given = cat.args[0] if cat.target is aten.cat.default else ()
    dim = cat.args[1] if len(cat.args) > 1 else cat.kwargs.get("dim", 0)
    if not isinstance(given, (list, tuple)) or not isinstance(dim, int):
        return [], 0
    return [part for part in given if isinstance(part, fx.Node)], dim


def _dim_of(node: fx.Node, source: fx.Node) -> int:
    """The dimension that a split or slice cuts along."""
    position = 1 if node.target is aten.slice.Tensor else 2
    dim = node.args[position] if len(node.args) > position else node.kwargs.get("dim", 0)
    return int(dim % source.meta["val"].dim()) if isinstance(dim, int) else 0


def _splits_evenly(split: fx.Node, size: int, dim: int) -> bool:
    source, given = split.args[0], split.args[1]
    if not isinstance(source, fx.Node) or _dim_of(split, source) != dim:
        return False
    return all(one == size for one in given) if isinstance(given, (list, tuple)) else bool(given == size)


def _are_pieces(pieces: Sequence[fx.Node], source: fx.Node, size: int, dim: int) -> bool:
    """Whether these are the equal pieces of ``source`` in order, each used once."""
    whole = [(i * size, (i + 1) * size) for i in range(len(pieces))]
    total = len(pieces) * size
    return all(
        len(piece.users) == 1 and piece.args[:1] == (source,) and _cut(piece, total, source, dim) in (i, place)
        for i, (piece, place) in enumerate(zip(pieces, whole, strict=True))
    )


def _cut(piece: fx.Node, total: int, source: fx.Node, dim: int) -> object:
    """What a piece is of its source: its number in a split, or (start, end) of a slice; None for anything else."""
    if piece.target is operator.getitem:
        return piece.args[1]
    if piece.target is not aten.slice.Tensor or _dim_of(piece, source) != dim or len(piece.args) < 4:
        return None
    start, end = piece.args[2], piece.args[3]
    if not isinstance(start, int) or not isinstance(end, int) or (len(piece.args) > 4 and piece.args[4] != 1):
        return None
    return start, min(end, total)
