"""The one operator through which a sharded parameter becomes a full one.

``fsdp_hooks::unshard`` is a CompositeImplicitAutograd operator: Dynamo keeps it as a single call with literal
arguments (so they are part of every cache key), AOTAutograd takes it apart into ordinary functional
collectives, and the autograd function inside brings the gradient back to the shard. Each collective is issued
under its own :func:`collective_identity.role_scope`; nothing else is.

While gradients accumulate without communication, the gradient goes to an *accumulator* instead of the shard: a leaf
whose ``grad`` plain autograd adds up. The next call that communicates takes it as ``pending`` or ``partial``.

Order of the gradient's arithmetic (cast, pre-divide, reduce-scatter, all-reduce, post-divide, cast) is that of
``foreach_reduce`` in torch/distributed/fsdp/_fully_shard/_fsdp_collectives.py (read in 2.11.0 to 2.15.0).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch.fx.traceback import annotate

from collective_identity import GRAD_REDUCE_SHARD, GRAD_REPLICATE_REDUCE, PARAM_UNSHARD, role_scope
from collective_identity.transports import WAIT, Transport, default_overload

from . import compat_trace
from .reshard import reshard_mark

NAMESPACE = "fsdp_hooks"
SCHEMA = (
    "unshard(Tensor shard, Tensor? accumulator, Tensor? pending, Tensor? partial, "
    "int version, str producer, str param, str param_group, int dim, int size, "
    "str group, int group_size, str reduce_group, str reduce_op, str? replicate_group, int replicate_size, "
    "str replicate_op, float? predivide, float? postdivide, ScalarType? param_dtype, "
    "ScalarType? reduce_dtype, bool reshard_after_forward, str sync) -> Tensor"
)


class UnshardArgs(NamedTuple):
    """The operator's literal arguments, in schema order (all but the tensors).

    ``size`` is the unsharded length of dimension ``dim`` in elements; ``*_op`` are functional-collective reduce
    operations (``"sum"``, ``"avg"``); dtypes of None mean "as it is". ``sync`` says how far backward takes the
    gradient: ``"all"`` into the shard; ``"shard"`` reduced over the shard group alone, ``"none"`` not at all, both
    into the accumulator.
    """

    version: int
    producer: str
    param: str
    param_group: str
    dim: int
    size: int
    group: str
    group_size: int
    reduce_group: str
    reduce_op: str
    replicate_group: str | None
    replicate_size: int
    replicate_op: str
    predivide: float | None
    postdivide: float | None
    param_dtype: torch.dtype | None
    reduce_dtype: torch.dtype | None
    reshard_after_forward: bool
    sync: str = "all"

    @property
    def chunk(self) -> int:
        """Length of one padded shard in dimension ``dim`` (``torch.chunk`` arithmetic)."""
        return -(-self.size // self.group_size)

    @property
    def accumulate_dtype(self) -> torch.dtype | None:
        """Dtype in which gradients accumulate without communication; None: the parameter's."""
        return self.reduce_dtype or self.param_dtype


class _OwnSequenceNumber(torch.autograd.Function):
    """Takes one autograd sequence number.

    AOTAutograd copies a forward node's ``custom`` to backward nodes of the same ``seq_nr`` (torch 2.11 and 2.12
    replace the backward node's dict). The forward nodes of :class:`_Unshard` must therefore not carry the
    number of the function whose backward issues the gradient collectives.
    """

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return grad


