"""What ``data_parallel`` leaves on a model: enough to undo it, to name it anew inside a larger one, and to count."""

from __future__ import annotations

import dataclasses
import weakref
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from .gathers import Source
from .runtime import BINDINGS, Binding, Unit
from .spec import ParamSpec

RECORD = "_fsdp_hooks_data_parallel"


@dataclass(frozen=True)
class Reading(Binding):
    """A binding that also gathers where its unit is not running but the model is.

    FSDP2 gives the shard in a method of a block that is called from outside its forward; SimpleFSDP gathers.
    """

    root: Unit

    def read(self, sharded: Any) -> Any:
        """The full tensor inside the model's forward, the sharded parameter outside."""
        if self.opened() is None and self.root.opened() is not None:
            return self.unit.gather(sharded, self.spec)
        return Binding.read(self, sharded)


@dataclass(frozen=True)
class Placed:
    """One sharded parameter: the attributes that hold it, the unit that gathers it, what it was before."""

    owners: tuple[tuple[nn.Module, str], ...]
    unit: Unit
    spec: ParamSpec
    before: weakref.ref[nn.Parameter]


@dataclass
class Record:
    """One call of ``data_parallel``, kept on the module it was called on."""

    root: Unit
    units: list[tuple[nn.Module, Unit]] = field(default_factory=list)
    placed: list[Placed] = field(default_factory=list)
    classes: list[tuple[nn.Module, type[nn.Module]]] = field(default_factory=list)

    def bind(self) -> None:
        """Give every attribute its binding, and every unit what it gathers, as ``placed`` has them now."""
        sources: dict[Unit, list[Source]] = {unit: [] for _, unit in self.units}
        for one in self.placed:
            sources[one.unit].append((*one.owners[0], one.spec))
            for owner, attribute in one.owners:
                owner.__dict__.setdefault(BINDINGS, {})[attribute] = Reading(one.unit, one.spec, self.root)
        for module, unit in self.units:
            unit.hold(sources[unit], (module,))

    def move_below(self, prefix: str, root: Unit) -> None:
        """Rename units and parameters by their place in a model that became data parallel later."""
        self.root = root
        for _, unit in self.units:
            unit.name = f"{prefix}.{unit.name}" if unit.name else prefix
        self.placed = [
            dataclasses.replace(
                one,
                spec=dataclasses.replace(
                    one.spec,
                    args=one.spec.args._replace(param=f"{prefix}.{one.spec.fqn}", param_group=one.unit.name),
                ),
            )
            for one in self.placed
        ]
        self.bind()

    def move_back(self, root: Unit, names: list[str], placed: list[Placed]) -> None:
        """Undo :meth:`move_below`."""
        self.root, self.placed = root, placed
        for (_, unit), name in zip(self.units, names, strict=True):
            unit.name = name
        self.bind()


def records_of(model: nn.Module) -> list[tuple[str, nn.Module, Record]]:
    """Every record in a model, its own first."""
    return [
        (name, module, module.__dict__[RECORD]) for name, module in model.named_modules() if RECORD in module.__dict__
    ]


def data_parallel_specs(model: nn.Module) -> list[ParamSpec]:
    """The plan of every parameter that ``data_parallel`` sharded or replicated."""
    return [one.spec for _, _, record in records_of(model) for one in record.placed]
