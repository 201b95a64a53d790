"""Where does the ledger keep its records? Rows and events in columns (columns.py), the few others as they are."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from .columns import PackedEvents, PackedMapping, PackedRows, Texts
from .reporting.records import CapturedRecord, EventRecord, FinishRecord, PassRecord, Record, json_values


class Storage:
    """Records in the order in which they came; not safe to use from several threads at once."""

    def __init__(self) -> None:
        self._texts = Texts()
        self._events = PackedEvents(self._texts)
        self._others: list[Record] = []

    def append(self, record: Record) -> Record:
        """Keep one record; the record as it is kept, its rows in columns."""
        if isinstance(record, EventRecord):
            self._events.add(record, len(self._others))
            return record
        if isinstance(record, (CapturedRecord, FinishRecord)):
            record = replace(record, rows=PackedRows(record.rows, self._texts, record.graph))
        elif isinstance(record, PassRecord):
            record = replace(record, summary=PackedMapping(json_values(record.summary)))
        self._others.append(record)
        return record

    def graph_ended(self, graph: int) -> None:
        """No more is expected of this graph: drop what only its compile needs."""
        self._texts.forget(graph)

    def __bool__(self) -> bool:
        return bool(self._others)

    def __iter__(self) -> Iterator[Record]:
        """Every record; the rows of a table come out as they are asked for."""
        events, place = self._events, 0
        for number, record in enumerate(self._others):
            while place < len(events) and events.before(place) <= number:
                yield events[place]
                place += 1
            yield record
        yield from (events[rest] for rest in range(place, len(events)))

    def nbytes(self) -> dict[str, int]:
        """Bytes of ``rows``, ``events`` and the numbering of ``texts``; the texts themselves are not counted."""
        tables = [r.rows for r in self._others if isinstance(r, (CapturedRecord, FinishRecord))]
        return {
            "rows": sum(table.nbytes() for table in tables if isinstance(table, PackedRows)),
            "events": self._events.nbytes(),
            "texts": self._texts.nbytes(),
        }
