"""What lines does a run folder hold? One frozen type per kind of line, and their JSON form.

The fields are the file format, documented in docs/run-format.md and frozen with `SCHEMA`: a new optional
field keeps the number, any other change raises it. Standard library only: a run must be writable wherever
torch runs.
"""

from __future__ import annotations

import dataclasses
import types
import typing
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias, Union

from ..digest import CollectiveRow

SCHEMA = 1


@dataclass(frozen=True, slots=True)
class ExpectedRow:
    """How many collectives of one role a training step holds for one parameter group.

    `phase` is "forward", "regather" (gathers of the backward graph) or "backward" (reductions). `count` is
    before bucketing, `buckets` after it with the natural buckets; None means unknown. `dtype` is informative.
    """

    role: str
    phase: str
    param_group: str | None = None
    dtype: str | None = None
    count: int | None = None
    buckets: int | None = None


@dataclass(frozen=True, slots=True)
class Expectation:
    """What a producer says it will emit in one training step of one model: the sum of `rows`.

    `model` must be unique among the models of a run: a second declaration of the same name replaces the
    first. `world` is free for the producer (mesh, ranks, options), primitives only.
    """

    model: str
    world: Mapping[str, Any] = field(default_factory=dict)
    rows: tuple[ExpectedRow, ...] = ()


@dataclass(frozen=True, slots=True)
class RunRecord:
    """Opens a section of the file: one session of one process, its `session`-th. Times in seconds since the epoch."""

    rank: int
    ranks: int
    mode: str
    run_id: str
    restart: int
    host: str
    pid: int
    started: float
    torch: str
    package: str
    session: int | None = None


@dataclass(frozen=True, slots=True)
class ExpectedRecord:
    """One declared `Expectation`; `module` is the name of the model itself, where the producer gave it."""

    model: str
    world: Mapping[str, Any]
    rows: tuple[ExpectedRow, ...]
    module: str | None = None


@dataclass(frozen=True, slots=True)
class GraphRecord:
    """A compile began. `graph` numbers the graphs of a section, `phase` is the kind given to
    `begin_graph`, `lite` the lite state, where it is known by then, `modules` the declared models whose parameters
    it takes."""

    graph: int
    phase: str
    name: str
    backend: str
    lite: str = "off"
    modules: tuple[str, ...] | None = None


@dataclass(frozen=True, slots=True)
class CapturedRecord:
    """The collectives of a graph before any of our passes."""

    graph: int
    rows: Sequence[CollectiveRow]


@dataclass(frozen=True, slots=True)
class EventRecord:
    """Something happened to an identity; `graph` is None outside a compile. `params` are the parameters' FQNs,
    `stack` is the innermost line of the user's code, ``file:line in function``."""

    graph: int | None
    code: str
    slug: str
    severity: str
    text: str
    remedy: str
    node: str | None = None
    role: str | None = None
    pass_name: str | None = None
    detail: str = ""
    params: tuple[str, ...] | None = None
    stack: str | None = None


@dataclass(frozen=True, slots=True)
class PassRecord:
    """A pass ran for `seconds`; `before` and `after` count collectives by role."""

    graph: int
    name: str
    seconds: float
    changed: bool
    before: Mapping[str, int]
    after: Mapping[str, int]
    summary: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class FinishRecord:
    """A compile ended. `rows` are the collectives left; none when `cached`. `error` is set when it failed."""

    graph: int
    rows: Sequence[CollectiveRow]
    cached: bool = False
    lite: str = "off"
    compile_seconds: float | None = None
    error: str | None = None


@dataclass(frozen=True, slots=True)
class AgreementRecord:
    """The verdict of the cross-rank check of a graph; "differs" when it raised."""

    graph: int
    status: str
    detail: str


@dataclass(frozen=True, slots=True)
class EndRecord:
    """The session was closed; `error` when an exception ended it. Without this line its process was killed, or runs."""

    ended: float
    error: str | None = None


Record: TypeAlias = (
    RunRecord
    | ExpectedRecord
    | GraphRecord
    | CapturedRecord
    | EventRecord
    | PassRecord
    | FinishRecord
    | AgreementRecord
    | EndRecord
)

KINDS: Mapping[str, type[Any]] = types.MappingProxyType(
    {
        "run": RunRecord,
        "expected": ExpectedRecord,
        "graph": GraphRecord,
        "captured": CapturedRecord,
        "event": EventRecord,
        "pass": PassRecord,
        "finish": FinishRecord,
        "agreement": AgreementRecord,
        "end": EndRecord,
    }
)
_KIND_OF: Mapping[type[Any], str] = types.MappingProxyType({cls: kind for kind, cls in KINDS.items()})


