"""Is everything written down whole, and said once?"""

from __future__ import annotations

import json
import logging
import math
import os
import threading
from pathlib import Path

import pytest

from collective_identity import codes
from collective_identity.ledger import Expectation, ExpectedRow
from collective_identity.reporting import read_run
from collective_identity.reporting.jsonl import RankWriter, encode, read_rank
from collective_identity.reporting.records import (
    KINDS,
    BadRecord,
    CapturedRecord,
    EndRecord,
    EventRecord,
    GraphRecord,
    RunRecord,
    from_json,
    to_json,
)
from tests.unit.rows import add_step, expectation, gathers, ledger, row

LOG = "collective_identity.ledger"


def test_records_of_every_kind_come_back_from_disk_as_they_were(tmp_path: Path) -> None:
    book = ledger(str(tmp_path))
    book.declare(expectation())
    add_step(book)
    log = book.begin_graph("inference", "1/0", "inductor")
    log.event(codes.DROPPED_MIXED, node="n", role="fsdp.param_unshard", pass_name="dedup", detail="ä\nü")
    log.agree((), tag="t")
    log.finish((row(0, params=None, param_group=None),), cached=True, lite="full")
    book.close()
    (read,) = read_run(tmp_path)
    assert read.records == book.records()
    lines = [json.loads(line) for line in (tmp_path / "rank0.jsonl").read_text().splitlines()]
    assert {line["kind"] for line in lines} == set(KINDS)
    assert all(line["schema"] == 1 for line in lines)


def test_a_warning_is_said_once_per_code_and_node_of_a_graph(caplog: pytest.LogCaptureFixture) -> None:
    book = ledger()
    with caplog.at_level(logging.WARNING, logger=LOG):
        for name in ("0/0", "0/1"):
            log = book.begin_graph("forward", name, "inductor")
            for node in ("a", "a", "b"):
                log.event(codes.ROLE_TRANSPORT, node=node, role="fsdp.param_unshard", detail="on all_reduce")
    assert len(caplog.records) == 4
    text = caplog.records[0].getMessage()
    for part in (
        "CI006",
        "role_transport",
        "node a of forward graph 0/0",
        "fsdp.param_unshard",
        "on all_reduce",
    ):
        assert part in text
    assert codes.ROLE_TRANSPORT.remedy in text
    assert sum(isinstance(record, EventRecord) for record in book.records()) == 4


def test_events_without_a_node_are_told_apart_by_pass_and_detail() -> None:
    book = ledger()
    log = book.begin_graph("forward", "0/0", "inductor")
    for pass_name in ("bucket", "dedup", "bucket"):
        log.event(codes.LITE_SKIPPED, pass_name=pass_name)
    for _ in range(2):
        book.event(codes.NOT_CAPTURED, detail="module head")
    assert [r.pass_name for r in book.records() if isinstance(r, EventRecord)] == ["bucket", "dedup", None]


def test_levels_one_info_line_a_compile_details_at_debug(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG, logger=LOG):
        log = ledger().begin_graph("forward", "0/0", "inductor")
        log.captured(gathers())
        log.event(codes.MOVED_PAYLOAD, node="cast")
        log.pass_ran("bucket", 0.5, True, {"fsdp.param_unshard": 6}, {"fsdp.param_unshard": 3}, {"buckets": 3})
        log.finish(gathers(1), compile_seconds=2.0)
    infos = [r.getMessage() for r in caplog.records if r.levelno == logging.INFO]
    assert infos == [
        "forward graph 0/0: captured 6 fsdp.param_unshard explicit, now 3 fsdp.param_unshard explicit, "
        "passes 0.500 s of 2.00 s"
    ]
    debug = [r.getMessage() for r in caplog.records if r.levelno == logging.DEBUG and r.name == LOG]
    assert len(debug) == 3 and any("pass bucket changed the graph" in text for text in debug)
    assert not [r for r in caplog.records if r.levelno > logging.INFO]


def test_rows_speak_for_losses_that_no_pass_reported(caplog: pytest.LogCaptureFixture) -> None:
    book = ledger()
    log = book.begin_graph("forward", "0/0", "inductor")
    bad = row(0, role=None, source=None, absence="malformed", code="CI001")
    with caplog.at_level(logging.WARNING, logger=LOG):
        log.captured((bad, row(1, role=None, source=None, absence="never_had")))
        log.finish((bad, row(2, role=None, source=None, absence="dropped", code="CI030")))
    events = [record for record in book.records() if isinstance(record, EventRecord)]
    assert [(event.code, event.node) for event in events] == [("CI001", bad.node), ("CI030", row(2).node)]
    assert len(caplog.records) == 2


