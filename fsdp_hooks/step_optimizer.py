"""Which optimizers can be part of a whole-step graph, and how does one step on shards?

Shards are stepped as plain tensors, so the optimizer must work element by element. The graph steps the optimizer's
own state, in place. Learning rates, and the step counts that an optimizer reads back, stay numbers of the graph
(``_local_scalar_dense``): the arithmetic on them is Python's, as in eager training.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from . import compat_step
from .errors import InstallError, UnsupportedOption
from .step_inputs import like, local

#: Optimizers that update each element from that element alone, and choose what to do by no tensor's value.
ELEMENTWISE = (torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW, torch.optim.RMSprop, torch.optim.Adagrad)

_WAY_OUT = "leave optimizer out of trace_train_step and call optimizer.step() after each step"


@dataclass(frozen=True)
class TracedOptimizer:
    """One optimizer as a step was traced with it.

    Attributes:
        optimizer: the user's.
        state: its state tensors in a fixed order, by parameter and name; all updated in place.
        groups: its hyperparameters when traced, by group; learning rates, and tensors among the others, are inputs.
    """

    optimizer: torch.optim.Optimizer
    state: tuple[tuple[torch.Tensor, str], ...]
    groups: tuple[dict[str, Any], ...]

    @classmethod
    def of(cls, optimizer: torch.optim.Optimizer, names: Mapping[int, str]) -> TracedOptimizer:
        """Check that it can be traced, and make the state that its first step would make.

        Args:
            optimizer: of the model's parameters.
            names: of the model's parameters, by their id.

        Raises:
            UnsupportedOption: naming the optimizer, why, and the way out.
            InstallError: a parameter is none of the model's.
        """
        kind = type(optimizer)
        if kind not in ELEMENTWISE:
            raise UnsupportedOption(
                f"trace_train_step expects an optimizer of {', '.join(one.__name__ for one in ELEMENTWISE)}, found "
                f"{kind.__name__}, which may not work element by element: {_WAY_OUT}"
            )
        if compat_step.step_hooks_of(optimizer):
            raise UnsupportedOption(
                f"trace_train_step expects {kind.__name__} without step hooks, found some, which a graph would not "
                f"call: remove them, or {_WAY_OUT}"
            )
        for number, group in enumerate(optimizer.param_groups):
            _check_group(kind, number, group, names)
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
        """What the graph reads and writes of the optimizer, this rank's parts; a learning rate as float64.

        Raises:
            InstallError: state or a parameter group that the step was traced with is gone.
        """
        held = []
        for param, name in self.state:
            value = self.optimizer.state.get(param, {}).get(name)
            if value is None:
                raise InstallError(
                    f"the step expects the optimizer's {name!r} of a parameter of shape {list(param.shape)}, as it was "
                    "traced, found none: trace it again"
                )
            held.append(local(value))
        for group, traced in zip(self.optimizer.param_groups, self.groups, strict=True):
            for name in traced:
                if isinstance(group[name], torch.Tensor):
                    held.append(group[name].detach())
                elif name == "lr":
                    held.append(torch.tensor(group[name], dtype=torch.float64))
        return held

    def holds(self, param: torch.Tensor) -> bool:
        """Whether it steps ``param``."""
        return any(param is one for group in self.optimizer.param_groups for one in group["params"])

    @property
    def scales_itself(self) -> bool:
        """Whether its kernel unscales gradients and skips a step with inf or NaN (``fused=True``)."""
        return compat_step.scales_itself(self.optimizer)

    def stepped(self) -> None:
        """Say that a step was taken, for learning-rate schedulers."""
        compat_step.count_step(self.optimizer)

    def step(
        self,
        tensors: list[torch.Tensor],
        parts: dict[int, torch.Tensor],
        *,
        scale: torch.Tensor | None = None,
        found: torch.Tensor | None = None,
    ) -> None:
        """Trace one step on ``parts`` (by id of the parameter), which carry their gradients.

        ``scale`` and ``found`` are what a ``GradScaler`` tells an optimizer that scales itself.
        """
        given = iter(tensors)
        state = {(id(param), name): next(given) for param, name in self.state}
        groups = []
        for group, traced in zip(self.optimizer.param_groups, self.groups, strict=True):
            values = {k: next(given) if isinstance(v, torch.Tensor) or k == "lr" else v for k, v in traced.items()}
            if not isinstance(traced["lr"], torch.Tensor) and not traced.get("fused"):
                values["lr"] = values["lr"].item()
            if traced.get("foreach") is None and traced.get("fused") is None:
                values["foreach"] = compat_step.foreach_by_default(group["params"])
            groups.append({**values, "params": [parts[id(p)] for p in group["params"] if id(p) in parts]})
        kind: Any = type(self.optimizer)
        inner = kind([group for group in groups if group["params"]])
        inner.state.clear()  # Adagrad makes its own at once
        for group in self.optimizer.param_groups:
            for param in group["params"]:
                if id(param) in parts:
                    inner.state[parts[id(param)]] = {
                        name: state.get((id(param), name), value)
                        for name, value in self.optimizer.state.get(param, {}).items()
                    }
        if found is not None:
            inner.grad_scale, inner.found_inf = scale, found
        inner.step()

    def expect_unchanged(self) -> None:
        """Compare the hyperparameters with those traced; only the learning rate may change.

        Raises:
            UnsupportedOption: another one changed.
        """
        if len(self.groups) != len(self.optimizer.param_groups):
            raise InstallError(
                f"the step expects the {len(self.groups)} parameter groups that it was traced with, found "
                f"{len(self.optimizer.param_groups)}: trace it again"
            )
        for number, (traced, group) in enumerate(zip(self.groups, self.optimizer.param_groups, strict=True)):
            for name, was in traced.items():  # a schedule may have added notes of its own
                value = group[name]
                tensors = isinstance(was, torch.Tensor), isinstance(value, torch.Tensor)
                if tensors == (True, True) or (tensors == (False, False) and (name == "lr" or value == was)):
                    continue
                raise UnsupportedOption(
                    f"the step expects {name}={was!r} of parameter group {number}, as it was traced, found {value!r}: "
                    "only lr may change between steps; trace it again"
                )


def _check_group(kind: type, number: int, group: dict[str, Any], names: Mapping[int, str]) -> None:
    for param in group["params"]:
        if id(param) not in names:
            raise InstallError(
                f"trace_train_step expects the optimizer's parameters to be the model's, found one of shape "
                f"{list(param.shape)} in parameter group {number} that is not: build the optimizer after "
                "fully_shard, from model.parameters()"
            )
    if group.get("differentiable"):
        raise UnsupportedOption(
            f"trace_train_step expects {kind.__name__}(differentiable=False), found True: {_WAY_OUT}"
        )
    if group.get("fused") and kind not in (torch.optim.Adam, torch.optim.AdamW):
        raise UnsupportedOption(
            f"trace_train_step expects {kind.__name__} without fused=True, found it, which eager FSDP2 does not run "
            "either (DTensor has no rule for its kernel): leave fused out"
        )
    if isinstance(group["lr"], torch.Tensor) and not (group.get("fused") or group.get("capturable")):
        raise UnsupportedOption(
            f"trace_train_step expects a float as lr of {kind.__name__}, found a tensor: a float may change between "
            "steps as well; or set fused=True or capturable=True"
        )


def _hyperparameters(group: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in group.items() if name not in ("params", "initial_lr")}


def _start_state(kind: type, group: dict[str, Any], param: torch.Tensor, state: dict[str, Any]) -> None:
    """What the first step would make, before it: zeros.

    ``_init_group`` of torch/optim/{sgd,adam,rmsprop}.py, read in 2.11.0 to 2.15.0; Adagrad makes its own.
    """
    part = local(param)

    def zeros() -> torch.Tensor:
        return like(torch.zeros_like(part), param)

    def count() -> torch.Tensor:
        on_device = group.get("fused") or group.get("capturable")
        wide = torch.get_default_dtype() == torch.float64 and not group.get("fused")
        return torch.zeros(
            (), dtype=torch.float64 if wide else torch.float32, device=part.device if on_device else "cpu"
        )

    if kind is torch.optim.SGD:
        if group["momentum"] and state.get("momentum_buffer") is None:
            if group["dampening"]:
                raise UnsupportedOption(
                    f"trace_train_step expects SGD with dampening=0, found {group['dampening']}, which makes the first "
                    f"step another than the rest: take one eager step before tracing, or {_WAY_OUT}"
                )
            state["momentum_buffer"] = zeros()
    elif state:
        return
    elif kind is torch.optim.RMSprop:
        state["step"], state["square_avg"] = count(), zeros()
        if group["momentum"] > 0:
            state["momentum_buffer"] = zeros()
        if group["centered"]:
            state["grad_avg"] = zeros()
    elif kind in (torch.optim.Adam, torch.optim.AdamW):
        state["step"], state["exp_avg"], state["exp_avg_sq"] = count(), zeros(), zeros()
        if group["amsgrad"]:
            state["max_exp_avg_sq"] = zeros()
