"""How is a node added with its `meta["val"]`, without tracing? The only place that computes fake values."""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Final

import torch
from torch import fx
from torch._subclasses import fake_tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from collective_identity.transports import WAIT, Transport, default_overload

from ..sizes import is_static, without_guards
from .plan import BucketKey

_ATEN: Final = torch.ops.aten


def mode_of(nodes: Iterable[fx.Node]) -> FakeTensorMode:
    """The fake mode of the first node that has one, else a new one."""
    for node in nodes:
        value = node.meta["val"]
        if isinstance(value, FakeTensor):
            return value.fake_mode
    return FakeTensorMode()


def views_of(value: FakeTensor, cut: Callable[[torch.Tensor], Sequence[torch.Tensor]]) -> list[torch.Tensor]:
    """Views of a fake tensor, made by the meta kernels alone; they share the storage of ``value``.

    It is what `FakeTensorMode` itself does once it has looked through its cache and its exceptions (PyTorch
    2.11 and 2.13 ``torch/_subclasses/fake_tensor.py``), of which views have none. A full dispatch costs five
    times as much.
    """
    mode = value.fake_mode
    kernel_only = getattr(fake_tensor, "in_kernel_invocation_manager", None)
    with torch.no_grad():
        if kernel_only is None:
            with mode:
                return list(cut(value))
        with kernel_only(mode):
            pieces = cut(value)
        return [FakeTensor(mode, piece, value.device) for piece in pieces]


def flattened(values: Sequence[FakeTensor]) -> list[torch.Tensor]:
    """Views in one dimension of contiguous fake tensors of one mode and device; see `views_of`."""
    return views_of(values[0], lambda _: [value.view(-1) for value in values])


def fresh_like(value: FakeTensor) -> torch.Tensor:
    """A fake tensor of the same shape, strides, element type and device, with memory of its own; see `views_of`."""
    kernel_only = getattr(fake_tensor, "in_kernel_invocation_manager", None)
    if kernel_only is None:
        with value.fake_mode:
            return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=value.device)
    with kernel_only(value.fake_mode):
        made = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta")
    return FakeTensor(value.fake_mode, made, value.device)


