"""Is a rank whose file is missing, unreadable, of an earlier job or cut short named, and no other?"""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path

import pytest

from collective_identity import session
from collective_identity.ledger import Ledger
from collective_identity.reporting import Report, RunFolderError, build_report, read_run
from collective_identity.reporting.jsonl import RankLog, write_run
from collective_identity.reporting.records import AgreementRecord, Record, RunRecord
from tests.unit.rows import add_step, backward_rows, expectation, gathers, ledger, row


def run(rank: int, ranks: int = 2, *, started: float = 1e6, number: int | None = None) -> RunRecord:
    return RunRecord(rank, ranks, "optimize", "", 0, "host", rank, started, "2.13.0", "0", number)


def whole(group_size: int = 2) -> Ledger:
    book = ledger()
    book.declare(expectation())
    rows = [tuple(dataclasses.replace(r, group_size=group_size) for r in rows) for rows in (gathers(), backward_rows())]
    add_step(book, forward=rows[0], backward=rows[1])
    return book


def records(first: RunRecord, book: Ledger, end: int | None = None) -> tuple[Record, ...]:
    return (first, *book.records()[1:end])


def two(other: tuple[Record, ...], *, first: RunRecord | None = None, book: Ledger | None = None) -> Report:
    return build_report([RankLog(0, records(first or run(0), book or whole())), RankLog(1, other)])


def write(folder: Path) -> Path:
    for rank in (0, 1):
        write_run(folder, rank, records(run(rank), whole()))
    return folder / "rank1.jsonl"


@pytest.mark.parametrize("left", [b"", b'{"schema":1,"kind":"run","rank":1', b"\xff\xfe\n\x00\n", None])
def test_a_rank_whose_file_cannot_be_read_is_named_and_the_others_are_told(tmp_path: Path, left: bytes | None) -> None:
    file = write(tmp_path)
    file.unlink()
    if left is None:
        file.symlink_to("/proc/self/mem")  # its first byte cannot be read, by nobody
    else:
        file.write_bytes(left)
    report = build_report(read_run(tmp_path))
    (failure,) = report.failures
    assert failure.startswith("rank 1 left no readable record: ") and "rank1.jsonl" in failure
    assert [rank.rank for rank in report.ranks] == [0] and report.ranks[0].counts["explicit"] == 18


def test_a_folder_without_any_readable_record_is_no_run(tmp_path: Path) -> None:
    (tmp_path / "rank0.jsonl").write_bytes(b"")
    with pytest.raises(RunFolderError, match="rank0.jsonl: no readable line in it"):
        read_run(tmp_path)


def test_every_cut_of_a_ranks_file_is_seen(tmp_path: Path) -> None:
    file = write(tmp_path)
    text = file.read_bytes()
    assert build_report(read_run(tmp_path)).ok
    ends = [i + 1 for i, sign in enumerate(text) if sign == ord("\n")]
    for cut in (*ends[:-1], *range(0, len(text) - 1, 997)):
        file.write_bytes(text[:cut])
        failures = build_report(read_run(tmp_path)).failures
        assert failures and all(one.startswith("rank 1") for one in failures), (cut, failures)


def test_a_rank_without_graphs_or_without_a_phase_is_named() -> None:
    (none,) = [f for f in two(records(run(1), whole(), 2)).failures if "CI040" not in f]
    assert none.startswith("rank 1: no compiled graph, where rank 0 has 2")
    half = [i for i, r in enumerate(whole().records()) if getattr(r, "phase", "") == "backward"][0]
    (early,) = two(records(run(1), whole(), half)).failures
    assert early.startswith("rank 1: 0 backward graphs with collectives, where another rank has 1 that this one must")


def test_graphs_of_groups_that_not_all_ranks_are_in_may_differ_and_are_a_note() -> None:
    half = [i for i, r in enumerate(whole().records()) if getattr(r, "phase", "") == "backward"][0]
    report = build_report(
        [
            RankLog(0, records(run(0, 4), whole())),
            *(RankLog(rank, records(run(rank, 4), whole(), half)) for rank in (1, 2, 3)),
        ]
    )
    assert report.ok
    notes = [f"rank {rank}: 0 backward graphs with collectives, where another rank has 1" for rank in (1, 2, 3)]
    assert [note for note in report.notes if "where another" in note] == notes


def test_a_recompile_on_one_rank_is_a_note_unless_the_other_agreed_to_it() -> None:
    for status, ok in (("timeout", True), ("agreed", False)):
        more = whole()
        log = more.begin_graph("forward", "0/1", "inductor")
        log.captured(gathers())
        log.finish(gathers(1))
        for graph in (0, 2):
            more._add(AgreementRecord(graph, status, "with ranks [1]"))
        report = two(records(run(1), whole()), book=more)
        said = [t for t in (*report.failures, *report.notes) if "1 forward graphs with collectives, where another" in t]
        assert report.ok is ok and len(said) == 1 and said[0].startswith("rank 1: ")


