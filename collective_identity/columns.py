"""How does the ledger remember a hundred thousand collectives? In columns of numbers, every text kept once.

A `CollectiveRow` is about 250 bytes of Python objects, a packed one about 45: what many rows have in common
(transport, role, group, dtype, ...) is one number, texts are numbers into one list. Rows and events come back as
the values that went in.
"""

from __future__ import annotations

import json
import sys
import zlib
from array import array
from bisect import bisect_right
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Final, overload

from .digest import CollectiveRow
from .reporting.records import EventRecord

_UNKNOWN: Final = -1
_CHUNK: Final = 256  # events that are compressed together
_COMMON: Final = (
    "transport",
    "form",
    "role",
    "source",
    "producer",
    "group",
    "group_size",
    "reduce_op",
    "dtype",
    "param_group",
    "absence",
    "code",
    "backward",
)
"""Fields of a row whose values many rows share, kept as one number."""


class Texts:
    """Values kept once and numbered from 0.

    The names of one graph's nodes are looked up while it compiles only: `forget` drops that index and keeps the
    names, which costs 8 bytes each.
    """

    def __init__(self) -> None:
        self._values: list[Any] = []
        self._shared: dict[Hashable, int] = {}
        self._of_graph: dict[int, dict[str, int]] = {}

    def number(self, value: Hashable) -> int:
        """The number of a value that may come again at any time; -1 for None."""
        return _UNKNOWN if value is None else self._in(self._shared, value)

    def of_graph(self, graph: int, value: str | None) -> int:
        """The number of a text that belongs to one graph; -1 for None."""
        return _UNKNOWN if value is None else self._in(self._of_graph.setdefault(graph, {}), value)

    def forget(self, graph: int) -> None:
        """No text of this graph will come again (one that does is kept twice)."""
        self._of_graph.pop(graph, None)

    def __getitem__(self, number: int) -> Any:
        return None if number == _UNKNOWN else self._values[number]

    def _in(self, index: dict[Any, int], value: Hashable) -> int:
        found = index.get(value)
        if found is None:
            found = index[value] = len(self._values)
            self._values.append(value)
        return found

    def nbytes(self) -> int:
        """Bytes of the list and its indices, without the values themselves."""
        indices: list[dict[Any, int]] = [self._shared, *self._of_graph.values()]
        numbers = sum(sys.getsizeof(n) for index in indices for n in index.values())
        return sys.getsizeof(self._values) + sum(map(sys.getsizeof, (self._of_graph, *indices))) + numbers


class PackedRows(Sequence[CollectiveRow]):
    """The rows of one table as columns. Equal to any sequence of the same rows."""

    __slots__ = ("_texts", "_index", "_node", "_common", "_numel", "_nbytes", "_params", "_members", "_lists")

    def __init__(self, rows: Iterable[CollectiveRow], texts: Texts, graph: int) -> None:
        listed = list(rows)
        self._texts = texts
        self._lists = array("i")
        self._index = array("i", [row.index for row in listed])
        self._node = array("i", [texts.of_graph(graph, row.node) for row in listed])
        self._common = array("i", [texts.number(tuple(getattr(row, f) for f in _COMMON)) for row in listed])
        self._numel = array("q", [_UNKNOWN if row.numel is None else row.numel for row in listed])
        self._nbytes = array("q", [_UNKNOWN if row.nbytes is None else row.nbytes for row in listed])
        self._params = array("i", [self._list(row.params, None) for row in listed])
        self._members = array("i", [self._list(row.members, graph) for row in listed])

    def _list(self, values: tuple[str, ...] | None, graph: int | None) -> int:
        """Where a list of texts begins in `_lists`, its length first."""
        if values is None:
            return _UNKNOWN
        texts, place = self._texts, len(self._lists)
        self._lists.append(len(values))
        self._lists.extend(texts.number(v) if graph is None else texts.of_graph(graph, v) for v in values)
        return place

    def _listed(self, place: int) -> tuple[str, ...] | None:
        if place == _UNKNOWN:
            return None
        end = place + 1 + self._lists[place]
        return tuple(self._texts[number] for number in self._lists[place + 1 : end])

    def __len__(self) -> int:
        return len(self._index)

    @overload
    def __getitem__(self, place: int) -> CollectiveRow: ...
    @overload
    def __getitem__(self, place: slice) -> tuple[CollectiveRow, ...]: ...
    def __getitem__(self, place: int | slice) -> CollectiveRow | tuple[CollectiveRow, ...]:
        if isinstance(place, slice):
            return tuple(self[i] for i in range(*place.indices(len(self))))
        common = dict(zip(_COMMON, self._texts[self._common[place]], strict=True))
        numel, nbytes = self._numel[place], self._nbytes[place]
        return CollectiveRow(
            index=self._index[place],
            node=self._texts[self._node[place]],
            numel=None if numel == _UNKNOWN else numel,
            nbytes=None if nbytes == _UNKNOWN else nbytes,
            params=self._listed(self._params[place]),
            members=self._listed(self._members[place]),
            **common,
        )

    def __iter__(self) -> Iterator[CollectiveRow]:
        return map(self.__getitem__, range(len(self)))

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Sequence) or isinstance(other, str):
            return NotImplemented
        return len(self) == len(other) and all(a == b for a, b in zip(self, other, strict=True))

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return repr(tuple(self))

    def nbytes(self) -> int:
        """Bytes of the columns, without the texts they number."""
        columns = (self._index, self._node, self._common, self._numel, self._nbytes, self._params, self._members)
        return sum(map(sys.getsizeof, (*columns, self._lists))) + sys.getsizeof(self)


