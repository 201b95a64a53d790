"""Walk a ``fully_shard`` model: FSDP modules, their parameter groups, the attributes that read each parameter."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torch import nn

from . import compat
from .spec import ParamSpec, read_spec


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


def parameters_of(name: str, module: nn.Module, names: dict[tuple[int, str], str]) -> Iterator[Found]:
    """The parameters that FSDP2 gathers for one FSDP module, in its order; tied parameters once."""
    for group in compat.groups_of(compat.state_of(module, name), name):
        for param in compat.params_of(group, name):
            owners = tuple(compat.owners_of(param))
            owner, attribute = owners[0]
            yield Found(param, group, owners, names.get((id(owner), attribute), attribute), name)


def specs_of(model: nn.Module) -> list[ParamSpec]:
    """The plan of every parameter of a sharded model. Runs FSDP2's lazy initialisation if it has not run yet."""
    for name, root in outermost(model):
        compat.finish_lazy_init(root, name)
    names = attribute_names(model)
    return [found.spec() for name, module in compat.fsdp_modules(model) for found in parameters_of(name, module, names)]
