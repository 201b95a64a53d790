"""Which text stands for a payload, whatever it holds? Equal for equal values in every process; never an error."""

from __future__ import annotations

import hashlib
import json
from typing import Any, Final, TypeGuard

import torch
from torch import fx

_CONTAINERS: Final = 10_000
"""Containers of one value that are looked into: nested or aliased without end, a payload still has a text."""
_DEPTH: Final = 100
_LONG: Final = 4096  # bits; Python refuses to write longer integers in decimal
_AS_WRITTEN: Final = (float, complex, bytes, torch.dtype, torch.device, torch.layout, torch.Size)


def plain(value: object) -> object:
    """A JSON form that tells different values apart and is equal in every process. Never raises."""
    try:
        return _plain(value, _DEPTH, [_CONTAINERS])
    except Exception:  # a payload may be any object, with any behaviour
        return {"unreadable": type_name(value)}


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


def canonical(value: object) -> str:
    """The JSON text of a plain form."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"))


def sha256(value: object) -> str:
    """64 hexadecimal digits over a plain form."""
    return hashlib.sha256(canonical(value).encode()).hexdigest()


def _plain(value: Any, depth: int, left: list[int]) -> object:
    if value is None or type(value) in (bool, str):
        return value
    if isinstance(value, str):
        return str.__str__(value)
    if isinstance(value, int):
        bits = int.bit_length(value)
        return (
            int.__int__(value)
            if bits <= _LONG
            else {"int": int.to_bytes(value, bits // 8 + 1, "big", signed=True).hex()}
        )
    if isinstance(value, (dict, list, tuple, set, frozenset)) and type(value) is not torch.Size:
        left[0] -= 1
        if depth == 0 or left[0] < 0:
            return {"cut": type(value).__name__}
        if isinstance(value, dict):
            if {type(k) for k in dict.keys(value)} <= {str}:
                return {"fields": {k: _plain(v, depth - 1, left) for k, v in dict.items(value)}}
            items = [[_plain(k, depth - 1, left), _plain(v, depth - 1, left)] for k, v in dict.items(value)]
            return {"dict": sorted(items, key=canonical)}
        if isinstance(value, (set, frozenset)):
            return {"set": sorted((_plain(v, depth - 1, left) for v in items_of(value)), key=canonical)}
        return [_plain(v, depth - 1, left) for v in items_of(value)]
    if isinstance(value, fx.Node):
        return {"node": None}
    if type(value) in _AS_WRITTEN:
        return {type(value).__name__: repr(value)}
    return {"object": f"{type(value).__module__}.{type(value).__qualname__}"}


def items_of(value: Any) -> Any:
    """The items of a builtin container, past whatever a subclass does when it is iterated."""
    base: Any
    for base in (list, tuple, set, frozenset):
        if isinstance(value, base):
            return base.__iter__(value)
    return iter(value)
