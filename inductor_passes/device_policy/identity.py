"""What makes two Python functions the same: a hash of everything that they will run.

Bytecode, constants, names, defaults, closures, and every global outside torch and the standard library that the
bytecode reaches, followed to its end. Not source text: the file may have changed since it was imported.
"""

from __future__ import annotations

import dis
import enum
import functools
import hashlib
import sys
import types
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

PYTHON = f"{sys.version_info[0]}.{sys.version_info[1]}"
"""Bytecode differs between minor versions, and so does every identity."""

_PLAIN = (type(None), bool, int, float, complex, str, bytes, type(Ellipsis))
_TORCH = (torch.dtype, torch.device, torch.memory_format, torch.layout)
_GLOBALS = frozenset({"LOAD_GLOBAL", "LOAD_NAME", "LOAD_FROM_DICT_OR_GLOBALS"})
_BUILTINS: Mapping[str, Any] = vars(sys.modules["builtins"])


class NoIdentity(TypeError):
    """A callable whose content has no name that another process would find again."""


def content_identity(function: Callable[..., Any]) -> str:
    """SHA-256 of what ``function`` will run, equal in every process that would run the same.

    Raises:
        NoIdentity: a lambda, a bound method, a partial or another callable with state, or one that reaches a
            value without a stable name (a tensor, an instance); the message names the path to it.
    """
    if isinstance(function, types.MethodType):
        raise NoIdentity("is a bound method, which carries its object: use a module-level function")
    if not isinstance(function, types.FunctionType):
        raise NoIdentity(
            f"is a {_kind(function)}, a callable that may carry state: use a module-level function"
        )
    reader = _Reader()
    reader.value(function, "")
    return reader.hexdigest()


