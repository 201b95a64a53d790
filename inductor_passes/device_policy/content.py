"""Reads what a function will run, piece by piece, into a hash. What cannot be followed is refused, never left out."""

from __future__ import annotations

import enum
import functools
import gc
import hashlib
import re
import sys
import types
from collections.abc import Collection
from typing import Any

import torch

from . import ownership
from .bytecode import reads
from .ownership import CACHED, named, owned, unseen, written_by_them
from .torch_names import operators_named, traces_python

_PLAIN = (type(None), bool, int, float, complex, str, bytes, type(Ellipsis), type(NotImplemented))
_TORCH = (torch.dtype, torch.device, torch.memory_format, torch.layout)
_DESCRIPTORS = (
    types.WrapperDescriptorType, types.MethodDescriptorType, types.ClassMethodDescriptorType,
    types.GetSetDescriptorType, types.MemberDescriptorType,
)  # fmt: skip
_DISPATCH = functools.singledispatch(reads).__code__  # type: ignore[attr-defined]
_OF_DISPATCH = frozenset("register dispatch registry _clear_cache __wrapped__".split())
_NOT_RUN = frozenset(
    "__dict__ __weakref__ __doc__ __module__ __annotations__ __annotate_func__ __annotate__ __annotations_cache__ "
    "__firstlineno__ __static_attributes__ __signature__".split()
)
_OF_MEMBERS = frozenset("_value_ _name_ __objclass__ _sort_order_ _inverted_".split())
_OF_ENUMS = frozenset(
    "__new__ __new_member__ _generate_next_value_ _new_member_ _member_names_ _member_map_ _member_type_ "
    "_value2member_map_ _unhashable_values_ _unhashable_values_map_ _hashable_values_ _use_args_".split()
)  # what Python's enum keeps there: made from the members, which are written


class NoIdentity(TypeError):
    """A callable whose content has no name that another process would find again."""


