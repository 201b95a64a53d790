"""What belongs to torch or to Python, of which a name says enough: their versions are in every identity."""

from __future__ import annotations

import builtins
import functools
import importlib
import importlib.metadata
import importlib.util
import operator
import os
import sys
import sysconfig
import types
from collections.abc import Mapping
from typing import Any

import torch

VERSIONS = (sys.version.split()[0], torch.__version__, importlib.metadata.version("sympy"))

_PYTHON = tuple({os.path.dirname(os.__file__) + os.sep, sysconfig.get_path("platstdlib") + os.sep})
_FOLDERS: Mapping[str, tuple[str, ...]] = {
    name: tuple(folder + os.sep for folder in found.submodule_search_locations or ())
    for name in ("torch", "sympy")  # which torch needs: it is there
    if (found := importlib.util.find_spec(name)) is not None
}

_UNSEEN: Mapping[int, tuple[str, object]] = {
    id(value): (name, value)
    for name, value in (
        *((name, getattr(builtins, name)) for name in "globals vars dir eval exec compile __import__ open".split()),
        ("getattr", getattr), ("hasattr", hasattr), ("attrgetter", operator.attrgetter),
        ("methodcaller", operator.methodcaller), ("sys.modules", sys.modules), ("sys.argv", sys.argv),
        ("sys._getframe", sys._getframe), ("os.environ", os.environ), ("os.environb", os.environb),
        ("os.getenv", os.getenv), ("os.open", os.open),
    )
}  # fmt: skip
_UNSEEN_MODULES = frozenset(
    "_pickle gc importlib inspect marshal pathlib pickle pkgutil runpy shelve socket subprocess tempfile".split()
)


def unseen(value: object) -> str | None:
    """Says what it is when it looks content up by text or reads from outside the process: no bytecode tells what."""
    if id(value) in _UNSEEN:
        return _UNSEEN[id(value)][0]
    home = _text(value, "__name__" if isinstance(value, types.ModuleType) else "__module__")
    return home if home.partition(".")[0] in _UNSEEN_MODULES and owned(sys.modules.get(home)) else None


UNSEEN_NAMES = frozenset(
    "__annotate__ __annotations__ __builtins__ __code__ __dict__ __doc__ __firstlineno__ __getattribute__ __globals__ "
    "__signature__ __static_attributes__ __subclasses__ f_globals f_locals".split()
)
"""Attributes through which content is reached by text, or that are no part of an identity."""


def owned(module: object) -> bool:
    """Whether a module is torch's, sympy's or Python's, by its name and by the file that it came from."""
    if not isinstance(module, types.ModuleType):
        return False
    name, file = _text(module, "__name__"), vars(module).get("__file__")
    top = name.partition(".")[0]
    if top not in _FOLDERS and top not in sys.stdlib_module_names:
        return False
    if isinstance(file, str):
        places = _FOLDERS.get(top, _PYTHON)
        return any(file.startswith(place) and "-packages" not in file[len(place) :] for place in places)
    if type(module) is not types.ModuleType:
        return owned(sys.modules.get(type(module).__module__))  # torch.ops and its namespaces
    spec = vars(module).get("__spec__")
    return name.startswith("torch._C.") or getattr(spec, "origin", None) in ("built-in", "frozen")


def owned_module(name: str) -> types.ModuleType | None:
    """The module of theirs that ``import name`` finds."""
    top = name.partition(".")[0]
    module = importlib.import_module(name) if top in _FOLDERS or top in sys.stdlib_module_names else None
    return module if owned(module) else None


def named(value: Any) -> bool:
    """Whether a function, class or the like is torch's or Python's own: found again, in their module, by its name."""
    module, path = _text(value, "__module__"), _text(value, "__qualname__")
    if not path or "<" in path or not owned(sys.modules.get(module)):
        return False
    if isinstance(value, types.FunctionType) and not written_by_them(value):
        return False
    if isinstance(value, CACHED) and not written_by_them(getattr(value, "__wrapped__", None)):
        return False
    for found in (path, _text(value, "__name__")):  # torch.sin is a method of a hidden class
        try:
            if functools.reduce(getattr, found.split("."), sys.modules[module]) is value:
                return True
        except AttributeError:
            continue
    return False


CACHED = type(functools.lru_cache(lambda: None))


def written_by_them(function: Any) -> bool:
    """Whether the code of a function is theirs: its globals say so, whatever name it has been given."""
    scope = getattr(function, "__globals__", None)
    module = sys.modules.get(str(scope.get("__name__"))) if isinstance(scope, dict) else None
    return module is not None and vars(module) is scope and owned(module)


def put_there(value: object) -> bool:
    """Whether this, found in a module of theirs, is a function or class that is not theirs."""
    if not isinstance(value, (type, types.FunctionType, CACHED)):
        return False
    code = value if isinstance(value, types.FunctionType) else getattr(value, "__wrapped__", None)
    foreign = not isinstance(value, type) and not written_by_them(code)
    return foreign or not owned(sys.modules.get(_text(value, "__module__")))


def is_of_its_module(value: Any) -> bool:
    """Whether a compiled function is the one of that name in a module of theirs."""
    return owned(value.__self__) and getattr(value.__self__, value.__name__, None) is value


def held_by_them(value: object) -> str | None:
    """Where a module of theirs holds this instance of a class of the same module, as ``virtualized.ops`` is held."""
    home = sys.modules.get(type(value).__module__)
    names = (name for name, one in vars(home).items() if one is value) if owned(home) else ()
    return next((f"{type(value).__module__}.{name}" for name in names), None)


def _text(value: object, attribute: str) -> str:
    """A text that an object has of itself or of its class, without asking its ``__getattr__``."""
    try:
        found = object.__getattribute__(value, attribute)
    except AttributeError:
        return ""
    return found if isinstance(found, str) else ""