class _Unshard(torch.autograd.Function):
    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any,
        shard: torch.Tensor,
        accumulator: torch.Tensor | None,
        pending: torch.Tensor | None,
        partial: torch.Tensor | None,
        args: UnshardArgs,
    ) -> torch.Tensor:
        ctx.args, ctx.shape, ctx.dtype = args, shard.shape, shard.dtype
        ctx.has, ctx.says_so = (pending is not None, partial is not None), accumulator is not None
        ctx.save_for_backward(*(x for x in (pending, partial) if x is not None))
        _OwnSequenceNumber.apply(shard)
        return gathered(shard, args)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:  # type: ignore[override]
        args: UnshardArgs = ctx.args
        saved = iter(ctx.saved_tensors)
        pending, partial = (next(saved) if has else None for has in ctx.has)
        if pending is not None:  # in the wider dtype of the two, then cast, as FSDP2's ``pending += grad``
            grad = grad + pending
        if args.accumulate_dtype is not None:
            grad = grad.to(args.accumulate_dtype)
        if args.sync == "none":
            return None, grad, None, None, None
        grad = reduced(rank_by_rank(grad, args), args, [args.param], partial)
        if args.sync == "shard":
            return None, grad, None, None, None
        said = grad.dtype
        grad = own_part(grad.to(ctx.dtype), args, ctx.shape)
        return grad, grad.new_zeros((), dtype=said) if ctx.says_so else None, None, None, None


class _Outline(torch.autograd.Function):
    """What unshard returns, without the collectives and their casts: for a look at its shape."""

    @staticmethod
    def forward(ctx: Any, shard: torch.Tensor, args: UnshardArgs) -> torch.Tensor:  # type: ignore[override]
        sizes = list(shard.shape)
        sizes[args.dim] = args.chunk * args.group_size
        full = shard.new_empty(sizes, dtype=args.param_dtype)
        if sizes[args.dim] == args.size:
            return full
        full = full.narrow(args.dim, 0, args.size)
        return full.new_empty_strided(full.shape, full.stride())


def gathered(shard: torch.Tensor, args: UnshardArgs) -> torch.Tensor:
    """The full parameter in memory of its own, without autograd: cast, padded, gathered, cut to size."""
    if args.group_size == 1:
        return _copied(shard, args)
    if args.param_dtype is not None:
        shard = shard.to(args.param_dtype)
    full = WAIT(_gather(_pad(shard, args.dim, args.chunk), args))
    if args.dim != 0:
        full = torch.cat(torch.chunk(full, args.group_size, 0), args.dim)
    if full.shape[args.dim] != args.size:
        full = full.narrow(args.dim, 0, args.size)
        full = torch.ops.aten._unsafe_view(full, full.shape)  # no view, which forward could not change in place
    return full


def rank_by_rank(grad: torch.Tensor, args: UnshardArgs) -> torch.Tensor:
    """A gradient as its reduce-scatter takes it: the ranks' parts one after the other in dimension 0, padded."""
    if args.group_size > 1:
        grad = _pad(grad, args.dim, args.chunk * args.group_size)
        if args.dim != 0:
            grad = torch.cat(torch.chunk(grad, args.group_size, args.dim), 0)
    return grad


def reduced(
    grad: torch.Tensor, args: UnshardArgs, params: Sequence[str], partial: torch.Tensor | None = None
) -> torch.Tensor:
    """This rank's part of a gradient laid out `rank_by_rank`, as far as ``args.sync`` takes it.

    ``params`` are the parameters it belongs to; ``partial`` is what was reduced over the shard group before.
    """
    if args.predivide is not None:
        grad = grad / args.predivide
    if args.group_size > 1:
        grad = WAIT(_reduce(grad.contiguous(), args, params))
    if partial is not None:
        grad = grad + partial
    if args.sync == "shard":
        return grad
    if args.replicate_group is not None:
        grad = WAIT(_replicate(grad.contiguous(), args, params))
    return grad if args.postdivide is None else grad / args.postdivide


def own_part(grad: torch.Tensor, args: UnshardArgs, shape: torch.Size) -> torch.Tensor:
    """A reduced part without its padding; ``shape`` is the shard's."""
    # never of a scalar, which only a group of one can hold
    return grad if grad.shape == shape else grad.narrow(args.dim, 0, shape[args.dim])


