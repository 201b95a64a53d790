"""What a captured forward runs in place of FSDP2's hooks. Dynamo traces all of it.

While the forward of an FSDP module runs, its *unit* is open and reading one of the unit's parameters gives the
full tensor, gathered when the module is entered and kept until it returns: one gather and one gradient reduction
for a parameter however often it is read (tied weights), as FSDP2 does. Outside, reading gives FSDP2's sharded
``DTensor``, so optimizers, ``state_dict`` and checkpoints see what they always saw.

The unit of ``fully_shard([a, b])`` is opened by whichever of its modules runs first and closed when all have run, or
else when the root returns.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from . import compat_checkpoint
from .accumulated import Accumulated
from .captured_copies import reducing
from .containers import cast, mapped
from .errors import InstallError
from .gathers import Gatherer, Source, gatherer_of
from .misuse import copied, explained, replaced
from .operator import unshard
from .spec import ParamSpec

BINDINGS = "_fsdp_hooks_bindings"
UNIT = "_fsdp_hooks_unit"
METHODS = "_fsdp_hooks_methods"


Full = dict[str, torch.Tensor]
"""Full parameters by their names."""


def _cell() -> tuple[Callable[[], Full | None], Callable[[Full | None], None]]:
    """What an open unit holds, read and written by two functions.

    A variable of theirs and no attribute: Dynamo compares an object that it reaches in two ways at every call, the unit
    once for each of its parameters, in the slowest of its guards. A variable that functions share it does not.
    """
    full: Full | None = None

    def opened() -> Full | None:
        return full

    def keep(value: Full | None) -> None:
        nonlocal full
        full = value

    return opened, keep


class Unit:
    """The parameters that FSDP2 gathers together for one ``fully_shard`` call, and its precision policy.

    That of ``fully_shard([a, b])`` has several ``members``: the first to run opens it; it closes when all have run,
    with its root, or, where a member is called outside the root's forward, at once.
    """

    def __init__(
        self,
        name: str,
        *,
        is_root: bool,
        device: torch.device,
        cast_inputs_to: torch.dtype | None,
        cast_outputs_to: torch.dtype | None,
        members: int = 1,
        casts_every_member: bool = True,
    ) -> None:
        self.name = name
        self.device = device
        self.moves_inputs = is_root and device.type != "cpu"
        self.cast_inputs_to = cast_inputs_to
        self.cast_outputs_to = cast_outputs_to
        self.members = members
        self.casts_every_member = casts_every_member
        self.sources: tuple[Source, ...] = ()
        self.gatherer: Gatherer | None = None
        self.accumulated: dict[str, Accumulated] = {}
        self.shared_below: tuple[Unit, ...] = ()
        self.root: Unit | None = None
        self.options_changed: Callable[[], None] | None = None
        self.check_waiting: Callable[[], None] | None = None
        self.reset: Callable[[], None] | None = None
        self.opened, self.keep = _cell()
        self.depth = 0
        self.ran: tuple[int, ...] = ()

    def __deepcopy__(self, memo: dict[int, Any]) -> Unit:
        """Another unit, closed or open as this one, with a cell of its own."""
        made = memo[id(self)] = object.__new__(type(self))
        made.opened, made.keep = _cell()  # first: what it holds leads to modules, and they to bindings that read it
        held = {name: value for name, value in self.__dict__.items() if name not in ("opened", "keep")}
        made.__dict__.update(copy.deepcopy(held, memo))
        made.keep(copy.deepcopy(self.opened(), memo))
        return made

    def hold(self, sources: Iterable[Source], modules: Sequence[nn.Module]) -> None:
        """These are the parameters, and the modules that open the unit."""
        self.sources = tuple(sources)
        one = modules[0] if len(modules) == 1 else None
        self.gatherer = None if one is None else gatherer_of(self.name, one, self.sources, self.device)

    def enter(self, module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """Open the unit: gather its parameters; move (root only) and cast the inputs as FSDP2's pre-forward does.

        All of them here, not each where it is first read: a read may happen inside a checkpointed region, which
        Dynamo lets read from outside but not write. What is never read is dead code in the graph.
        """
        first = self.opened() is None
        if first:
            self.keep(self.gather_all(module))
        self.depth += 1
        if self.moves_inputs:
            args, kwargs = mapped(self._to_device, args), mapped(self._to_device, kwargs)
        if self.cast_inputs_to is not None and (first or self.casts_every_member):
            dtype = self.cast_inputs_to
            args, kwargs = mapped(lambda x: cast(x, dtype), args), mapped(lambda x: cast(x, dtype), kwargs)
        return args, kwargs

    def leave(self, output: Any, member: int = 0) -> Any:
        """Close the unit once every member has run; cast the outputs."""
        self.depth -= 1
        if self.members > 1 and member not in self.ran:
            self.ran = (*self.ran, member)
        alone = self.root is None or self.root.opened() is None
        last = self.depth == 0 and (alone or len(self.ran) == self.members)
        if last:
            self.close()
        if self.cast_outputs_to is not None and (last or self.casts_every_member):
            dtype = self.cast_outputs_to
            output = mapped(lambda x: cast(x, dtype), output)
        return output

    def fall_back(self, depth: int) -> None:
        """Close the unit after an exception, unless a call around the one that failed has it open (``depth`` > 0)."""
        if depth == 0:
            self.close()
        else:
            self.depth = depth

    def close(self) -> None:
        """Let go of the full parameters; the root's also of those whose modules did not all run."""
        self.keep(None)
        self.depth = 0
        if self.members > 1:
            self.ran = ()
        for unit in self.shared_below:
            unit.close()

    def _to_device(self, x: torch.Tensor) -> torch.Tensor:
        return x.to(self.device)

    def gather_all(self, module: nn.Module) -> dict[str, torch.Tensor]:
        """Every parameter in full, by its name; ``module`` is the one that opens the unit."""
        if self.gatherer is not None and not self.accumulated and (full := self.gatherer(module)) is not None:
            return full
        return {spec.fqn: self.gather(_held(module, name), spec) for module, name, spec in self.sources}

    def gather(self, sharded: Any, spec: ParamSpec) -> torch.Tensor:
        """The full parameter; while gradients accumulate without communication, its gradient goes there."""
        accumulated = self.accumulated.get(spec.fqn) if torch.is_grad_enabled() else None
        return gather(sharded, spec, device=self.device, accumulated=accumulated)


