"""What a whole-step graph does between backward and the next step: scaling, the user's own work, the optimizer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from .errors import InstallError
from .step_inputs import Slot, local, standing_in
from .step_optimizer import TracedOptimizer
from .step_scaler import ScaledStep, TracedScaler


@dataclass(frozen=True)
class Update:
    """How a step was traced to use its gradients."""

    slots: tuple[Slot, ...]
    optimizer: TracedOptimizer | None
    before_step: Callable[[nn.Module], Any] | None
    scaler: TracedScaler | None

    @classmethod
    def of(
        cls,
        slots: tuple[Slot, ...],
        optimizer: torch.optim.Optimizer | None,
        before_step: Callable[[nn.Module], Any] | None,
        scaler: torch.amp.GradScaler | None,
    ) -> Update:
        """Check what was asked for.

        Raises:
            InstallError, UnsupportedOption: as :meth:`TracedOptimizer.of`, or there is nothing to run before.
        """
        if before_step is not None and optimizer is None:
            raise InstallError(
                "trace_train_step expects before_step together with optimizer, found it alone: it runs between "
                "backward and the optimizer's step; pass the optimizer, or do that work after each step"
            )
        names = {id(slot.tensor): slot.name for slot in slots}
        device = next(slot.tensor.device for slot in slots)
        return cls(
            slots,
            None if optimizer is None else TracedOptimizer.of(optimizer, names),
            before_step,
            TracedScaler.of(scaler, device),
        )

    def tensors(self) -> list[torch.Tensor]:
        """What the graph reads and writes beside parameters and buffers."""
        return [
            *(self.scaler.tensors() if self.scaler else ()),
            *(self.optimizer.tensors() if self.optimizer else ()),
        ]

    def expect_unchanged(self) -> None:
        """Compare with what was traced."""
        if self.optimizer is not None:
            self.optimizer.expect_unchanged()

    def traced(self, tensors: Sequence[torch.Tensor]) -> TracedUpdate:
        """The update of one step while it is traced, on stand-ins for :meth:`tensors`."""
        count = 2 if self.scaler else 0
        scaled = self.scaler.standing_in(tensors[:count]) if self.scaler else None
        return TracedUpdate(self, scaled, list(tensors[count:]))


@dataclass(frozen=True)
class TracedUpdate:
    """One step's update while it is traced."""

    update: Update
    scaler: ScaledStep | None
    state: list[torch.Tensor]

    def scaled(self, loss: torch.Tensor) -> torch.Tensor:
        """What backward starts from."""
        return loss if self.scaler is None else self.scaler.scaled(loss)

    def step(
        self, model: nn.Module, parts: Sequence[torch.Tensor], gradients: Sequence[torch.Tensor | None]
    ) -> None:
        """Trace everything from the gradients to the updated parameters.

        Args:
            model: what ``before_step`` is given.
            parts: this rank's part of every slot; gradients are put on the trainable ones.
            gradients: of the trainable ones, in order.
        """
        slots, before_step, optimizer = self.update.slots, self.update.before_step, self.update.optimizer
        assert optimizer is not None
        for slot, gradient in zip((s for s in slots if s.trainable), gradients, strict=True):
            if gradient is not None and not optimizer.holds(slot.tensor):
                raise InstallError(
                    f"trace_train_step expects the optimizer to hold every parameter that is trained, found "
                    f"{slot.name!r} in none of its groups, whose gradient would be lost: add it, freeze it "
                    "(requires_grad_(False)), or leave optimizer out and step outside"
                )
        in_kernel = self.scaler is not None and before_step is None and optimizer.scales_itself
        if self.scaler is not None or before_step is not None:
            with standing_in(slots, parts, gradients) as whole:
                if self.scaler is not None:
                    self.scaler.check(whole, unscale=not in_kernel)
                shared = [one.grad for one in whole]
                if before_step is not None:
                    before_step(model)
                for one, slot, gradient in zip(whole, (s for s in slots if s.trainable), shared, strict=True):
                    if one.grad is gradient:  # else before_step put another there, through the model
                        one.grad = slot.tensor.grad
                gradients = [None if one.grad is None else local(one.grad) for one in whole]
        trained = {id(slot.tensor): part for slot, part in zip(slots, parts, strict=True) if slot.trainable}
        for part, gradient in zip(trained.values(), gradients, strict=True):
            part.grad = gradient
        if self.scaler is None:
            optimizer.step(self.state, trained)
            return
        found = self.scaler.found()
        if optimizer.scales_itself:
            optimizer.step(self.state, trained, scale=self.scaler.scale() if in_kernel else None, found=found)
        else:
            changed = [*trained.values(), *self.state[: len(optimizer.state)]]
            self.scaler.step_unless_found(lambda: optimizer.step(self.state, trained), changed)
        self.scaler.update()