def _pad(x: torch.Tensor, dim: int, length: int) -> torch.Tensor:
    missing = length - x.shape[dim]
    return x if missing == 0 else F.pad(x, [0, 0] * (x.ndim - 1 - dim) + [0, missing])


def _copied(shard: torch.Tensor, a: UnshardArgs) -> torch.Tensor:
    """What one rank alone holds, as it is read in forward; resharding frees it like what was gathered."""
    with annotate(reshard_mark(a.reshard_after_forward)):
        full = shard if a.param_dtype is None else shard.to(a.param_dtype)
        return shard.clone() if full is shard else full


def _gather(x: torch.Tensor, a: UnshardArgs) -> torch.Tensor:
    with (
        role_scope(PARAM_UNSHARD, producer=a.producer, group=a.group, param_group=a.param_group, params=[a.param]),
        annotate(reshard_mark(a.reshard_after_forward)),
    ):
        return default_overload(Transport.ALL_GATHER)(x, a.group_size, a.group)


def _reduce(x: torch.Tensor, a: UnshardArgs, params: Sequence[str]) -> torch.Tensor:
    with role_scope(
        GRAD_REDUCE_SHARD, producer=a.producer, group=a.reduce_group, param_group=a.param_group, params=params
    ):
        return default_overload(Transport.REDUCE_SCATTER)(x, a.reduce_op, a.group_size, a.reduce_group)


def _replicate(x: torch.Tensor, a: UnshardArgs, params: Sequence[str]) -> torch.Tensor:
    group = a.replicate_group
    assert group is not None
    with role_scope(
        GRAD_REPLICATE_REDUCE, producer=a.producer, group=group, param_group=a.param_group, params=params
    ):
        return default_overload(Transport.ALL_REDUCE)(x, a.replicate_op, group)


def _unshard(
    shard: torch.Tensor,
    accumulator: torch.Tensor | None,
    pending: torch.Tensor | None,
    partial: torch.Tensor | None,
    *args: Any,
) -> torch.Tensor:
    given = UnshardArgs(*args)
    if accumulator is None and given.group_size > 1 and compat_trace.only_shapes_count(shard):
        return _Outline.apply(shard, given)
    return _Unshard.apply(shard, accumulator, pending, partial, given)


LIBRARY = torch.library.Library(NAMESPACE, "DEF")
LIBRARY.define(SCHEMA, tags=(torch.Tag.pt2_compliant_tag,))
LIBRARY.impl("unshard", _unshard, "CompositeImplicitAutograd")


def unshard(
    shard: torch.Tensor,
    args: UnshardArgs | tuple[Any, ...],
    *,
    accumulator: torch.Tensor | None = None,
    pending: torch.Tensor | None = None,
    partial: torch.Tensor | None = None,
) -> torch.Tensor:
    """Gather ``shard`` into the full parameter; its backward reduces the gradient into the shard.

    Args:
        shard: this rank's part, any float dtype, shape of the full parameter except dimension ``args.dim``,
            which holds ``torch.chunk``'s share (the last ranks may hold less, or nothing).
        args: what to gather and how to reduce; a plain tuple has the fields of `UnshardArgs` in their order.
        accumulator: with ``args.sync`` of ``"none"`` or ``"shard"`` the leaf whose ``grad`` takes the gradient, in
            ``args.accumulate_dtype``: shape of the full parameter, or of one padded shard. The shard then gets none.
            With ``"all"`` a scalar leaf, whose ``grad`` becomes zero: backward has taken `pending` and `partial`.
        pending: what accumulated under ``"none"``, added to the gradient before the reduce-scatter.
        partial: what accumulated under ``"shard"``, added to its result.

    Returns:
        The full parameter, ``args.param_dtype`` or the shard's dtype; memory of its own, so what forward writes to it
        never reaches the shard.
    """
    return torch.ops.fsdp_hooks.unshard(shard, accumulator, pending, partial, *args)  # type: ignore[no-any-return]
