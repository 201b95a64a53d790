"""Do columns give back what went in, and are they as small as docs/diagnostics.md says?"""

from __future__ import annotations

import dataclasses
import json
import tracemalloc

import pytest
from hypothesis import given
from hypothesis import strategies as st

from collective_identity import GRAD_REDUCE_SHARD, codes
from collective_identity.columns import PackedRows, Texts
from collective_identity.digest import CollectiveRow
from collective_identity.reporting.records import CapturedRecord, EventRecord, FinishRecord, GraphRecord, PassRecord
from collective_identity.storage import Storage
from tests.unit.rows import row

MANY = 30_000
"""What a collective takes does not grow with their number; `python -m benchmarks diagnostics` takes 100,000."""

_TEXT = st.none() | st.text(max_size=3)
_NAMES = st.none() | st.lists(st.text(max_size=3), max_size=3).map(tuple)
ROWS = st.builds(
    row,
    st.integers(0, 2**31 - 1),
    node=st.text(max_size=3),
    role=_TEXT,
    group_size=st.none() | st.integers(1, 10**5),
    numel=st.none() | st.integers(0, 2**60),
    nbytes=st.none() | st.integers(0, 2**62),
    params=_NAMES,
    members=_NAMES,
    param_group=_TEXT,
    backward=st.booleans(),
)


@given(st.lists(ROWS, max_size=6), st.lists(ROWS, max_size=6))
def test_rows_come_back_as_they_were(first: list[CollectiveRow], second: list[CollectiveRow]) -> None:
    texts = Texts()
    packed = [PackedRows(rows, texts, graph) for graph, rows in enumerate((first, second))]
    texts.forget(0)
    packed.append(PackedRows(first, texts, 0))
    assert packed[0] == first and packed[1] == tuple(second) and packed[2] == packed[0]
    assert tuple(packed[1]) == tuple(second) and list(reversed(packed[1])) == second[::-1]
    assert packed[0][1:3] == tuple(first[1:3]) and (not first or packed[0][-1] == first[-1])
    if first:
        assert packed[0] != [*first[1:], dataclasses.replace(first[0], node="another node")] and packed[0] != first[1:]


def event(graph: int | None, detail: str = "", **changes: object) -> EventRecord:
    code = codes.MOVED_PAYLOAD
    made = EventRecord(graph, code.id, code.slug, code.severity, code.text, code.remedy, detail=detail)
    return dataclasses.replace(made, **changes)  # type: ignore[arg-type]


def test_records_keep_their_order() -> None:
    records = [
        event(None, "before all"),
        GraphRecord(0, "forward", "0/0", "x"),
        event(0, node="n", role="r", params=("a.w",), stack="model.py:3 in forward"),
        event(0, node="n", pass_name="p"),
        PassRecord(0, "p", 0.5, True, {"r": 2}, {"r": 1}, {"buckets": [{"members": ["a", "b"]}]}),
        FinishRecord(0, (row(0, members=("a", "b")),), cached=True),
        event(None, "last"),
    ]
    store = Storage()
    assert not store
    for record in records[1:]:
        store.append(record)
    assert store and list(store) == records[1:]
    store = Storage()
    for record in records:
        store.append(record)
    assert list(store) == records
    (summary,) = (record.summary for record in store if isinstance(record, PassRecord))
    assert json.loads(repr(dict(summary)).replace("'", '"')) == {"buckets": [{"members": ["a", "b"]}]}


def tables() -> tuple[list[CollectiveRow], list[CollectiveRow]]:
    """A step of MANY collectives in two graphs, each of a parameter of its own."""
    third = MANY // 3
    gathers = [
        row(
            i,
            node=f"all_gather_into_tensor_{i}",
            params=(f"layers.{i // 8}.attention.weight_{i % 8}",),
            param_group=f"layers.{i // 8}",
        )
        for i in range(third)
    ]
    again = [dataclasses.replace(one, node=one.node + "_again", backward=True) for one in gathers]
    reduced = [
        dataclasses.replace(one, node=f"reduce_scatter_tensor_{i}", role=GRAD_REDUCE_SHARD, transport="reduce_scatter")
        for i, one in enumerate(again)
    ]
    return gathers, [*again, *reduced]


def filled(graphs: tuple[list[CollectiveRow], ...]) -> Storage:
    """Each table captured, and left as it is by the passes."""
    store = Storage()
    for number, rows in enumerate(graphs):
        store.append(CapturedRecord(number, rows))
        store.append(FinishRecord(number, rows))
        store.graph_ended(number)
    return store


def test_a_collective_takes_at_most_200_bytes_and_an_event_32() -> None:
    store = filled(tables())
    before = store.nbytes()
    assert (before["rows"] + before["texts"]) / MANY <= 200, before
    for number in range(MANY):  # each of a node, parameter and detail of its own
        params, detail = (f"layers.{number // 8}.weight_{number % 8}",), f"from wait_tensor_{number} to n{number}"
        store.append(event(2, node=f"n{number}", params=params, stack=f"model.py:{number % 90} in f", detail=detail))
    store.graph_ended(2)
    after = store.nbytes()
    assert (after["events"] + after["texts"] - before["events"] - before["texts"]) / MANY <= 32, after


def test_events_come_back_across_chunks_whichever_is_asked_for() -> None:
    store = Storage()
    store.append(GraphRecord(0, "forward", "0/0", "x"))
    many = [
        event(n % 3 or None, node=f"n{n}", params=(f"p{n}",) * (n % 2), detail="\udcff" * (n % 5)) for n in range(700)
    ]
    for n, one in enumerate(many):
        store.append(one)
        if n in (255, 256, 600):
            store.append(GraphRecord(n, "forward", "0/0", "x"))
    kept = list(store)
    assert [record for record in kept if isinstance(record, EventRecord)] == many
    assert [i for i, record in enumerate(kept) if isinstance(record, GraphRecord)] == [0, 257, 259, 604]
    events = store._events
    assert [events[n] for n in (699, 0, 511, 512, 255, 256)] == [many[n] for n in (699, 0, 511, 512, 255, 256)]


def test_tracemalloc_finds_no_more() -> None:
    """Whatever stays allocated, the names and FQNs apart, which the rows given own here as a graph does."""
    given_rows = tables()
    filled(given_rows)  # imports and caches
    tracemalloc.start()
    try:
        store = filled(given_rows)
        held, _ = tracemalloc.get_traced_memory()
        for number in range(MANY):
            store.append(event(2, node=f"n{number}", params=(f"w_{number}",), detail=f"from {number}"))
        more = tracemalloc.get_traced_memory()[0] - held
    finally:
        tracemalloc.stop()
    assert 20 < held / MANY <= 200
    assert 5 < more / MANY <= 32
    assert sum(len(record.rows) for record in store if isinstance(record, FinishRecord)) == MANY


@pytest.mark.parametrize("value", ["text", 3, None])
def test_rows_equal_no_other_kind_of_value(value: object) -> None:
    assert PackedRows((), Texts(), 0) != value
