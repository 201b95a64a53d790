"""What a captured forward runs in place of FSDP2's hooks. Dynamo traces all of it.

While the forward of an FSDP module runs, its *unit* is open and reading one of the unit's parameters gives the
full tensor, gathered when the module is entered and kept until it returns: one gather and one gradient reduction
for a parameter however often it is read (tied weights), as FSDP2 does. Outside, reading gives FSDP2's sharded
``DTensor``, so optimizers, ``state_dict`` and checkpoints see what they always saw.
"""

from __future__ import annotations

import dataclasses
import functools
from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.utils.rnn import PackedSequence

from .operator import unshard
from .spec import ParamSpec

BINDINGS = "_fsdp_hooks_bindings"
UNIT = "_fsdp_hooks_unit"
FORWARD = "_fsdp_hooks_forward"


class Unit:
    """The parameters that FSDP2 gathers together for one ``fully_shard`` module, and its precision policy."""

    def __init__(
        self,
        name: str,
        *,
        is_root: bool,
        device: torch.device,
        cast_inputs_to: torch.dtype | None,
        cast_outputs_to: torch.dtype | None,
    ) -> None:
        self.name = name
        self.device = device
        self.moves_inputs = is_root and device.type != "cpu"
        self.cast_inputs_to = cast_inputs_to
        self.cast_outputs_to = cast_outputs_to
        self.sources: tuple[tuple[nn.Module, str, ParamSpec], ...] = ()
        self.full: dict[str, torch.Tensor] | None = None

    def enter(self, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """Open the unit: gather its parameters; move (root only) and cast the inputs as FSDP2's pre-forward does.

        All of them here, not each where it is first read: a read may happen inside a checkpointed region, which
        Dynamo lets read from outside but not write. What is never read is dead code in the graph.
        """
        self.full = {spec.fqn: gather(module._parameters[name], spec) for module, name, spec in self.sources}
        if self.moves_inputs:
            args, kwargs = _map(self._to_device, args), _map(self._to_device, kwargs)
        if self.cast_inputs_to is not None:
            dtype = self.cast_inputs_to
            args, kwargs = _map(lambda x: _cast(x, dtype), args), _map(lambda x: _cast(x, dtype), kwargs)
        return args, kwargs

    def leave(self, output: Any) -> Any:
        """Close the unit; cast the outputs."""
        self.full = None
        if self.cast_outputs_to is not None:
            dtype = self.cast_outputs_to
            output = _map(lambda x: _cast(x, dtype), output)
        return output

    def _to_device(self, x: torch.Tensor) -> torch.Tensor:
        return x.to(self.device)


@dataclasses.dataclass(frozen=True)
class Binding:
    """One attribute of one module: whose unit it opens with and how it is gathered."""

    unit: Unit
    spec: ParamSpec

    def read(self, sharded: Any) -> Any:
        """The attribute's value now: the sharded parameter, or the full tensor inside the unit's forward."""
        full = self.unit.full
        return sharded if full is None else full[self.spec.fqn]


def gather(sharded: Any, spec: ParamSpec) -> torch.Tensor:
    """The full parameter of ``sharded``, FSDP2's DTensor; for tensor-parallel models the DTensor FSDP2 was given."""
    full = unshard(sharded.to_local(), spec.args)
    layout = spec.model_parallel
    if layout is None:
        return full
    return DTensor.from_local(
        full, layout.mesh, layout.placements, run_check=False, shape=layout.shape, stride=layout.stride
    )


def capturing_class(
    base: type[nn.Module], names: tuple[str, ...], *, has_unit: bool, methods: Mapping[str, Callable[..., Any]]
) -> type[nn.Module]:
    """A subclass of ``base`` that captures.

    Each of ``names`` is read through its :class:`Binding`. With ``has_unit``, ``forward`` opens and closes the
    module's unit: in ``forward`` and not in hooks, because ``torch.compile`` of a module leaves its hooks outside
    the graph (``OptimizedModule._initialize``, torch/_dynamo/eval_frame.py).
    """

    def new(cls: type, *args: Any, **kwargs: Any) -> Any:
        return base(*args, **kwargs)  # a slice of a container is a plain new container, not a captured one

    body: dict[str, Any] = {name: _reader(name) for name in names}
    if has_unit:
        body["forward"] = _forward(base)
    body.update(methods)
    body.update(__new__=new, __module__=base.__module__, __qualname__=base.__qualname__)
    return type(base.__name__, (base,), body)


def _forward(base: type[nn.Module]) -> Callable[..., Any]:
    inner = base.forward

    @functools.wraps(inner)
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():  # a try block would keep Dynamo from going on after a graph break
            return run(self, *args, **kwargs)
        try:
            return run(self, *args, **kwargs)
        finally:
            self.__dict__[UNIT].full = None

    def run(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        unit: Unit = self.__dict__[UNIT]
        args, kwargs = unit.enter(args, kwargs)
        if FORWARD in self.__dict__:  # the user had replaced forward on this one instance
            return unit.leave(self.__dict__[FORWARD](*args, **kwargs))
        return unit.leave(inner(self, *args, **kwargs))

    return forward


def _reader(name: str) -> property:
    def get(self: nn.Module) -> Any:
        return self.__dict__[BINDINGS][name].read(self._parameters[name])

    return property(get)


def _cast(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return x.to(dtype) if x.is_floating_point() and x.dtype != dtype else x


def _map(change: Callable[[torch.Tensor], torch.Tensor], value: Any) -> Any:
    """Apply ``change`` to every tensor in nested containers, those that FSDP2 looks into.

    Cases and results are those of ``_apply_to_tensors`` in torch/distributed/utils.py (read in 2.11.0 to 2.15.0).
    """
    if isinstance(value, torch.Tensor):
        return change(value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        changes = {f.name: _map(change, getattr(value, f.name)) for f in dataclasses.fields(value) if f.init}
        return dataclasses.replace(value, **changes)
    if isinstance(value, dict):
        mapped = {key: _map(change, item) for key, item in value.items()}
        return type(value)(mapped) if isinstance(value, OrderedDict) else mapped
    if isinstance(value, PackedSequence):
        return value
    if isinstance(value, (tuple, list, set)):
        items = [_map(change, item) for item in value]
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    return value
