"""Which optimizers can be part of a whole-step graph, and how does one step on shards?

Shards are stepped as plain tensors, so the optimizer must work element by element; and a graph cannot read a value
back, so it must not do that either. The graph steps the optimizer's own state, in place.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from .errors import UnsupportedOption
from .step_inputs import like, local

_WAY_OUT = "leave optimizer out of trace_train_step and call optimizer.step() after each step"


@dataclass(frozen=True)
class TracedOptimizer:
    """One optimizer as a step was traced with it.

    Attributes:
        optimizer: the user's.
        state: its state tensors in a fixed order, by parameter and name; all updated in place.
        groups: its hyperparameters when traced, by group; tensors among them are inputs.
    """

    optimizer: torch.optim.Optimizer
    state: tuple[tuple[torch.Tensor, str], ...]
    groups: tuple[dict[str, Any], ...]

    @classmethod
    def of(cls, optimizer: torch.optim.Optimizer) -> TracedOptimizer:
        """Check that it can be traced, and make the state that its first step would make.

        Raises:
            UnsupportedOption: naming the optimizer, why, and the way out.
        """
        kind = type(optimizer)
        if kind not in (torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW):
            raise UnsupportedOption(
                f"trace_train_step expects an optimizer of SGD, Adam or AdamW, found {kind.__name__}, which may not "
                f"work element by element: {_WAY_OUT}"
            )
        for group in optimizer.param_groups:
            if kind is not torch.optim.SGD and not group.get("fused"):
                raise UnsupportedOption(
                    f"trace_train_step expects {kind.__name__}(..., fused=True), found fused={group.get('fused')}: the "
                    f"others read the step count back in Python; set fused=True, or {_WAY_OUT}"
                )
            if kind is torch.optim.SGD and group["momentum"] and group["dampening"]:
                raise UnsupportedOption(
                    f"trace_train_step expects SGD with dampening=0, found {group['dampening']}, which makes the first "
                    f"step another than the rest: {_WAY_OUT}"
                )
            for param in group["params"]:
                if param.requires_grad:
                    _start_state(kind, group, param, optimizer.state[param])
        state = tuple(
            (param, name)
            for group in optimizer.param_groups
            for param in group["params"]
            for name, value in sorted(optimizer.state.get(param, {}).items())
            if isinstance(value, torch.Tensor)
        )
        return cls(optimizer, state, tuple(_hyperparameters(group) for group in optimizer.param_groups))

    def tensors(self) -> list[torch.Tensor]:
        """What the graph reads and writes of the optimizer, this rank's parts."""
        held = [local(self.optimizer.state[param][name]) for param, name in self.state]
        return held + [v for group in self.optimizer.param_groups for v in _tensors(_hyperparameters(group))]

    def step(self, tensors: list[torch.Tensor], parts: dict[int, torch.Tensor]) -> None:
        """Trace one step on ``parts`` (by id of the parameter), which carry their gradients."""
        given = iter(tensors)
        state = {(id(param), name): next(given) for param, name in self.state}
        groups = []
        for group, traced in zip(self.optimizer.param_groups, self.groups, strict=True):
            values = {k: next(given) if isinstance(v, torch.Tensor) else v for k, v in traced.items()}
            groups.append({**values, "params": [parts[id(p)] for p in group["params"] if id(p) in parts]})
        kind: Any = type(self.optimizer)
        inner = kind([group for group in groups if group["params"]])
        for group in self.optimizer.param_groups:
            for param in group["params"]:
                if id(param) in parts:
                    inner.state[parts[id(param)]] = {
                        name: state.get((id(param), name), value)
                        for name, value in self.optimizer.state.get(param, {}).items()
                    }
        inner.step()

    def expect_unchanged(self) -> None:
        """Compare the hyperparameters with those traced.

        Raises:
            UnsupportedOption: one changed; a learning-rate schedule needs a tensor.
        """
        for number, (traced, group) in enumerate(zip(self.groups, self.optimizer.param_groups, strict=True)):
            for name, value in _hyperparameters(group).items():
                if not isinstance(value, torch.Tensor) and value != traced[name]:
                    raise UnsupportedOption(
                        f"the step expects {name}={traced[name]!r} of parameter group {number}, as it was traced, "
                        f"found {value!r}: trace it again, or make it a tensor before tracing, as in "
                        f"lr=torch.tensor({value!r})"
                    )


def _hyperparameters(group: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in group.items() if name not in ("params", "initial_lr")}


def _tensors(values: dict[str, Any]) -> list[torch.Tensor]:
    return [value for value in values.values() if isinstance(value, torch.Tensor)]


def _start_state(kind: type, group: dict[str, Any], param: torch.Tensor, state: dict[str, Any]) -> None:
    """What the first step would make, before it: zeros."""
    part = local(param)

    def zeros() -> torch.Tensor:
        return like(torch.zeros_like(part), param)

    if kind is torch.optim.SGD:
        if group["momentum"] and state.get("momentum_buffer") is None:
            state["momentum_buffer"] = zeros()
        return
    if not state:
        state["step"] = torch.zeros((), dtype=torch.float32, device=part.device)
        state["exp_avg"], state["exp_avg_sq"] = zeros(), zeros()
        if group["amsgrad"]:
            state["max_exp_avg_sq"] = zeros()
