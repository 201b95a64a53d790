"""Everything that can be wrong with a policy, all of it in one list."""

from __future__ import annotations

import inspect
import re
import types
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch._ops import OpOverload, OpOverloadPacket

from . import torch_names
from .identity import NoIdentity, content_identity

REPLACEMENTS = ("fused", "low_contention")
"""What a collective may be replaced by: an opaque compute-communication operator, or a copy-engine transport."""


_WORD, _WORDS = re.compile(r"\w+"), re.compile(r"\w[\w.]*")


class Fallback:
    """The one value :data:`FALLBACK`: run the eager kernel."""

    __slots__ = ()

    def __new__(cls) -> Fallback:
        return globals().get("FALLBACK") or super().__new__(cls)  # there is one

    def __repr__(self) -> str:
        return "FALLBACK"

    def __copy__(self) -> Fallback:
        return self

    def __deepcopy__(self, memo: object) -> Fallback:
        return self

    def __reduce__(self) -> str:
        return "FALLBACK"


FALLBACK = Fallback()
"""As a lowering: this operator runs its eager kernel on the policy's device, and nowhere else changes."""


class PolicyError(ValueError):
    """A policy that cannot be built, or a compile that it cannot be applied to.

    Attributes:
        faults: every fault found, one line each.
    """

    def __init__(self, headline: str, faults: Iterable[str] = ()) -> None:
        self.faults = tuple(faults)
        super().__init__("\n  - ".join((headline, *self.faults)))


class Operators:
    """Reads operators as users write them and collects what is wrong with them."""

    def __init__(self) -> None:
        self.faults: list[str] = []

    def table(self, field: str, given: Any) -> dict[OpOverload, Any]:
        """A mapping from operators to what they get, packets expanded."""
        if given is None:
            return {}
        if not isinstance(given, Mapping):
            self.faults.append(f"{field} expects a mapping from operators, found {_said(given)}")
            return {}
        return self._fill(field, self._items(field, given.items))

    def group(self, field: str, given: Any) -> frozenset[OpOverload]:
        """A collection of operators, packets expanded."""
        if given is None:
            return frozenset()
        if isinstance(given, (str, bytes, Mapping, OpOverload, OpOverloadPacket)) or not isinstance(given, Iterable):
            self.faults.append(f"{field} expects a collection of operators, found {_said(given)}")
            return frozenset()
        return frozenset(self._fill(field, ((op, None) for op in self._items(field, lambda: given))))

    def _items(self, field: str, read: Callable[[], Iterable[Any]]) -> list[Any]:
        try:
            return list(read())
        except Exception as error:
            self.faults.append(f"{field} cannot be read: {type(error).__name__}: {error}")
            return []

    def _fill(self, field: str, items: Iterable[tuple[Any, Any]]) -> dict[OpOverload, Any]:
        found: dict[OpOverload, Any] = {}
        for written, value in items:
            for op in self._overloads(field, written):
                if op in found:
                    self.faults.append(f"{field}: {op} is given twice (a packet stands for all its overloads)")
                found[op] = value
        return found

    def _overloads(self, field: str, written: Any) -> Iterator[OpOverload]:
        op = _look_up(written) if isinstance(written, str) else written
        if isinstance(op, OpOverload):
            if op._schema.is_mutable:
                self.faults.append(f"{field}: {op} writes to its arguments: give the functional overload")
            else:
                yield op
        elif isinstance(op, OpOverloadPacket):
            functional = [one for one in torch_names.overloads(op) if not one._schema.is_mutable]
            if not functional:
                self.faults.append(f"{field}: every overload of {op} writes to its arguments")
            yield from functional
        elif isinstance(written, str):
            self.faults.append(f"{field}: operator {written!r} does not exist in this process")
        else:
            self.faults.append(f"{field} expects operators such as torch.ops.aten.add.Tensor, found {_said(written)}")


def name_faults(name: Any, version: Any, device_type: Any) -> Iterator[str]:
    """What is wrong with the three strings."""
    for field, value in (("name", name), ("version", version)):
        if not isinstance(value, str) or not value.strip():
            yield f"{field} expects a text that is not empty, found {_said(value)}"
        elif not value.isprintable():
            yield f"{field} expects a text on one line without control characters, found {value!r}"
    if not isinstance(device_type, str):
        yield f"device_type expects a text such as 'cuda', found {_said(device_type)}"
        return
    try:
        device = torch.device(device_type)
    except RuntimeError:
        yield f"device_type {device_type!r} is not known to torch: register the device before its policy"
        return
    if device.type == "cpu":
        yield "device_type 'cpu' is not an accelerator: CPU keeps torch's own tables"
    elif device.type == "meta":
        yield "device_type 'meta' is not an accelerator: nothing is compiled for it"
    elif device.type != device_type:
        yield f"device_type expects a type without an index, found {device_type!r}: use {device.type!r}"


