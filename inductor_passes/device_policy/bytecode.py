"""What a function may read when it runs, told by its bytecode alone: globals, attributes, imports, look-ups by text."""

from __future__ import annotations

import dis
import functools
import types
from collections.abc import Iterator
from dataclasses import dataclass

_GLOBALS = frozenset({"LOAD_GLOBAL", "LOAD_NAME", "LOAD_FROM_DICT_OR_GLOBALS"})
_BY_NAME = frozenset({"getattr", "hasattr"})
_CALLS = frozenset({"CALL_FUNCTION", "PRECALL", "CALL"})
_VALUES = ("LOAD_FAST", "LOAD_DEREF", "LOAD_GLOBAL", "LOAD_NAME", "LOAD_CONST", "LOAD_SMALL_INT")


@dataclass(frozen=True, slots=True)
class Reads:
    """What one code object, the functions and classes nested in it included, may read.

    Attributes:
        loaded: names loaded from the globals, or else from the builtins.
        names: every name that may be an attribute's: of the bytecode, of ``getattr(x, "text")``, of class patterns.
        imports: modules imported inside: name, level.
        computed: builtins that look an attribute up by a name which is computed.
    """

    loaded: frozenset[str]
    names: frozenset[str]
    imports: frozenset[tuple[str, int]]
    computed: frozenset[str]


@functools.lru_cache(maxsize=4096)
def reads(code: types.CodeType) -> Reads:
    """Read a code object; the same for equal code, so it is read once."""
    loaded: set[str] = set()
    names: set[str] = set()
    imports: set[tuple[str, int]] = set()
    computed: set[str] = set()
    for one in _codes(code):
        names.update(one.co_names)
        steps = [step for step in dis.get_instructions(one) if step.opname not in ("CACHE", "EXTENDED_ARG")]
        for index, step in enumerate(steps):
            if step.opname == "IMPORT_NAME":
                level = steps[index - 2].argval if index > 1 else 0
                imports.add((step.argval, level if isinstance(level, int) else 1))
            elif step.opname == "MATCH_CLASS":  # case object(NAME=...)
                names.update(name for texts in one.co_consts if isinstance(texts, tuple) for name in texts
                             if isinstance(name, str))
            elif step.opname in _GLOBALS:
                loaded.add(step.argval)
                if step.argval in _BY_NAME:
                    text = _written_name(steps[index + 1 :])
                    names.update(() if text is None else (text,))
                    computed.update((step.argval,) if text is None else ())
    return Reads(frozenset(loaded), frozenset(names), frozenset(imports), frozenset(computed))


def _written_name(steps: list[dis.Instruction]) -> str | None:
    """The text in ``getattr(a.b, "text")`` or ``getattr(a.b, "text", c.d)``, told from what follows ``getattr``.

    None for every other form: the name may then be computed.
    """
    rest = _after_a_value([step for step in steps if step.opname != "PUSH_NULL"])
    if not rest or rest[0].opname != "LOAD_CONST" or not isinstance(rest[0].argval, str):
        return None
    for count, end in ((2, rest[1:]), (3, _after_a_value(rest[1:]))):
        if end and end[0].opname in _CALLS and end[0].arg == count:  # an inner call has fewer arguments here
            return rest[0].argval
    return None


def _after_a_value(steps: list[dis.Instruction]) -> list[dis.Instruction]:
    """What follows one name or constant with its attributes; nothing when the first is neither."""
    if not steps or not steps[0].opname.startswith(_VALUES) or isinstance(steps[0].argval, tuple):
        return []
    count = 1
    while count < len(steps) and steps[count].opname == "LOAD_ATTR":
        count += 1
    return steps[count:]


def _codes(code: types.CodeType) -> Iterator[types.CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _codes(constant)