class NodeBuilder:
    """Adds nodes with their ``meta['val']``, each computed once by the operator itself on fake tensors."""

    def __init__(self, graph: fx.Graph, mode: FakeTensorMode, handed_on: Mapping[str, Any]) -> None:
        self._graph, self._mode, self._handed_on = graph, mode, handed_on

    def value(self, node: fx.Node) -> Any:
        """``meta['val']`` under this builder's fake mode."""
        value = node.meta["val"]
        if isinstance(value, torch.Tensor) and getattr(value, "fake_mode", None) is not self._mode:
            with self._mode:
                return torch.empty_strided(
                    value.shape, value.stride(), dtype=value.dtype, device=value.device
                )
        return value

    def call(
        self, target: Any, args: tuple[Any, ...], into: list[fx.Node], value: Any = None, **kwargs: Any
    ) -> fx.Node:
        """A new node; ``value`` is its ``meta['val']`` where that is known already."""
        node = self._graph.call_function(target, args, kwargs)
        if value is None:
            with without_guards(self._mode), self._mode, torch.no_grad():
                value = target(*fx.node.map_arg(args, self.value), **kwargs)
        node.meta.update(self._handed_on)
        node.meta["val"] = value
        into.append(node)
        return node

    def fresh(self, like: fx.Node, shape: Sequence[int], dtype: torch.dtype | None = None) -> Any:
        """The contiguous value of an operator on ``like`` that has memory of its own; None: ask the operator."""
        value = self.value(like)
        if not isinstance(value, FakeTensor) or not is_static(value):
            return None
        return views_of(value, lambda v: [v.new_empty(shape, dtype=dtype)])[0]

    def collective(self, key: BucketKey, buffer: fx.Node, into: list[fx.Node]) -> fx.Node:
        """The start node that sends a buffer of one dimension."""
        known = None
        if is_static(buffer.meta["val"]):
            size = buffer.meta["val"].numel()
            if key.transport is Transport.ALL_GATHER:
                size *= key.group_size or 1
            elif key.transport is Transport.REDUCE_SCATTER:
                size //= key.group_size or 1
            known = self.fresh(buffer, [size])
        return self.call(default_overload(key.transport), key.arguments(buffer), into, known)

    def wait(self, start: fx.Node, into: list[fx.Node], known: torch.Tensor | None = None) -> fx.Node:
        """The wait for one result of a collective, of the same layout."""
        value = start.meta["val"]
        if known is None and isinstance(value, FakeTensor) and is_static(value):
            known = fresh_like(value)
        return self.call(WAIT, (start,), into, known)

    def handed_over(self, node: fx.Node) -> FakeTensor | None:
        """The value of a node that goes, for what takes its place: it is known then, and what shares memory with it
        further down still says so. None where it is of another fake mode, symbolic or not contiguous."""
        value = node.meta["val"]
        if not isinstance(value, FakeTensor) or value.fake_mode is not self._mode:
            return None
        return value if is_static(value) and value.is_contiguous() else None

    def like_both(self, one: fx.Node, other: fx.Node) -> Any:
        """The value of an operator that combines two tensors alike element by element; None: ask the operator."""
        a, b = self.value(one), self.value(other)
        return fresh_like(a) if a.stride() == b.stride() and a.is_contiguous() else None

    def joined(self, nodes: Sequence[fx.Node], dim: int) -> Any:
        """The value of a ``cat`` of contiguous tensors without symbols; None: ask the operator."""
        first = self.value(nodes[0])
        if not isinstance(first, FakeTensor) or not all(is_static(node.meta["val"]) for node in nodes):
            return None
        shape = list(first.shape)
        shape[dim] = sum(node.meta["val"].shape[dim] for node in nodes)
        return self.fresh(nodes[0], shape)

    def laid_out(self, shape: Sequence[int], dim: int, like: fx.Node) -> torch.Tensor:
        """A value of ``shape``, contiguous but for ``dim``, which comes first in memory."""
        value = self.value(like)
        moved = [shape[dim], *shape[:dim], *shape[dim + 1:]]
        with self._mode:
            return torch.empty(moved, dtype=value.dtype, device=value.device).movedim(0, dim)

    def size(self, node: fx.Node, dim: int, into: list[fx.Node]) -> int | fx.Node:
        """A size of a tensor: the number, or a node that reads it where it is symbolic."""
        value = node.meta["val"]
        dim %= value.dim()
        size = value.shape[dim]
        return size if isinstance(size, int) else self.call(_ATEN.sym_size.int, (node, dim), into, size)

    def arithmetic(
        self, combine: Callable[[Any, Any], Any], size: int | fx.Node, by: int, into: list[fx.Node]
    ) -> int | fx.Node:
        """A size computed from another."""
        if isinstance(size, int):
            return int(combine(size, by))
        return self.call(combine, (size, by), into, combine(size.meta["val"], by))

    def reshape(
        self, node: fx.Node, shape: Sequence[int | fx.Node], into: list[fx.Node], known: torch.Tensor | None = None
    ) -> fx.Node:
        """The node itself when it has the shape already. -1 stands for what is left over."""
        value = self.value(node)
        if list(value.shape) == list(shape):
            return node
        if known is None and is_static(value) and value.is_contiguous():
            numbers = [size for size in shape if isinstance(size, int)]
            known = views_of(value, lambda v: [v.view(numbers)])[0]
        return self.call(_ATEN.reshape.default, (node, list(shape)), into, known)

    def split(self, node: fx.Node, sizes: Sequence[int | fx.Node], dim: int, into: list[fx.Node]) -> fx.Node:
        """One node that yields consecutive pieces along ``dim``, as views.

        The fake pieces are cut one by one: each piece of a split remembers all sizes, which for n pieces
        takes n times n words.
        """
        lengths = [size.meta["val"] if isinstance(size, fx.Node) else size for size in sizes]
        starts = itertools.accumulate(lengths, initial=0)
        places = list(zip(starts, lengths, strict=False))

        def cut(value: torch.Tensor) -> list[torch.Tensor]:
            return [value.narrow(dim, start, size) for start, size in places]

        value = self.value(node)
        if is_static(value):
            pieces = views_of(value, cut)
        else:
            with without_guards(self._mode), self._mode:
                pieces = cut(value)
        return self.call(_ATEN.split_with_sizes.default, (node, list(sizes), dim), into, pieces)

    def row_of_pieces(
        self, node: fx.Node, shapes: Sequence[Sequence[int]], into: list[fx.Node]
    ) -> tuple[fx.Node, list[torch.Tensor]]:
        """`split` of one dimension without symbols into pieces that have these shapes later, and their values then."""
        sizes = [math.prod(shape) for shape in shapes]
        places = list(zip(itertools.accumulate(sizes, initial=0), sizes, shapes, strict=False))

        def cut(value: torch.Tensor) -> list[torch.Tensor]:
            flat = [value.narrow(0, start, size) for start, size, _ in places]
            return flat + [p if len(shape) == 1 else p.view(shape) for p, shape in zip(flat, shapes, strict=True)]

        both = views_of(self.value(node), cut)
        flat, shaped = both[: len(sizes)], both[len(sizes) :]
        return self.call(_ATEN.split_with_sizes.default, (node, sizes, 0), into, flat), shaped

    def item(self, split: fx.Node, place: int, into: list[fx.Node]) -> fx.Node:
        """One piece of a split."""
        return self.call(operator.getitem, (split, place), into, split.meta["val"][place])

    def contiguous(
        self, piece: fx.Node, like: torch.Tensor, shape: Sequence[int | fx.Node], into: list[fx.Node]
    ) -> fx.Node:
        """The piece of a buffer with the shape and contiguous strides that the operator alone yields.

        A piece with gaps is copied by a clone, in its own shape, in which Inductor's index is a plain sum: left to the
        reshape it has divisions and remainders, which cost sympy more than all the rest. The copy has
        memory of its own, as the result it replaces had, and takes over that one's ``meta['val']``, so that the values
        further down that share its memory still say so.
        """
        value = piece.meta["val"]
        if not is_static(like) or not is_static(value):
            if value.dim() > 1:
                piece = self.call(_ATEN.clone.default, (piece,), into, memory_format=torch.contiguous_format)
            return self.call(_ATEN.reshape.default, (piece, list(shape)), into)
        if value.is_contiguous():
            return self.reshape(piece, shape, into)
        fresh = like if like.is_contiguous() and getattr(like, "fake_mode", None) is self._mode else None
        copied = None if fresh is None else views_of(fresh, lambda v: [v.view(value.shape)])[0]  # type: ignore[arg-type]
        piece = self.call(_ATEN.clone.default, (piece,), into, copied, memory_format=torch.contiguous_format)
        if list(value.shape) == list(shape):
            return piece
        return self.call(_ATEN.reshape.default, (piece, list(shape)), into, fresh)
