"""Which model declared what, and whose parameters does a graph take? Two models of one class are two."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

from .reporting.records import Expectation


@dataclass(slots=True)
class _Known:
    name: str
    module: weakref.ref[Any]
    compiled: bool = False


class Declared:
    """The models of a session that are known by more than their class. Holds no model alive."""

    def __init__(self) -> None:
        self._known: list[_Known] = []

    def take_over(self, other: Declared) -> None:
        """Know the models of another session that still live."""
        self._known = [replace(one, compiled=False) for one in other._known if one.module() is not None]

    def gone(self, name: str | None) -> bool:
        """Whether a model was known by that name and nobody holds it any more."""
        return any(one.name == name and one.module() is None for one in self._known)

    def name(self, module: Any) -> str:
        """The model's class; a second one of that class is ``Class (2)``. One that is gone and was never compiled
        leaves its name to the next."""
        for one in self._known:
            if one.module() is module:
                return one.name
        kind, number = type(module).__name__, 1
        self._known = [one for one in self._known if one.compiled or one.module() is not None]
        taken = {one.name for one in self._known}
        name = kind
        while name in taken:
            number += 1
            name = f"{kind} ({number})"
        self._known.append(_Known(name, weakref.ref(module)))
        return name

    def named(self, expectation: Expectation, module: Any | None) -> tuple[Expectation, str | None]:
        """The expectation under its model's own name, and that name. Without a `module`: the known one of that name."""
        if module is None:
            return expectation, next((one.name for one in self._known if one.name == expectation.model), None)
        name, kind = self.name(module), type(module).__name__
        if expectation.model.startswith(kind) and not expectation.model.startswith(name):
            expectation = replace(expectation, model=name + expectation.model.removeprefix(kind))
        return expectation, name

    def of(self, inputs: Iterable[Any]) -> tuple[str, ...] | None:
        """The models to which some input belongs as a parameter; None when there is none.

        A parameter that several models share tells of none of them, unless nothing else does.
        """
        given = {id(value) for value in inputs}
        own: dict[str, set[int]] = {}  # at the time of a compile: parameters may have been exchanged since
        for one in self._known:
            module = one.module()
            if module is not None:
                own[one.name] = given.intersection(map(id, module.parameters()))
        found = [
            name for name, ids in own.items() if ids.difference(*(other for key, other in own.items() if key != name))
        ]
        for one in self._known:
            one.compiled |= one.name in found
        return tuple(found) or None