class Reader:
    """Walks from one function; each object is written once, later by its number, so cycles end and cost is linear."""

    def __init__(self, seed: str) -> None:
        self._hash = hashlib.sha256(f"{seed} {ownership.VERSIONS}".encode())
        self._numbers: dict[int, int] = {}
        self._alive: list[object] = []  # an id stays its object's own while that lives
        self._modules: list[tuple[types.ModuleType, str]] = []
        self._names = {"__getattr__"}

    def hexdigest(self) -> str:
        return self._hash.hexdigest()

    def _write(self, *parts: object) -> None:
        for part in parts:
            text = str(part).encode("utf-8", "surrogatepass")
            self._hash.update(f"{len(text)}:".encode() + text)

    def value(self, value: Any, path: str) -> None:
        """Write one value; ``path`` says how it was reached."""
        if type(value) in _PLAIN:
            self._write(type(value).__name__, repr(value))
            if type(value) is str and ("{" in value or "}" in value):
                self._names.update(re.findall(r"\w+", value))  # "{0.NAME}".format(module)
        elif isinstance(value, _TORCH):
            self._write("torch", value)
        elif isinstance(value, (torch._ops.OpOverload, torch._ops.OpOverloadPacket)):
            self._operator(value, path)
        elif id(value) in self._numbers:
            self._write("again", self._numbers[id(value)])
        else:
            self._numbers[id(value)] = len(self._numbers)
            self._alive.append(value)
            self._object(value, path)

    def attributes(self) -> None:
        """What may be read from the modules that were reached: every attribute whose name some bytecode holds.

        Whichever function holds it: a module may be handed on. What is read holds names and reaches modules too.
        """
        done: set[tuple[int, str]] = set()
        before = -1
        while before != len(done):
            before = len(done)
            for number, (module, path) in enumerate(self._modules):
                for name in sorted(self._names):
                    if name in vars(module) and (number, name) not in done:
                        done.add((number, name))
                        self._attribute(number, name, vars(module)[name], owned(module), f"{path}, attribute {name!r}")

        for operator, path in operators_named(self._names, [module for module, _ in self._modules]):
            self._operator(operator, path)

    def _attribute(self, number: int, name: str, value: Any, theirs: bool, path: str) -> None:
        """Of a module of theirs: constants, and what was put there that is not theirs; the rest is their version."""
        if not theirs or isinstance(value, types.ModuleType) or type(value) in _PLAIN or (
            ownership.put_there(value) or unseen(value)
        ):
            self._write("attribute", number, name)
            self.value(value, path)

    def _operator(self, value: Any, path: str) -> None:
        if traces_python(value):
            raise NoIdentity(
                f"reaches {path}, the operator {value}, whose own Python code is traced: call that code itself"
            )
        self._write("operator", value, getattr(value, "_schema", None))

    def _object(self, value: Any, path: str) -> None:
        what = unseen(value)
        if what is not None:
            raise NoIdentity(
                f"reaches {path}, which is {what}: it finds content by text or outside the process, where nothing can "
                "follow: name what you need, or make it a constant"
            )
        if type(value) in (tuple, list):
            self._write(type(value).__name__, len(value))
            for index, item in enumerate(value):
                self.value(item, f"{path}[{index}]")
        elif type(value) in (set, frozenset):
            self._set(value, path)
        elif type(value) in (dict, types.MappingProxyType):
            self._write("mapping", len(value))
            for key, item in value.items():
                self.value(key, f"a key of {path}")
                self.value(item, f"{path}[{key!r}]")
        elif isinstance(value, enum.Enum):
            self._enum(value, path)
        elif isinstance(value, types.CodeType):
            self._code(value, path)
        elif isinstance(value, types.ModuleType):
            self._module(value, path)
        elif isinstance(value, types.FunctionType):
            self._function(value, path)
        elif isinstance(value, type):
            self._class(value, path)
        else:
            self._wrapper(value, path)

    def _set(self, value: frozenset[Any], path: str) -> None:
        if not all(type(item) in (*_PLAIN, *_TORCH) for item in value):
            raise NoIdentity(f"reaches {path or 'a set'}, whose items have no fixed order: use a tuple")
        self._write(type(value).__name__, *sorted(f"{type(item).__name__} {item!r}" for item in value))

    def _enum(self, value: enum.Enum, path: str) -> None:
        self._write("enum", value._name_)
        self.value(type(value), f"the class of {path}")
        if not named(type(value)) or type(value._value_) in _PLAIN:
            self.value(value._value_, f"the value of {path}")
            self._attached(value, path, _OF_MEMBERS)

    def _module(self, module: types.ModuleType, path: str) -> None:
        if type(module) is not types.ModuleType and not owned(module):
            raise NoIdentity(
                f"reaches {path}, a {kind(module)}, whose attributes are not in the module itself: give the function "
                "what it needs by itself"
            )
        self._write("module", module.__name__)
        self._modules.append((module, path))

    def _wrapper(self, value: Any, path: str) -> None:
        """What stands for other code, by what it stands for; never by the module of its type."""
        if named(value):
            self._write("external", value.__module__, value.__qualname__)
        elif type(value) is CACHED and any(one is value.__wrapped__ for one in gc.get_referents(value)):
            self._write("cached", value.cache_parameters())
            self.value(value.__wrapped__, f"what {path} caches")
            self._attached(value, path, ("__wrapped__", "cache_parameters"))
        elif type(value) is functools.partial:
            self._write("partial")
            self._parts(value, ("func", "args", "keywords"), path)
            self._attached(value, path)
        elif type(value) in (staticmethod, classmethod):
            self._write(type(value).__name__)
            self.value(value.__func__, path)
        elif type(value) is property:
            self._write("property")
            self._parts(value, ("fget", "fset", "fdel"), path)
        elif isinstance(value, types.BuiltinFunctionType) and ownership.is_of_its_module(value):
            self._write("builtin", value.__module__, value.__name__)
        elif isinstance(value, _DESCRIPTORS):
            self._write("descriptor", type(value).__name__, value.__name__)
            self.value(value.__objclass__, f"the class of {path}")
        elif (place := ownership.held_by_them(value)) is not None:
            self._write("theirs", place)
        else:
            raise NoIdentity(
                f"reaches {path or 'a value'}, a {kind(value)}, which has no stable identity: use plain constants, "
                "operators and module-level functions"
            )

    def _parts(self, value: object, names: tuple[str, ...], path: str) -> None:
        for name in names:
            self.value(getattr(value, name), f"{path}.{name}")

    def _function(self, function: types.FunctionType, path: str) -> None:
        if function.__name__ == "<lambda>":
            where = f"reaches {path}, a lambda" if path else "is a lambda"
            raise NoIdentity(f"{where}: give it a name with a module-level def")
        self._write("function", function.__module__, function.__qualname__)
        if named(function):
            return  # torch and Python themselves are in torch's keys
        if function.__code__ is _DISPATCH:
            self._write("singledispatch")
            self.value(function.registry, f"the registry of {function.__qualname__}")  # type: ignore[attr-defined]
            self._attached(function, function.__qualname__, _OF_DISPATCH)
            return
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
        self._attached(function, function.__qualname__)
        self._names |= reads(function.__code__).names
        if not written_by_them(function):
            self._reached(function)

    def _attached(self, value: Any, path: str, known: Collection[str] = ()) -> None:
        """What is in an object's own dictionary, but what is ``known`` otherwise."""
        for name, item in sorted(vars(value).items()):
            if name not in _NOT_RUN and name not in known:
                self._write("attribute", name)
                self.value(item, f"{path}.{name}")

    def _reached(self, function: types.FunctionType) -> None:
        """What the bytecode loads from the globals and imports; refuse what it looks up where nothing can follow."""
        found = reads(function.__code__)
        owner = function.__qualname__
        for name in sorted(found.computed | found.names & ownership.UNSEEN_NAMES):
            raise NoIdentity(
                f"uses {name} in {owner} with what only a run can tell: write the attribute's name, as in module.name"
            )
        for name, level in sorted(found.imports):
            module = None if level else ownership.owned_module(name)
            if module is None:
                raise NoIdentity(
                    f"imports {name or '.'!r} inside {owner}: import it at the top of the module, where its "
                    "content can be read"
                )
            self.value(sys.modules[name.partition(".")[0]], f"{name!r}, imported inside {owner}")
            self.value(module, f"{name!r}, imported inside {owner}")
        for name in sorted(found.loaded):
            path = f"the global {name!r} of {owner}"
            if name in function.__globals__:
                self._write("global", name)
                self.value(function.__globals__[name], path)
            elif name in function.__builtins__:  # type: ignore[attr-defined]
                if name not in ("getattr", "hasattr"):  # their names are written out, or refused above
                    self._write("builtin", name)
                    self.value(function.__builtins__[name], path)  # type: ignore[attr-defined]
            else:
                raise NoIdentity(f"reaches {path}, which does not exist yet: define it before the policy")

    def _class(self, value: type, path: str) -> None:
        self._write("class", value.__module__, value.__qualname__)
        if named(value):
            return
        self.value(type(value), f"the metaclass of {value.__qualname__}")
        self.value(value.__bases__, f"a base of {value.__qualname__}")
        skipped: Collection[str] = ()
        if isinstance(value, enum.EnumMeta):
            members: dict[str, Any] = dict(value.__members__)
            skipped = _OF_ENUMS | members.keys()
            self.value(members, f"the members of {value.__qualname__}")
        self._attached(value, value.__qualname__, skipped)

    def _code(self, code: types.CodeType, path: str) -> None:
        self._write("code", code.co_code.hex(), code.co_names, code.co_varnames, code.co_freevars, code.co_cellvars)
        self._write(code.co_argcount, code.co_posonlyargcount, code.co_kwonlyargcount, code.co_flags)
        self._write(getattr(code, "co_exceptiontable", b"").hex())
        self._constant(code.co_consts, f"the constants of {path or code.co_name}")

    def _constant(self, value: Any, path: str) -> None:
        """Constants share tuples or not, depending on how a module was loaded: by value, never by number."""
        if type(value) is tuple:
            self._write("tuple", len(value))
            for item in value:
                self._constant(item, path)
        elif isinstance(value, types.CodeType):
            self._code(value, path)
        elif type(value) is frozenset:
            self._set(value, path)
        else:
            self.value(value, path)


def kind(value: object) -> str:
    return f"{type(value).__module__}.{type(value).__qualname__}"