def conflicts(
    decompositions: Mapping[OpOverload, Any], removed: frozenset[OpOverload], lowerings: Mapping[OpOverload, Any]
) -> Iterator[str]:
    """Rows of one policy that contradict each other."""
    for op in sorted(decompositions.keys() & lowerings.keys(), key=str):
        yield f"{op} has both a decomposition and a lowering: the lowering would never be reached"
    for op in sorted(decompositions.keys() & removed, key=str):
        yield f"{op} has its decomposition both overridden and removed"
    for op in sorted(removed - lowerings.keys(), key=str):
        if not torch_names.has_lowering(op):
            yield (
                f"{op} has its decomposition removed and neither a lowering nor a fallback: Inductor would register "
                "a fallback for the whole process"
            )


def function_faults(field: str, table: Mapping[OpOverload, Any]) -> Iterator[str]:
    """Values that are no functions, or functions without an identity."""
    for op, function in table.items():
        if function is FALLBACK and field == "lowerings":
            continue
        if function is FALLBACK or not callable(function):
            yield f"{field}[{op}] expects a function{_or_fallback(field)}, found {_said(function)}"
            continue
        named = f"{field}[{op}]: {getattr(function, '__qualname__', _said(function))}"
        try:
            content_identity(function)
        except NoIdentity as error:
            yield f"{named} {error}"
        if isinstance(function, types.FunctionType):
            yield from (f"{named} {text}" for text in _call_faults(op, function))


def _call_faults(op: OpOverload, function: types.FunctionType) -> Iterator[str]:
    """A function that nothing can call for ``op``, or whose call runs nothing."""
    if function.__code__.co_flags & (inspect.CO_GENERATOR | inspect.CO_COROUTINE | inspect.CO_ASYNC_GENERATOR):
        yield "is a generator or asynchronous, whose call runs nothing: use a plain function"
    needed = [one for one in op._schema.arguments if not one.has_default_value()]
    positional = [one.name for one in needed if not one.kwarg_only]
    try:
        inspect.signature(function, follow_wrapped=False).bind(*positional, **{one.name: 0 for one in needed
                                                                              if one.kwarg_only})
    except TypeError as error:
        yield f"cannot be called with the arguments of {op._schema}: {error}"


def collective_table(given: Any, faults: list[str]) -> dict[str, frozenset[str]] | None:
    """Which replacements each role allows; None when the policy says nothing about collectives."""
    if given is None:
        return None
    if not isinstance(given, Mapping):
        faults.append(f"collectives expects a mapping from roles to replacements, found {_said(given)}")
        return None
    table = {}
    for role, allowed in given.items():
        head, dot, tail = role.partition(".") if isinstance(role, str) else ("", "", "")
        if role != "*" and not (_WORD.fullmatch(head) and dot and (tail == "*" or _WORDS.fullmatch(tail))):
            faults.append(f"collectives expects roles such as 'fsdp.param_unshard', 'tp.*' or '*', found {_said(role)}")
        several = isinstance(allowed, Iterable) and not isinstance(allowed, (str, bytes))
        values = tuple(allowed) if several else (allowed,)
        wrong = [one for one in values if one not in REPLACEMENTS]
        if wrong or not several:
            faults.append(
                f"collectives[{role!r}] expects a collection of {', '.join(map(repr, REPLACEMENTS))}, "
                f"found {_said(allowed)}"
            )
        table[str(role)] = frozenset(one for one in values if one in REPLACEMENTS)
    return table


def _look_up(written: str) -> Any:
    """``"aten::add.Tensor"`` or ``"aten.add.Tensor"`` as an overload, without the overload as a packet."""
    found: Any = torch.ops
    for part in written.replace("::", ".").split("."):
        if not part:
            return None
        try:
            found = getattr(found, part)
        except (AttributeError, RuntimeError):
            return None
    return found


def _or_fallback(field: str) -> str:
    return " or FALLBACK" if field == "lowerings" else ""


def _said(value: object) -> str:
    plain = isinstance(value, (str, int, float, type(None), Fallback))
    return repr(value) if plain else f"a {type(value).__qualname__}"