class BadRecord(ValueError):
    """A line that is no record of this schema; the text says what was expected and what was found."""


def to_json(record: Record) -> dict[str, Any]:
    """The JSON object of a record: `schema`, `kind`, then its fields in order."""
    return {"schema": SCHEMA, "kind": _KIND_OF[type(record)], **json_values(record)}


def from_json(raw: object) -> Record:
    """The record of a JSON object. Unknown fields are ignored; anything else amiss raises `BadRecord`."""
    if not isinstance(raw, dict):
        raise BadRecord(f"expected a JSON object, found {type(raw).__name__}")
    if raw.get("schema") != SCHEMA:
        raise BadRecord(f"expected schema {SCHEMA}, found {raw.get('schema')!r}")
    kind = raw.get("kind")
    if not isinstance(kind, str) or kind not in KINDS:
        raise BadRecord(f"expected a kind out of {', '.join(KINDS)}, found {kind!r}")
    record: Record = _build(KINDS[kind], raw, kind)
    if isinstance(record, RunRecord) and record.ranks < 1:
        raise BadRecord(f"run: expected 'ranks' to be 1 or more, found {record.ranks}")
    return record


def json_values(value: Any) -> Any:
    """A record, a row or any value in it as JSON values; what JSON has no form for as its text."""
    if type(value) in _PRIMITIVES:
        return value
    fields = _FIELDS.get(type(value))
    if fields is not None:
        return {name: json_values(getattr(value, name)) for name, *_ in fields}
    if isinstance(value, Mapping):
        return {str(k): json_values(v) for k, v in value.items()}
    if isinstance(value, (int, float, str)):
        return value
    if isinstance(value, Sequence) and not isinstance(value, bytes):
        return [json_values(v) for v in value]
    return str(value)


_PRIMITIVES = frozenset((type(None), bool, int, float, str))

_Field: TypeAlias = tuple[str, Any, frozenset[Any], bool, bool]
"""(name, type, classes whose values need no closer look, required, may be a tuple of str)"""


def _fields(cls: type[Any]) -> tuple[_Field, ...]:
    hints = typing.get_type_hints(cls)
    found = []
    for f in dataclasses.fields(cls):
        hint = hints[f.name]
        required = f.default is dataclasses.MISSING and f.default_factory is dataclasses.MISSING
        choices = typing.get_args(hint) if typing.get_origin(hint) in (Union, types.UnionType) else (hint,)
        found.append((f.name, hint, _PRIMITIVES.intersection(choices), required, tuple[str, ...] in choices))
    return tuple(found)


_FIELDS: Mapping[type[Any], tuple[_Field, ...]] = types.MappingProxyType(
    {cls: _fields(cls) for cls in (*KINDS.values(), CollectiveRow, ExpectedRow)}
)


def _build(cls: type[Any], raw: Mapping[str, Any], where: str) -> Any:
    values: dict[str, Any] = {}
    for name, hint, at_once, required, texts in _FIELDS[cls]:
        if name in raw:
            value = raw[name]
            if type(value) in at_once:
                values[name] = value
            elif texts and type(value) is list and all(type(v) is str for v in value):
                values[name] = tuple(value)
            else:
                values[name] = _typed(hint, value, where, name)
        elif required:
            raise BadRecord(f"{where}: the field {name!r} is missing")
    return cls(**values)


def _typed(hint: Any, value: Any, where: str, name: str) -> Any:
    if hint is Any:
        return value
    if isinstance(hint, type) and isinstance(value, hint) and not (hint is int and isinstance(value, bool)):
        return value
    if hint is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if dataclasses.is_dataclass(hint) and isinstance(hint, type) and isinstance(value, dict):
        return _build(hint, value, f"{where}.{name}")
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin in (Union, types.UnionType):
        if value is None and type(None) in arguments:
            return None
        rest = [a for a in arguments if a is not type(None)]
        if len(rest) == 1:
            return _typed(rest[0], value, where, name)
    elif origin in (tuple, Sequence) and isinstance(value, list):
        return tuple(_typed(arguments[0], v, where, name) for v in value)
    elif origin is not None and isinstance(origin, type) and issubclass(origin, Mapping):
        if isinstance(value, dict):
            return {k: _typed(arguments[1], v, where, name) for k, v in value.items()}
    raise BadRecord(f"{where}: expected {name!r} to be {hint}, found {value!r}")