@dataclasses.dataclass(frozen=True)
class Binding:
    """One attribute of one module: whose unit it opens with and how it is gathered."""

    unit: Unit
    spec: ParamSpec
    fqn: str = dataclasses.field(init=False)
    opened: Callable[[], Full | None] = dataclasses.field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "fqn", self.spec.fqn)
        object.__setattr__(self, "opened", self.unit.opened)

    def __deepcopy__(self, memo: dict[int, Any]) -> Binding:
        """One of the copied unit."""
        given = {one.name: getattr(self, one.name) for one in dataclasses.fields(self) if one.init}
        return type(self)(**copy.deepcopy(given, memo))

    def read(self, sharded: Any) -> Any:
        """The attribute's value outside the unit's forward: the sharded parameter.

        A checkpoint inside the forward runs again in backward, when the unit is closed: then it gathers anew.
        """
        if not compat_checkpoint.recomputing():
            return sharded
        with compat_checkpoint.outside_selection():
            return self.unit.gather(sharded, self.spec)


def gather(
    sharded: Any, spec: ParamSpec, *, device: torch.device | None = None, accumulated: Accumulated | None = None
) -> torch.Tensor:
    """The full parameter of ``sharded``, FSDP2's DTensor; for tensor-parallel models the DTensor FSDP2 was given.

    ``device``: where the full one is wanted; the shard may wait on the CPU (``CPUOffloadPolicy``).
    """
    shard = shard_on(device, sharded)
    full = unshard(shard, spec.args) if accumulated is None else accumulated.unshard(shard, spec.args)
    return laid_out(full, spec)


def shard_on(device: torch.device | None, sharded: Any) -> torch.Tensor:
    """This rank's part of a sharded parameter, where the full one is wanted."""
    shard: torch.Tensor = sharded.to_local()
    if device is not None and shard.device.type != device.type:
        shard = shard.to(device, non_blocking=True)
    return shard


def laid_out(full: torch.Tensor, spec: ParamSpec) -> torch.Tensor:
    """A full parameter as the model reads it: under tensor parallelism a DTensor."""
    layout = spec.model_parallel
    if layout is None:
        return full
    return DTensor.from_local(
        full, layout.mesh, layout.placements, run_check=False, shape=layout.shape, stride=layout.stride
    )


