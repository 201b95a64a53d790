"""Which text stands for a payload, whatever it holds? Equal for equal values in every process; never an error."""

from __future__ import annotations

import hashlib
import json
from typing import Any, Final, TypeGuard

import torch
from torch import fx

_DEPTH: Final = 32
"""Containers inside containers that are looked into: a payload that holds itself still has a text."""
_LONG: Final = 4096  # bits; Python refuses to write longer integers in decimal
_PRIMITIVES: Final = (str, int, float, complex, bytes)
_AS_WRITTEN: Final = (torch.dtype, torch.device, torch.layout, torch.Size)


def plain(value: object) -> object:
    """A JSON form that is equal in every process, and different for different values. Never raises.

    Not told apart: a list, a tuple and subclasses of the two with equal items; a dict and a subclass of it with
    equal items, in any order; objects of one type that are no primitive (their type alone counts), an object being
    whatever is no None, bool, str, int, float, complex, bytes, dtype, device, layout, container or a subclass of
    one; what lies more than 32 containers deep. A primitive of a subclass differs from the plain value and names its
    type: the contract takes the one and not the other. What one value does when it is read hides no other value.
    """
    return _Reader().form(value, _DEPTH)


def fields(value: object) -> dict[Any, Any] | None:
    """What a dict holds, in a fresh dict, past whatever a subclass does; None for any other value. Never raises.

    Keys that refuse to be hashed or compared cannot be carried over; then only those that are plain strings are.
    """
    if not is_dict(value):
        return None
    try:
        return dict(dict.items(value))
    except Exception:  # a key may be any object, with any behaviour
        return {k: v for k, v in dict.items(value) if type(k) is str}


def is_dict(value: object) -> TypeGuard[dict[Any, Any]]:
    """Whether a value is a dict or of a subclass of it, without asking the value, as isinstance would."""
    return issubclass(type(value), dict)


def type_name(value: object) -> str:
    """The name of a value's type, past whatever the type's own type does. Never raises."""
    return str(type.__dict__["__name__"].__get__(type(value)))


def _full_name(kind: type) -> str:
    """Module and name of a type, past whatever the type's own type does."""
    module = type.__dict__["__module__"].__get__(kind)
    name = type.__dict__["__qualname__"].__get__(kind)
    return f"{str.__str__(module)}.{name}" if issubclass(type(module), str) else str(name)


def canonical(value: object) -> str:
    """The JSON text of a plain form, different for different forms: a pair of surrogates is no other character."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False)


def sha256(value: object) -> str:
    """64 hexadecimal digits over a plain form."""
    return hashlib.sha256(canonical(value).encode("utf-8", "surrogatepass")).hexdigest()


class _Reader:
    """The forms of one value and of what it holds.

    A container inside the value's own containers counts by its digest, which is taken once however often it is
    reached: a payload whose containers alias one another costs no more than they hold.
    """

    def __init__(self) -> None:
        self._digests: dict[tuple[int, int], dict[str, str]] = {}  # by the container, alive meanwhile, and its depth

    def form(self, value: Any, depth: int) -> object:
        # Types are compared by identity and isinstance is not asked: a value, or its type, may answer anything.
        kind = type(value)
        if value is None or kind is bool or kind is str:
            return value
        try:
            return self._form(value, kind, depth)
        except Exception:  # a payload may be any object, with any behaviour
            return {"unreadable": _full_name(kind)}

    def _form(self, value: Any, kind: type, depth: int) -> object:
        for base in _PRIMITIVES:
            if issubclass(kind, base):
                written = _written(value, base)
                return written if kind is base else {"subclass": _full_name(kind), "value": written}
        if any(kind is one for one in _AS_WRITTEN):
            return {kind.__name__: repr(value)}
        if issubclass(kind, (dict, list, tuple, set, frozenset)):
            if depth == 0:
                return {"cut": None}
            if depth > _DEPTH - 2:
                return self._container(value, kind, depth - 1)
            key = (id(value), depth)
            if key not in self._digests:
                self._digests[key] = {"sha256": sha256(self._container(value, kind, depth - 1))}
            return self._digests[key]
        return {"node": None} if issubclass(kind, fx.Node) else {"object": _full_name(kind)}

    def _container(self, value: Any, kind: type, depth: int) -> object:
        if issubclass(kind, dict):
            items = list(dict.items(value))
            if all(type(k) is str for k, _ in items):
                return {"fields": {k: self.form(v, depth) for k, v in items}}
            return {"dict": sorted(([self.form(k, depth), self.form(v, depth)] for k, v in items), key=canonical)}
        if issubclass(kind, (set, frozenset)):
            return {"set": sorted((self.form(v, depth) for v in items_of(value)), key=canonical)}
        return [self.form(v, depth) for v in items_of(value)]


def _written(value: Any, base: Any) -> object:
    """A primitive as ``base`` itself writes it."""
    if base is str:
        return str.__str__(value)
    if base is not int:
        return {base.__name__: base.__repr__(value)}
    if (bits := int.bit_length(value)) <= _LONG:
        return int.__int__(value)
    return {"int": int.to_bytes(value, bits // 8 + 1, "big", signed=True).hex()}


def items_of(value: Any) -> Any:
    """The items of a builtin container, past whatever a subclass does when it is iterated."""
    base: Any
    for base in (list, tuple, set, frozenset):
        if issubclass(type(value), base):
            return base.__iter__(value)
    return iter(value)
