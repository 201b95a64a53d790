"""Gradients that wait: ``set_requires_gradient_sync(False)`` and ``set_requires_all_reduce(False)``.

FSDP2 keeps such gradients on the unsharded parameter, or, between reduce-scatter and all-reduce, in a partial output,
and adds them to the next reduction. A captured graph keeps nothing; here they leave it as any gradient does, into the
``grad`` of a leaf of stride 0, and come back as one more input of the operator. Order and dtype of the sums are
FSDP2's: ``to_accumulated_grad_if_needed`` and ``accumulate_unsharded_grad_if_needed`` in _fsdp_param.py,
``partial_reduce_output`` in _fsdp_collectives.py (torch/distributed/fsdp/_fully_shard/, read in 2.11.0 to 2.15.0).
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch

from .errors import InstallError
from .operator import UnshardArgs, unshard
from .spec import ParamSpec


class Accumulated:
    """What one parameter's gradients add up to while backward does not communicate, or not over all axes.

    Each is a leaf of stride 0, allocated only through its ``grad``.
    """

    def __init__(self, sync_now: Callable[[], str]) -> None:
        """`sync_now`: what FSDP2's flags ask for at this moment, as in ``UnshardArgs.sync``."""
        self.unreduced: torch.Tensor | None = None
        self.reduced: torch.Tensor | None = None
        self.taken = False
        self._sync_now = sync_now
        self._heard: torch.Tensor | None = None

    def prepare(self, spec: ParamSpec, device: torch.device) -> None:
        """Make the leaf that ``spec.args.sync`` asks for, if it is not there."""
        dtype = spec.args.accumulate_dtype or spec.dtype
        if spec.args.sync == "none" and self.unreduced is None:
            self.unreduced = _leaf(spec.accumulator_shape, dtype, device)
        elif spec.args.sync == "shard" and self.reduced is None:
            self.reduced = _leaf(spec.accumulator_shape, dtype, device)
        else:
            return
        leaf = self.unreduced if spec.args.sync == "none" else self.reduced
        assert leaf is not None
        leaf.register_post_accumulate_grad_hook(functools.partial(self._arrived, spec.fqn, spec.args.sync))
        if self._heard is None:
            self._heard = torch.zeros((), dtype=dtype, device=device).requires_grad_()
            self._heard.register_post_accumulate_grad_hook(self._reduced)

    def _arrived(self, fqn: str, sync: str, leaf: torch.Tensor) -> None:
        self.taken = False
        if self._sync_now() != sync:
            raise InstallError(
                f"parameter {fqn!r}: expected the gradient-sync options to stay from forward to backward, found them "
                "changed in between, so this gradient would be reduced too late: call set_requires_gradient_sync and "
                "set_requires_all_reduce before the forward they are meant for"
            )

    def _reduced(self, leaf: torch.Tensor) -> None:
        self.taken, leaf.grad = False, None

    def check(self, fqn: str) -> None:
        """Refuse to go on when a forward took what had accumulated and no backward brought it back.

        Raises:
            InstallError: it was not reduced, where eager FSDP2 would have.
        """
        if self.taken:
            raise InstallError(
                f"parameter {fqn!r}: expected the step that communicates to use every parameter whose gradient "
                "accumulated, and to run backward, found that it did not, so the gradient was never reduced: use it in "
                "that step too, or leave gradient sync on"
            )

    def forget(self) -> None:
        """Drop what accumulated."""
        self.taken = False
        for leaf in (self.unreduced, self.reduced):
            if leaf is not None:
                leaf.grad = None

    @property
    def waits(self) -> bool:
        """Whether a gradient is still to be reduced."""
        return any(leaf is not None and leaf.grad is not None for leaf in (self.unreduced, self.reduced))

    def unshard(self, shard: torch.Tensor, args: UnshardArgs) -> torch.Tensor:
        """Gather; backward adds to these, or takes what is there. The forward that will communicate takes it.

        So does one that will not, where the sum is kept in a narrower dtype than the gradient's: autograd would cast
        the gradient before it adds, FSDP2 casts the sum. A shard that gets no gradient is no leaf of that backward: its
        accumulation hooks are not called, as in FSDP2.
        """
        dtype = args.param_dtype or shard.dtype
        kept = args.accumulate_dtype or dtype
        if args.sync == "none" and torch.promote_types(dtype, kept) == kept:
            return unshard(shard.detach(), args, accumulator=self.unreduced)
        pending = _take(self.unreduced)
        if args.sync != "all":
            if pending is not None:
                self.taken = True
            leaf = self.unreduced if args.sync == "none" else self.reduced
            return unshard(shard.detach(), args, accumulator=leaf, pending=pending)
        partial = _take(self.reduced)
        if pending is None and partial is None:
            return unshard(shard, args)
        self.taken = True
        return unshard(shard, args, accumulator=self._heard, pending=pending, partial=partial)


def _leaf(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    with torch.no_grad():
        return torch.zeros((), dtype=dtype, device=device).expand(shape).requires_grad_()


def _take(leaf: torch.Tensor | None) -> torch.Tensor | None:
    if leaf is None or leaf.grad is None:
        return None
    gradient = leaf.grad
    leaf.grad = None
    return gradient