def capturing_class(
    base: type[nn.Module],
    names: tuple[str, ...],
    *,
    gathering: tuple[str, ...],
    methods: Mapping[str, Callable[..., Any]],
) -> type[nn.Module]:
    """A subclass of ``base`` that captures.

    Each of ``names`` is read through its :class:`Binding`. Each method in ``gathering``, ``forward`` first of all,
    opens and closes the module's unit: in ``forward`` and not in hooks, because ``torch.compile`` of a module leaves
    its hooks outside the graph (``OptimizedModule._initialize``, torch/_dynamo/eval_frame.py).
    """

    def new(cls: type, *args: Any, **kwargs: Any) -> Any:
        return base(*args, **kwargs)  # a slice of a container is a plain new container, not a captured one

    body: dict[str, Any] = {name: _reader(name) for name in names}
    body.update((name, _gathering(base, name)) for name in gathering)
    body.update(methods)
    body.update(__new__=new, __reduce_ex__=reducing(base, _check_copied))
    body.update(__module__=base.__module__, __qualname__=base.__qualname__)
    return type(base.__name__, (base,), body)


def capture_by_class(
    modules: Iterable[nn.Module],
    changed: list[tuple[nn.Module, type[nn.Module]]],
    methods_of: Callable[[type[nn.Module]], Mapping[str, Callable[..., Any]]] = lambda base: {},
) -> None:
    """Give modules that hold bindings or a unit a class that captures; equal ones share it.

    Args:
        modules: each once or several times.
        changed: takes each module with the class it had, before it is changed.
        methods_of: more methods of a module that has a unit, by its class.
    """
    made: dict[tuple[type[nn.Module], tuple[str, ...], tuple[str, ...]], type[nn.Module]] = {}
    for module in {id(module): module for module in modules}.values():
        gathering = ("forward", *sorted({*module.__dict__[METHODS]} - {"forward"})) if UNIT in module.__dict__ else ()
        key = type(module), tuple(sorted(module.__dict__.get(BINDINGS, ()))), gathering
        base, names, _ = key
        if key not in made:
            made[key] = capturing_class(base, names, gathering=gathering, methods=methods_of(base) if gathering else {})
        changed.append((module, base))
        module.__class__ = made[key]


def _gathering(base: type[nn.Module], name: str) -> Callable[..., Any]:
    inner = getattr(base, name, None)  # None: the user put it on the instance

    def method(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        unit = self.__dict__[UNIT][0]
        depth = unit.depth
        try:  # a graph break below: Dynamo leaves this frame to Python and goes on in those it calls
            return run(self, *args, **kwargs)
        except BaseException as error:
            unit.fall_back(depth)
            if (said := explained(error, unit.name)) is not None:
                raise said from error
            raise

    def run(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        unit, member = self.__dict__[UNIT]
        args, kwargs = unit.enter(self, args, kwargs)
        if name in self.__dict__[METHODS]:  # the user had replaced it on this one instance
            return unit.leave(self.__dict__[METHODS][name](*args, **kwargs), member)
        assert inner is not None
        return unit.leave(inner(self, *args, **kwargs), member)

    return method if inner is None else functools.wraps(inner)(method)


def _reader(name: str) -> property:
    def get(self: nn.Module) -> Any:
        binding = self.__dict__[BINDINGS][name]
        full = binding.opened()
        if full is not None:  # first, and here: Dynamo guards whatever is read, and each call is traced
            return full[binding.fqn]
        if name not in self._parameters:  # torch's own words, and hasattr is False
            raise AttributeError(name)
        return binding.read(self._parameters[name])

    def put(self: nn.Module, value: Any) -> None:
        raise AttributeError(replaced(self.__dict__[BINDINGS][name].spec.fqn, f"a {type(value).__name__}"))

    return property(get, put)


def _held(module: nn.Module, name: str) -> Any:
    param = module._parameters.get(name)
    if param is None:
        raise InstallError(replaced(module.__dict__[BINDINGS][name].spec.fqn, "none"))
    return param


def _check_copied(module: nn.Module) -> None:
    units = [binding.unit for binding in module.__dict__.get(BINDINGS, {}).values()]
    if any(unit.options_changed is not None for unit in units):
        raise InstallError(copied(type(module).__name__))