def test_a_graph_from_a_cache_may_be_any() -> None:
    book = ledger()
    for kind in ("forward", "backward"):
        book.begin_graph(kind, "0/0", "inductor").finish((), cached=True)  # type: ignore[arg-type]
    assert two(records(run(1), book)).ok


@pytest.mark.parametrize(
    ("first", "second", "said"),
    [
        (run(0, started=1e6), run(1, started=1.0), "its session began 999999 s before rank 0's"),
        (run(0, number=2), run(1, number=1), "session 1 of its process, where other ranks have 2"),
        (run(0, 2), run(1, 3, started=1.0), "it says that the job has 3 ranks, rank 0 says 2"),
    ],
)
def test_a_section_of_an_earlier_job_or_session_is_named(first: RunRecord, second: RunRecord, said: str) -> None:
    failures = two(records(second, whole()), first=first).failures
    assert failures and all(f.startswith("rank 1: ") and "earlier job in this folder" in f for f in failures)
    assert any(said in failure for failure in failures)


def test_ranks_that_begin_some_minutes_apart_are_one_job() -> None:
    assert two(records(run(1, started=1e6 - 1000), whole()), first=run(0, number=2)).ok


def test_a_file_last_written_before_the_others_began_is_named(tmp_path: Path) -> None:
    file = write(tmp_path)
    os.utime(file, (1e6 - 100, 1e6 - 100))
    (failure,) = build_report(read_run(tmp_path)).failures
    assert failure.startswith("rank 1: its last record is 100 s older than rank 0's first; ")
    os.utime(file, (1e6 + 1, 1e6 + 1))
    assert build_report(read_run(tmp_path)).ok


def test_a_rank_that_left_fewer_sessions_is_a_note(tmp_path: Path) -> None:
    write(tmp_path)
    write_run(tmp_path, 0, records(run(0), whole()))
    report = build_report(read_run(tmp_path))
    assert report.ok and "rank 1 left 1 sessions, others 2" in report.notes


def test_a_run_line_that_cannot_be_read_does_not_join_two_sections(tmp_path: Path) -> None:
    file = write(tmp_path)
    lines = file.read_text().splitlines(keepends=True)
    file.write_text("".join(lines) + "{broken\n" + "".join(lines[2:]))
    _, log = logs = read_run(tmp_path)
    assert (log.sections, len(log.records)) == (2, len(lines) - 2)
    assert any("rank 1: its run line cannot be read" in failure for failure in build_report(logs).failures)


def test_a_hundred_million_missing_ranks_are_said_in_a_line() -> None:
    (failure,) = build_report([RankLog(n, records(run(n, 10**8), whole())) for n in (0, 2, 5, 7)]).failures
    assert failure == "ranks [1, 3, 4, 6, 8-99999999] of 100000000 left no readable file"


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ('"ranks":2', '"ranks":0', "expected 'ranks' to be 1 or more, found 0"),
        ('"ranks":2', '"ranks":-1', "expected 'ranks' to be 1 or more, found -1"),
        ('"ranks":2', f'"ranks":{"9" * 5000}', "Exceeds the limit"),
    ],
)
def test_a_damaged_run_line_is_a_failure_of_its_rank(tmp_path: Path, old: str, new: str, said: str) -> None:
    file = write(tmp_path)
    file.write_text(file.read_text().replace(old, new))
    report = build_report(read_run(tmp_path))
    assert [f for f in report.failures if f.startswith("rank 1: its run line cannot be read")]
    assert any(note.startswith("rank 1: line 1 is unreadable") and said in note for note in report.notes)


def test_half_a_surrogate_pair_becomes_a_question_mark(tmp_path: Path) -> None:
    book = ledger()
    log = book.begin_graph("forward", "a\udcff \U0001f600", "inductor")
    log.captured((row(0, group_size=1),))
    log.finish(())
    write_run(tmp_path, 0, records(run(0, 1), book))
    assert build_report(read_run(tmp_path)).ranks[0].graphs[0].name == "a? \U0001f600"


def test_sessions_of_a_process_are_numbered(tmp_path: Path) -> None:
    numbers = []
    for folder in ("a", "b"):
        session.ensure()  # an implicit one that the explicit one replaces is not another
        with session.enable(run_dir=tmp_path / folder):
            pass
        (log,) = read_run(tmp_path / folder)
        numbers.append(log.records[0].session)  # type: ignore[union-attr]
    assert numbers[1] == numbers[0] + 1