def test_an_unknown_kind_of_graph_is_refused() -> None:
    with pytest.raises(ValueError, match="expected one of joint, forward, backward, inference, step, found 'train'"):
        ledger().begin_graph("train", "0/0", "inductor")  # type: ignore[arg-type]


def test_threads_write_whole_lines(tmp_path: Path) -> None:
    book = ledger(str(tmp_path))

    def work(name: str) -> None:
        log = book.begin_graph("forward", name, "inductor")
        for i in range(50):
            log.event(codes.MOVED_PAYLOAD, node=f"n{i}", detail="x" * 500)
        log.finish(gathers())

    threads = [threading.Thread(target=work, args=(str(i),)) for i in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    book.close()
    (read,) = read_run(tmp_path)
    assert not read.damaged
    assert sorted(map(repr, read.records)) == sorted(map(repr, book.records()))
    numbers = [record.graph for record in read.records if isinstance(record, GraphRecord)]
    assert sorted(numbers) == list(range(6))


def test_a_full_disk_costs_the_records_not_the_run(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    writer = RankWriter(tmp_path, 0)
    record = GraphRecord(0, "forward", "0/0", "inductor")
    writer.write(record)
    assert writer._fd is not None
    os.close(writer._fd)
    writer._fd = os.open("/dev/full", os.O_WRONLY)
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            writer.write(record)
    assert len(caplog.records) == 1 and "writing failed" in caplog.text
    assert read_rank(tmp_path / "rank0.jsonl", 0).records == (record,)


def test_what_json_cannot_hold_is_left_out_and_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    book = ledger(str(tmp_path))
    with caplog.at_level(logging.WARNING):
        book.begin_graph("forward", "0/0", "inductor").pass_ran("p", math.nan, False, {}, {}, {"o": object()})
    book.close()
    assert "left out" in caplog.text
    assert [type(r) for r in read_run(tmp_path)[0].records] == [RunRecord, GraphRecord, EndRecord]


def test_a_run_folder_that_vanishes_costs_the_file_only(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").write_text("")
    book = ledger(str(tmp_path / "file"))
    with caplog.at_level(logging.WARNING, logger=LOG):
        book.begin_graph("forward", "0/0", "inductor").finish(())
    assert "no run file" in caplog.text and len(book.records()) == 3


@pytest.mark.parametrize(
    ("line", "text"),
    [
        ([], "expected a JSON object, found list"),
        ({"schema": 2, "kind": "graph"}, "expected schema 1, found 2"),
        ({"schema": 1, "kind": "grph"}, "expected a kind out of"),
        ({"schema": 1, "kind": "graph", "graph": 0}, "the field 'phase' is missing"),
        (
            {"schema": 1, "kind": "graph", "graph": True, "phase": "forward", "name": "", "backend": ""},
            "expected 'graph' to be",
        ),
        (
            {"schema": 1, "kind": "captured", "graph": 0, "rows": [{}]},
            "captured.rows: the field 'index' is missing",
        ),
        ({"schema": 1, "kind": "captured", "graph": 0, "rows": [3]}, "expected 'rows' to be"),
        ({"schema": 1, "kind": "captured", "graph": 0, "rows": "ab"}, "expected 'rows' to be"),
        (
            {
                "schema": 1,
                "kind": "captured",
                "graph": 0,
                "rows": [{**to_json(CapturedRecord(0, gathers()))["rows"][0], "params": "w"}],
            },
            "expected 'params' to be",
        ),
        ({"schema": 1, "kind": "expected", "model": "m", "world": "w", "rows": []}, "expected 'world' to be"),
    ],
)
def test_lines_of_another_make_are_refused_with_what_was_expected(line: object, text: str) -> None:
    with pytest.raises(BadRecord, match=text):
        from_json(line)


def test_a_field_added_later_is_ignored_and_an_optional_one_may_be_absent() -> None:
    record = CapturedRecord(0, gathers())
    assert from_json({**to_json(record), "new": 1}) == record
    minimal = {"schema": 1, "kind": "finish", "graph": 0, "rows": []}
    assert to_json(from_json(minimal))["lite"] == "off"


def test_one_record_is_one_line() -> None:
    record = EventRecord(None, "CI001", "s", "warning", "t", "r", detail="two\nlines\u2028here")
    line = encode(record)
    assert line.endswith(b"\n") and line.count(b"\n") == 1
    assert from_json(json.loads(line)) == record


def test_an_expectation_is_a_value() -> None:
    assert Expectation("Net", {}, (ExpectedRow("fsdp.param_unshard", "forward", count=2),)) == Expectation(
        "Net", {}, (ExpectedRow("fsdp.param_unshard", "forward", None, None, 2, None),)
    )