class _Reader:
    """Walks from one function; each object is written once, later by its number, so cycles end and cost is linear."""

    def __init__(self) -> None:
        self._hash = hashlib.sha256(f"python {PYTHON}".encode())
        self._numbers: dict[int, int] = {}
        self._alive: list[object] = []  # an id stays its object's own while that lives

    def hexdigest(self) -> str:
        return self._hash.hexdigest()

    def _write(self, *parts: object) -> None:
        for part in parts:
            text = str(part).encode("utf-8", "surrogatepass")
            self._hash.update(f"{len(text)}:".encode() + text)

    def value(self, value: object, path: str) -> None:
        """Write one value; ``path`` says how it was reached."""
        if isinstance(value, enum.Enum):
            self._write("enum", _kind(value), value.name)
        elif type(value) in _PLAIN:
            self._write(type(value).__name__, repr(value))
        elif isinstance(value, _TORCH):
            self._write("torch", value)
        elif isinstance(value, torch._ops.OpOverload):
            self._write("op", value.name(), value._schema)
        elif isinstance(value, torch._ops.OpOverloadPacket):
            self._write("packet", value)
        elif isinstance(value, types.CodeType):
            self._code(value, path)
        elif type(value) in (tuple, list):
            self._write(type(value).__name__, len(value))  # type: ignore[arg-type]
            for index, item in enumerate(value):  # type: ignore[arg-type,var-annotated]
                self.value(item, f"{path}[{index}]")
        elif type(value) in (set, frozenset):
            self._set(value, path)  # type: ignore[arg-type]
        elif type(value) in (dict, types.MappingProxyType):
            self._write("mapping", len(value))  # type: ignore[arg-type]
            for key, item in value.items():  # type: ignore[attr-defined]
                self.value(key, f"a key of {path}")
                self.value(item, f"{path}[{key!r}]")
        else:
            self._object(value, path)

    def _set(self, value: frozenset[Any], path: str) -> None:
        if not all(isinstance(item, (*_PLAIN, *_TORCH)) for item in value):
            raise NoIdentity(f"reaches {path or 'a set'}, whose items have no fixed order: use a tuple")
        self._write("set", *sorted(f"{type(item).__name__} {item!r}" for item in value))

    def _object(self, value: Any, path: str) -> None:
        if id(value) in self._numbers:
            self._write("again", self._numbers[id(value)])
            return
        self._numbers[id(value)] = len(self._numbers)
        self._alive.append(value)
        if isinstance(value, types.ModuleType):
            self._write("module", value.__name__)
        elif isinstance(value, types.FunctionType):
            self._function(value, path)
        elif isinstance(value, types.BuiltinFunctionType) and isinstance(
            value.__self__, (types.ModuleType, type(None))
        ):
            self._write("builtin", value.__module__, value.__qualname__)
        elif isinstance(value, type):
            self._class(value, path)
        elif _is_theirs(getattr(type(value), "__module__", None)) and _found_again(value):
            self._write("external", value.__module__, value.__qualname__)
        else:
            raise NoIdentity(
                f"reaches {path or 'a value'}, a {_kind(value)}, which has no stable identity: use plain constants, "
                "operators and module-level functions"
            )

    def _function(self, function: types.FunctionType, path: str) -> None:
        if function.__name__ == "<lambda>":
            where = f"reaches {path}, a lambda" if path else "is a lambda"
            raise NoIdentity(f"{where}: give it a name with a module-level def")
        theirs = _is_theirs(function.__module__)
        self._write("function", function.__module__, function.__qualname__)
        if theirs and _found_again(function):
            return  # torch and Python themselves are in torch's keys
        self._code(function.__code__, path)
        self.value(function.__defaults__, f"a default of {function.__qualname__}")
        self.value(function.__kwdefaults__, f"a default of {function.__qualname__}")
        for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
            try:
                inside = cell.cell_contents
            except ValueError:
                raise NoIdentity(f"reaches the closure variable {name!r}, which is empty: assign it first") from None
            self._write(name)
            self.value(inside, f"the closure variable {name!r} of {function.__qualname__}")
        if not theirs:
            self._globals(function)

    def _globals(self, function: types.FunctionType) -> None:
        loaded, attributes = _names(function.__code__, function.__qualname__)
        for name in sorted(loaded):
            if name not in function.__globals__:
                if name not in _BUILTINS:
                    raise NoIdentity(
                        f"reaches the global {name!r} of {function.__qualname__}, which does not exist yet: define it "
                        "before the policy"
                    )
                continue
            value = function.__globals__[name]
            path = f"the global {name!r} of {function.__qualname__}"
            self._write("global", name)
            self.value(value, path)
            if isinstance(value, types.ModuleType) and not _is_theirs(value.__name__):
                self._attributes(value, attributes, path)

    def _attributes(self, module: types.ModuleType, names: frozenset[str], path: str) -> None:
        """What the function may read from a module: every attribute whose name its bytecode holds."""
        for name in sorted(names & vars(module).keys()):
            value = vars(module)[name]
            self._write("attribute", name)
            seen = id(value) in self._numbers
            self.value(value, f"{path}, attribute {name!r}")
            if isinstance(value, types.ModuleType) and not _is_theirs(value.__name__) and not seen:
                self._attributes(value, names, f"{path}.{name}")

    def _class(self, value: type, path: str) -> None:
        self._write("class", value.__module__, value.__qualname__)
        if _is_theirs(value.__module__) and _found_again(value):
            return
        for base in value.__bases__:
            self.value(base, f"a base of {value.__qualname__}")
        for name, item in sorted(vars(value).items()):
            if name in ("__dict__", "__weakref__", "__doc__", "__module__", "__annotations__", "__annotate_func__",
                        "__annotations_cache__", "__firstlineno__", "__static_attributes__"):
                continue
            if isinstance(item, (staticmethod, classmethod)):
                item = item.__func__
            self._write(name)
            self.value(item, f"{value.__qualname__}.{name}")

    def _code(self, code: types.CodeType, path: str) -> None:
        self._write("code", code.co_code.hex(), code.co_names, code.co_varnames, code.co_freevars, code.co_cellvars)
        self._write(code.co_argcount, code.co_posonlyargcount, code.co_kwonlyargcount, code.co_flags)
        self._write(getattr(code, "co_exceptiontable", b"").hex())
        self.value(code.co_consts, f"the constants of {path or code.co_name}")


def _names(code: types.CodeType, owner: str) -> tuple[frozenset[str], frozenset[str]]:
    """Globals that the code loads, nested functions included, and all names that could be attributes."""
    loaded: set[str] = set()
    attributes: set[str] = set()
    for one in _codes(code):
        attributes.update(one.co_names)
        level: object = 0
        before: list[object] = []
        for step in dis.get_instructions(one):
            if step.opname in _GLOBALS:
                loaded.add(step.argval)
            elif step.opname == "IMPORT_NAME":
                level = before[-2] if len(before) > 1 else 0
                if level or not _is_theirs(step.argval):
                    raise NoIdentity(
                        f"imports {step.argval or '.'!r} inside {owner}: import it at the top of the module, where its "
                        "content can be read"
                    )
            before.append(step.argval)
    return frozenset(loaded), frozenset(attributes)


def _codes(code: types.CodeType) -> Iterator[types.CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _codes(constant)


def _is_theirs(module: str | None) -> bool:
    """Torch and Python: named in torch's own keys, so a name is enough."""
    top = (module or "").split(".")[0]
    return top in ("torch", "sympy", "builtins") or (top != "__main__" and top in sys.stdlib_module_names)


def _found_again(value: Any) -> bool:
    """Whether the module's attribute of that name is this very object (what a factory made is not)."""
    path = getattr(value, "__qualname__", "<locals>")
    if "<" in path:
        return False
    try:
        return functools.reduce(getattr, path.split("."), sys.modules[value.__module__]) is value
    except (AttributeError, KeyError):
        return False


def _kind(value: object) -> str:
    return f"{type(value).__module__}.{type(value).__qualname__}"
