"""Walk a ``fully_shard`` model: FSDP modules, their parameter groups, the attributes that read each parameter."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torch import nn

from . import compat
from .spec import ParamSpec, read_spec


@dataclass(frozen=True, slots=True)
class Managed:
    """What one ``fully_shard`` call took as one: its state, its modules with their names, in `named_modules` order."""

    state: Any
    modules: tuple[tuple[str, nn.Module], ...]

    @property
    def name(self) -> str:
        """Fully qualified name; several modules are joined as FSDP2 joins them."""
        return ", ".join(name for name, _ in self.modules)


@dataclass(frozen=True, slots=True)
class Found:
    """One FSDP2 parameter where it was found."""

    param: Any
    group: Any
    owners: tuple[tuple[nn.Module, str], ...]
    fqn: str
    param_group: str

    def spec(self) -> ParamSpec:
        """FSDP2's decisions about it, as a frozen value."""
        return read_spec(self.param, self.group, fqn=self.fqn, param_group=self.param_group)


def managed(model: nn.Module) -> list[Managed]:
    """Everything that ``fully_shard`` was applied to, each once."""
    found: dict[int, tuple[Any, list[tuple[str, nn.Module]]]] = {}
    for name, module in compat.fsdp_modules(model):
        state = compat.state_of(module, name)
        found.setdefault(id(state), (state, []))[1].append((name, module))
    return [Managed(state, tuple(modules)) for state, modules in found.values()]


def outermost(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """FSDP modules with no FSDP module above them: what FSDP2 calls roots."""
    roots: list[tuple[str, nn.Module]] = []
    for name, module in compat.fsdp_modules(model):
        if not any(prefix == "" or name.startswith(prefix + ".") for prefix, _ in roots):
            roots.append((name, module))
    return roots


def attribute_names(model: nn.Module) -> dict[tuple[int, str], str]:
    """Fully qualified name of every parameter attribute, by ``(id(module), attribute)``."""
    return {
        (id(module), key): f"{prefix}.{key}" if prefix else key
        for prefix, module in model.named_modules()
        for key in module._parameters
    }


def parameters_of(one: Managed, names: dict[tuple[int, str], str]) -> Iterator[Found]:
    """The parameters that FSDP2 gathers for one ``fully_shard`` call, in its order; tied parameters once.

    A placement function that gives parameters meshes of their own makes several groups (torch 2.12 and later): they
    are ``name``, ``name#1`` and so on.
    """
    for index, group in enumerate(compat.groups_of(one.state, one.name)):
        for param in compat.params_of(group, one.name):
            owners = tuple(compat.owners_of(param))
            owner, attribute = owners[0]
            fqn = names.get((id(owner), attribute), attribute)
            yield Found(param, group, owners, fqn, one.name if index == 0 else f"{one.name}#{index}")


def specs_of(model: nn.Module) -> list[ParamSpec]:
    """The plan of every parameter of a sharded model. Runs FSDP2's lazy initialisation if it has not run yet."""
    for name, root in outermost(model):
        compat.finish_lazy_init(root, name)
    names = attribute_names(model)
    return [found.spec() for one in managed(model) for found in parameters_of(one, names)]
