"""Gradients that wait: ``set_requires_gradient_sync(False)`` and ``set_requires_all_reduce(False)``.

FSDP2 keeps such gradients on the unsharded parameter, or, between reduce-scatter and all-reduce, in a partial output,
and adds them to the next reduction. A captured graph keeps nothing; here they leave it as any gradient does, into the
``grad`` of a leaf of stride 0, and come back as one more input of the operator. Order and dtype of the sums are
FSDP2's: ``to_accumulated_grad_if_needed`` and ``accumulate_unsharded_grad_if_needed`` in _fsdp_param.py,
``partial_reduce_output`` in _fsdp_collectives.py (torch/distributed/fsdp/_fully_shard/, read in 2.11.0 to 2.15.0).
"""

from __future__ import annotations

from typing import Any

import torch

from .errors import InstallError
from .operator import UnshardArgs, unshard
from .spec import ParamSpec


class Accumulated:
    """What one parameter's gradients add up to while backward does not communicate, or not over all axes."""

    def __init__(self, fqn: str, sharded: torch.Tensor) -> None:
        self.unreduced: torch.Tensor | None = None
        self.reduced: torch.Tensor | None = None
        self.taken: tuple[torch.Tensor | None, torch.Tensor | None] = (None, None)
        self._fqn = fqn
        self._given_back = False
        self._handle = sharded.register_post_accumulate_grad_hook(self._arrived)

    def prepare(self, spec: ParamSpec, device: torch.device) -> None:
        """Make the leaf that ``spec.args.sync`` asks for, if it is not there; take back what no backward came for."""
        self.unreduced, self.reduced = map(_added, (self.unreduced, self.reduced), self.taken)
        self._given_back = self.taken != (None, None)
        self.taken = (None, None)
        dtype = spec.args.accumulate_dtype or spec.dtype
        if spec.args.sync == "none" and self.unreduced is None:
            self.unreduced = _leaf(spec.accumulator_shape, dtype, device)
        elif spec.args.sync == "shard" and self.reduced is None:
            self.reduced = _leaf(spec.accumulator_shape, dtype, device)
            self.reduced.register_post_accumulate_grad_hook(self._arrived)

    @property
    def waits(self) -> bool:
        """Whether a gradient is still to be reduced."""
        return any(leaf is not None and leaf.grad is not None for leaf in (self.unreduced, self.reduced))

    def unshard(self, shard: torch.Tensor, args: UnshardArgs) -> torch.Tensor:
        """Gather; backward adds to what waits, or reduces it. The forward of that backward takes it."""
        if args.sync == "none":
            return unshard(shard, args, accumulator=self.unreduced)
        pending = _take(self.unreduced)
        partial = None if args.sync == "shard" else _take(self.reduced)
        if pending is not None or partial is not None:
            self.taken = (pending, partial)
            self._given_back = False
        accumulator = self.reduced if args.sync == "shard" else None
        return unshard(shard, args, accumulator=accumulator, pending=pending, partial=partial)

    def end(self) -> None:
        """Stop listening to the parameter."""
        self._handle.remove()

    def _arrived(self, leaf: Any) -> None:
        """Backward reduced what its forward took."""
        if self._given_back:
            raise InstallError(
                f"parameter {self._fqn!r}: expected FSDP2's options to stay as they are from a forward to its "
                "backward, found them set in between while accumulated gradients were on their way: call "
                "set_requires_gradient_sync and the like before the forward that they are for"
            )
        self.taken = (None, None)


def _leaf(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    with torch.no_grad():
        return torch.zeros((), dtype=dtype, device=device).expand(shape).requires_grad_()


def _take(leaf: torch.Tensor | None) -> torch.Tensor | None:
    if leaf is None or leaf.grad is None:
        return None
    gradient = leaf.grad
    leaf.grad = None
    return gradient


def _added(leaf: torch.Tensor | None, gradient: torch.Tensor | None) -> torch.Tensor | None:
    if leaf is not None and gradient is not None:
        leaf.grad = gradient if leaf.grad is None else leaf.grad + gradient
    return leaf
