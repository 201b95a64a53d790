"""A ``GradScaler`` in a whole-step graph: the loss scaled, gradients unscaled, a step with inf or NaN taken back.

Eager training skips such a step in Python, which a graph cannot. A fused optimizer skips it in its kernel; for any
other the graph keeps what it had and chooses afterwards, element for element: the same values.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch

from . import compat_step


@dataclass(frozen=True)
class TracedScaler:
    """The user's scaler; its scale and growth tracker are inputs of the graph, updated in place."""

    scaler: torch.amp.GradScaler

    @classmethod
    def of(cls, scaler: torch.amp.GradScaler | None, device: torch.device) -> TracedScaler | None:
        """None for a scaler that is off; one that never scaled gets its first scale, as its first use would."""
        if scaler is None or not scaler.is_enabled():
            return None
        scaler.scale(torch.zeros((), device=device))
        return cls(scaler)

    def tensors(self) -> list[torch.Tensor]:
        """Scale (float32) and growth tracker (int32), both 0-dim."""
        return compat_step.scaler_tensors(self.scaler)

    def standing_in(self, tensors: Sequence[torch.Tensor]) -> ScaledStep:
        """The scaler of one traced step, on traced ``tensors``."""
        return ScaledStep(compat_step.scaler_like(self.scaler, tensors))


class ScaledStep:
    """What one traced step does with a stand-in scaler, in the order of eager training."""

    def __init__(self, scaler: torch.amp.GradScaler) -> None:
        self._scaler = scaler
        self._owner: Any = None

    def scaled(self, loss: torch.Tensor) -> torch.Tensor:
        """``scaler.scale(loss)``."""
        return self._scaler.scale(loss)  # type: ignore[return-value]

    def check(self, params: Sequence[torch.Tensor], *, unscale: bool) -> None:
        """``scaler.unscale_`` of the gradients of ``params``, or only look for inf and NaN, on all ranks."""
        self._owner = SimpleNamespace(param_groups=[{"params": list(params)}])
        if unscale:
            self._scaler.unscale_(self._owner)
        else:
            compat_step.scaler_looks(self._scaler, self._owner)

    def found(self) -> torch.Tensor:
        """0-dim float32: above 0 where a gradient had inf or NaN."""
        return compat_step.scaler_found(self._scaler, self._owner)

    def scale(self) -> torch.Tensor:
        """The scale now."""
        return compat_step.scaler_tensors(self._scaler)[0]

    def step_unless_found(self, step: Callable[[], None], changed: Sequence[torch.Tensor]) -> None:
        """Run ``step``; where a gradient had inf or NaN give the tensors it changes their old values back."""
        with torch.no_grad():
            before = [tensor.clone() for tensor in changed]
            step()
            skip = self.found() > 0
            for tensor, old in zip(changed, before, strict=True):
                tensor.copy_(torch.where(skip, old, tensor))

    def update(self) -> None:
        """``scaler.update()``."""
        self._scaler.update()