class PackedEvents:
    """Events: what many have in common as a number, the rest (node, parameters, stack, detail) compressed, `_CHUNK`
    at a time. The newest, up to as many, are kept as they are."""

    def __init__(self, texts: Texts) -> None:
        self._texts = texts
        self._what = array("i")
        self._steps, self._before = array("I"), array("I")  # from this event on: so many other records before it
        self._chunks: list[bytes] = []
        self._newest: list[tuple[Any, ...]] = []
        self._unpacked: tuple[int, list[Any]] = (-1, [])  # the chunk that was read last

    def add(self, event: EventRecord, before: int) -> None:
        """Append one event, with the number of other records that came before it."""
        if not self._before or self._before[-1] != before:
            self._steps.append(len(self._what))
            self._before.append(before)
        common = (event.code, event.slug, event.severity, event.text, event.remedy, event.role, event.pass_name)
        self._what.append(self._texts.number((*common, event.graph)))
        self._newest.append((event.node, event.params, event.stack, event.detail))
        if len(self._newest) == _CHUNK:
            self._chunks.append(zlib.compress(json.dumps(self._newest).encode(), 1))
            self._newest = []

    def __len__(self) -> int:
        return len(self._what)

    def before(self, place: int) -> int:
        """How many other records came before the event at this place."""
        return self._before[bisect_right(self._steps, place) - 1]

    def __getitem__(self, place: int) -> EventRecord:
        code, slug, severity, text, remedy, role, pass_name, graph = self._texts[self._what[place]]
        node, params, stack, detail = self._own(*divmod(place, _CHUNK))
        return EventRecord(
            graph=graph,
            code=code,
            slug=slug,
            severity=severity,
            text=text,
            remedy=remedy,
            node=node,
            role=role,
            pass_name=pass_name,
            detail=detail,
            params=None if params is None else tuple(params),
            stack=stack,
        )

    def _own(self, chunk: int, place: int) -> Sequence[Any]:
        if chunk == len(self._chunks):
            return self._newest[place]
        if self._unpacked[0] != chunk:
            self._unpacked = chunk, json.loads(zlib.decompress(self._chunks[chunk]))
        return self._unpacked[1][place]  # type: ignore[no-any-return]

    def nbytes(self) -> int:
        """Bytes of all that is kept of the events themselves; the newest count as they would compressed."""
        columns = sum(map(sys.getsizeof, (self._what, self._steps, self._before, self._chunks, *self._chunks)))
        return columns + len(zlib.compress(json.dumps(self._newest).encode(), 1))


class PackedMapping(Mapping[str, Any]):
    """JSON values kept compressed: the summary of a pass names each collective that it left alone."""

    __slots__ = ("_packed",)

    def __init__(self, values: Mapping[str, Any]) -> None:
        self._packed = zlib.compress(json.dumps(values).encode(), 1)

    def _values(self) -> dict[str, Any]:
        return json.loads(zlib.decompress(self._packed))  # type: ignore[no-any-return]

    def __getitem__(self, key: str) -> Any:
        return self._values()[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._values())

    def __len__(self) -> int:
        return len(self._values())

    def __eq__(self, other: object) -> bool:
        return self._values() == dict(other) if isinstance(other, Mapping) else NotImplemented

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return repr(self._values())
