"""Which modules gather their parameters together, and which of them gathers a given parameter."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

from torch import nn

from .errors import InstallError

UnitChoice = nn.Module | str | type[nn.Module]


@dataclass(frozen=True, slots=True)
class Owned:
    """One parameter: every attribute that holds it, by which name it goes, and the unit that gathers it."""

    param: nn.Parameter
    owners: tuple[tuple[nn.Module, str], ...]
    fqn: str
    unit: nn.Module


def choose(model: nn.Module, units: Sequence[UnitChoice] | None, done: set[int]) -> dict[int, str]:
    """``{id(module): name}`` of every unit, the model itself among them.

    Args:
        model: the model that is made data parallel.
        units: modules, names (``fnmatch`` patterns) or classes; None: the elements of its outermost lists.
        done: ids of modules below it that are data parallel already, with everything in them.

    Raises:
        InstallError: an entry matches no module, or one that has no forward to open it with.
    """
    names = {id(module): name for name, module in model.named_modules() if id(module) not in done}
    if units is None:
        chosen = {id(module): names[id(module)] for module in _elements(model) if id(module) in names}
    else:
        chosen = {}
        for entry in units:
            matched = [module for name, module in model.named_modules() if _matches(entry, name, module)]
            if not matched:
                raise InstallError(
                    f"data_parallel expects each of units to be a module of {type(model).__name__}, its name or its "
                    f"class, found {_said(entry)}, which matches none: see model.named_modules()"
                )
            chosen |= {id(module): names[id(module)] for module in matched if id(module) in names}
    chosen[id(model)] = ""
    for module in model.modules():
        if id(module) in chosen and type(module).forward is nn.Module.forward and "forward" not in module.__dict__:
            raise InstallError(
                f"data_parallel expects every unit to have a forward, in which its parameters are full, found "
                f"{type(module).__name__} at {chosen[id(module)]!r} without one: give the modules in it"
            )
    return chosen


def owned(model: nn.Module, units: dict[int, str], ignored: set[int], done: set[int]) -> list[Owned]:
    """Every parameter of the model once, gathered by the innermost unit around all the modules that hold it."""
    found: dict[int, list[tuple[nn.Module, str, str, tuple[nn.Module, ...]]]] = {}
    params: dict[int, nn.Parameter] = {}

    def walk(module: nn.Module, name: str, around: tuple[nn.Module, ...]) -> None:
        if id(module) in done:
            return
        if id(module) in units:
            around = (*around, module)
        for key, param in module._parameters.items():
            if param is not None and id(param) not in ignored:
                params[id(param)] = param
                found.setdefault(id(param), []).append((module, key, _join(name, key), around))
        for key, child in module._modules.items():
            if child is not None:
                walk(child, _join(name, key), around)

    walk(model, "", ())
    result = []
    for identity, places in found.items():
        common = [unit for unit in places[0][3] if all(unit in around for *_, around in places)]
        owners = {(id(module), key): (module, key) for module, key, _, _ in places}
        result.append(Owned(params[identity], tuple(owners.values()), places[0][2], common[-1]))
    return result


def _elements(module: nn.Module, *, of_list: bool = False) -> Iterator[nn.Module]:
    """The elements of the outermost ``ModuleList`` and ``ModuleDict`` objects; a list of lists is one list."""
    for child in module.children():
        is_list = isinstance(child, (nn.ModuleList, nn.ModuleDict))
        if of_list and not is_list:
            yield child
        else:
            yield from _elements(child, of_list=is_list)


def _matches(entry: UnitChoice, name: str, module: nn.Module) -> bool:
    if isinstance(entry, str):
        return fnmatchcase(name, entry)
    return isinstance(module, entry) if isinstance(entry, type) else module is entry


def _said(entry: object) -> str:
    return repr(entry) if isinstance(entry, str) else getattr(entry, "__name__", type(entry).__name__)


def _join(prefix: str, name: str) -> str:
    return f"{prefix}.{name}" if prefix else name
