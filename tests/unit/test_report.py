"""Does the report count a step, not the sum of compiles, and never take one absence for another?"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from collective_identity import GRAD_REDUCE_SHARD, GRAD_REPLICATE_REDUCE, PARAM_UNSHARD, codes
from collective_identity.agreement import RanksDisagree
from collective_identity.ledger import Expectation, ExpectedRow, Ledger
from collective_identity.reporting import Report, build_report
from collective_identity.reporting.jsonl import RankLog, write_run
from collective_identity.reporting.records import AgreementRecord, Record, RunRecord
from collective_identity.reporting.terminal import render, render_text
from collective_identity.session import report as report_of
from tests.unit.rows import GROUPS, add_step, backward_rows, expectation, gathers, ledger, reduces, row

FULL = {"forward": 6, "regather": 6, "backward": 0}


def build(book: Ledger) -> Report:
    return build_report((book.rank_log(),), folder=False)


def cell(report: Report, role: str, phase: str) -> Any:
    (found,) = [r for r in report.ranks[0].coverage.rows if (r.role, r.phase) == (role, phase)]
    return found


def declared() -> Ledger:
    book = ledger()
    book.declare(expectation())
    return book


def test_a_good_step_is_ok_and_counted_by_role_and_phase() -> None:
    book = declared()
    add_step(book)
    data = build(book).to_dict()
    assert data["ok"] and data["failures"] == [] and data["notes"] == []
    assert data["collectives"] == {
        "expected": {PARAM_UNSHARD: FULL, GRAD_REDUCE_SHARD: {"forward": 0, "regather": 0, "backward": 6}},
        "captured": {PARAM_UNSHARD: FULL, GRAD_REDUCE_SHARD: {"forward": 0, "regather": 0, "backward": 6}},
        "before_bucketing": {PARAM_UNSHARD: 12, GRAD_REDUCE_SHARD: 6},
        "after_bucketing": {PARAM_UNSHARD: 6, GRAD_REDUCE_SHARD: 3},
    }
    assert data["counts"] == {
        "explicit": 18,
        "inferred": 0,
        "malformed": 0,
        "dropped": 0,
        "not_captured": 0,
        "other": 0,
    }
    assert data["seconds"] == {"compile": 5.0, "passes": 0.25}
    assert data["coverage"][0]["buckets_expected"] == 3
    assert json.loads(json.dumps(data)) == data


def test_recompiles_and_evaluation_are_not_added_up() -> None:
    book = declared()
    for name in ("0/0", "0/1", "0/2"):
        add_step(book, name)
    log = book.begin_graph("inference", "0/3", "inductor")
    log.captured(gathers())
    log.finish(gathers(1))
    report = build(book)
    assert report.ok, report.failures
    assert cell(report, PARAM_UNSHARD, "forward").captured == 6
    assert report.ranks[0].coverage.steps == 4


def test_one_bad_recompile_among_good_ones_is_the_step_shown() -> None:
    book = declared()
    add_step(book, "0/0")
    add_step(book, "0/1", forward=gathers()[1:])
    add_step(book, "0/2")
    report = build(book)
    assert len(report.failures) == 1 and "step 0/1" in report.failures[0]
    found = cell(report, PARAM_UNSHARD, "forward")
    assert (found.expected, found.captured, found.not_captured) == (6, 5, 1)


def test_what_is_missing_is_named_by_its_parameter_group() -> None:
    book = declared()
    add_step(book, forward=tuple(r for r in gathers() if r.param_group != "layers.1"))
    (failure,) = build(book).failures
    assert "fsdp.param_unshard, forward: expected 6 explicit, found 4 captured" in failure
    assert "layers.1: 2 expected, 0 captured" in failure and "layers.0" not in failure


def replaced(index: int, **changes: Any) -> Callable[[], tuple[Any, ...]]:
    return lambda: tuple(dataclasses.replace(r, **changes) if r.index == index else r for r in gathers())


ABSENCES: dict[str, tuple[Callable[[], tuple[Any, ...]], dict[str, Any]]] = {
    "not captured": (lambda: gathers()[:-1], {"captured": 5, "explicit": 5, "not_captured": 1}),
    "inferred": (
        replaced(5, source="inferred", absence="never_had"),
        {"captured": 6, "explicit": 5, "inferred": 1, "not_captured": 0},
    ),
    "malformed": (
        replaced(5, role=None, source=None, absence="malformed", code="CI001"),
        {"captured": 5, "malformed": 1, "not_captured": 0},
    ),
    "malformed, structure stands in": (
        replaced(5, source="inferred", absence="malformed", code="CI006"),
        {"captured": 6, "explicit": 5, "inferred": 1, "malformed": 1, "not_captured": 0},
    ),
    "payload removed": (
        replaced(5, role=None, source=None, absence="never_had"),
        {"captured": 5, "unlabelled": 1, "malformed": 0, "not_captured": 0},
    ),
    "dropped": (
        replaced(5, role=None, source=None, absence="dropped", code="CI030"),
        {"captured": 5, "dropped": {"CI030": 1}, "not_captured": 0},
    ),
    "mislabelled": (replaced(5, role="tp.gather"), {"captured": 5, "explicit": 5, "not_captured": 1}),
}


@pytest.mark.parametrize("name", ABSENCES)
def test_kinds_of_absence_are_never_confused(name: str) -> None:
    rows, values = ABSENCES[name]
    book = declared()
    add_step(book, forward=rows())
    report = build(book)
    found = cell(report, PARAM_UNSHARD, "forward")
    expected = {"inferred": 0, "malformed": 0, "unlabelled": 0, "dropped": {}, **values}
    assert {key: getattr(found, key) for key in expected} == expected
    assert len(report.failures) == 1 and codes.EXPECTED_MISMATCH.id in report.failures[0]
    assert not report.ok


@pytest.mark.parametrize("source", ["explicit", "inferred"])
def test_more_than_declared_is_a_note(source: str) -> None:
    """A module that runs twice gathers twice, and rightly so."""
    book = declared()
    add_step(book, forward=(*gathers(), row(6, param_group="layers.1", source=source)))
    report = build(book)
    assert report.ok and cell(report, PARAM_UNSHARD, "forward").captured == 7
    assert any("7 captured" in note and "calls for 6" in note for note in report.notes)


def test_a_collective_that_looks_like_an_undeclared_role_is_a_note() -> None:
    """A loss all-reduce on the shard group of a one-dimensional mesh."""
    book = declared()
    one = row(9, role=GRAD_REPLICATE_REDUCE, transport="all_reduce", source="inferred", param_group=None)
    add_step(book, backward=(*backward_rows(), one))
    report = build(book)
    assert report.ok and any("fsdp.grad_replicate_reduce" in note for note in report.notes)


def test_a_true_hole_beside_a_malformed_one_is_still_counted() -> None:
    book = declared()
    rows = replaced(5, source="inferred", absence="malformed", code="CI006")()
    add_step(book, forward=rows[1:])
    assert cell(build(book), PARAM_UNSHARD, "forward").not_captured == 1


def test_every_payload_gone_and_no_structure_is_not_called_uncaptured() -> None:
    book = declared()
    bare: dict[str, Any] = {"role": None, "source": None, "absence": "never_had", "param_group": None}
    strip = tuple(dataclasses.replace(r, **bare) for r in backward_rows())
    add_step(book, forward=tuple(dataclasses.replace(r, **bare) for r in gathers()), backward=strip)
    report = build(book)
    assert len(report.failures) == 3 and all("6 without a payload" in text for text in report.failures)
    assert report.ranks[0].counts["not_captured"] == 0


def test_an_eager_model_is_not_captured() -> None:
    book = declared()
    log = book.begin_graph("forward", "0/0", "inductor")
    log.captured(())
    log.finish(())
    report = build(book)
    assert len(report.failures) == 1 and report.failures[0].startswith(codes.NOT_CAPTURED.id)
    assert report.ranks[0].counts["not_captured"] == 18
    assert report.faults(["not_captured"]) and not report.faults(["lost", "malformed", "conflict"])


def test_from_cache_is_unknown_not_a_failure() -> None:
    book = declared()
    book.begin_graph("forward", "0/0", "inductor").finish((), cached=True)
    report = build(book)
    assert report.ok
    found = cell(report, PARAM_UNSHARD, "forward")
    assert (found.expected, found.captured, found.not_captured, found.after) == (6, None, None, None)
    assert any("from cache" in note for note in report.notes)
    assert report.to_dict()["collectives"]["captured"][PARAM_UNSHARD]["forward"] is None
    assert report.to_dict()["graphs"][0]["captured"] is None


def test_a_cached_graph_that_held_no_collective_is_known() -> None:
    """The forward of a replicated model: nothing was captured, so nothing is left, and the backward can be compared."""
    book = declared()
    log = book.begin_graph("forward", "0/0", "inductor")
    log.captured(())
    log.finish((), cached=True)
    assert build(book).to_dict()["graphs"][0]["after"] == {}
    assert build(book).to_dict()["graphs"][0]["captured"] == {}


def test_forward_from_cache_leaves_the_backward_comparable() -> None:
    book = declared()
    book.begin_graph("forward", "0/0", "inductor").finish((), cached=True)
    log = book.begin_graph("backward", "0/0", "inductor")
    log.captured(backward_rows()[1:])
    log.finish(backward_rows(1))
    report = build(book)
    assert [("regather" in text) for text in report.failures] == [True]
    assert cell(report, PARAM_UNSHARD, "forward").captured is None


def test_a_cached_graph_whose_artifact_kept_its_rows_is_compared() -> None:
    book = declared()
    add_step(book)
    assert build(book).ok
    book.begin_graph("forward", "0/1", "inductor").finish(gathers()[1:], cached=True)
    assert not build(book).ok


def test_a_backward_that_was_not_compiled_yet_is_unknown() -> None:
    book = declared()
    log = book.begin_graph("forward", "0/0", "inductor")
    log.captured(gathers())
    log.finish(gathers(1))
    report = build(book)
    assert report.ok
    assert cell(report, GRAD_REDUCE_SHARD, "backward").captured is None


def test_a_joint_graph_stands_for_both_halves_and_never_counts_twice() -> None:
    book = declared()
    log = book.begin_graph("joint", "0/0", "inductor")
    log.captured((*gathers(), *backward_rows()))
    log.finish((*gathers(), *backward_rows()))
    assert build(book).ok
    assert cell(build(book), PARAM_UNSHARD, "regather").captured == 6
    add_step(book)
    report = build(book)
    assert report.ok and report.ranks[0].coverage.steps == 1
    assert cell(report, PARAM_UNSHARD, "forward").after == 3


def test_a_model_split_over_two_graphs_is_compared_as_a_whole() -> None:
    book = declared()
    halves = [tuple(r for r in gathers() if (r.param_group == "layers.1") == last) for last in (False, True)]
    for name, half in zip(("0/0", "1/0"), halves, strict=True):
        keep = {r.param_group for r in half}
        add_step(
            book, name, forward=half, backward=tuple(r for r in backward_rows() if r.param_group in keep)
        )
    report = build(book)
    assert report.ok, report.failures
    assert cell(report, PARAM_UNSHARD, "forward").captured == 6


def test_two_models_each_have_their_declaration() -> None:
    book = ledger()
    book.declare(expectation("A"))
    book.declare(expectation("A"))  # again: replaces
    book.declare(expectation("B"))
    add_step(book, "0/0")
    assert [text.split(": ")[1] for text in build(book).failures] == ["B"]
    add_step(book, "1/0")
    report = build(book)
    assert report.ok, report.failures
    assert cell(report, PARAM_UNSHARD, "forward").expected == 12


def test_a_declaration_without_rows_takes_an_earlier_one_back() -> None:
    """A part that became one of a larger model, which declares the whole."""
    book = ledger()
    book.declare(expectation("part"))
    book.declare(Expectation("part", {}, ()))
    book.declare(expectation("whole"))
    add_step(book, "0/0")
    report = build(book)
    assert report.ok, report.failures
    assert cell(report, PARAM_UNSHARD, "forward").expected == 6


def test_an_unknown_expected_count_is_compared_with_nothing() -> None:
    book = ledger()
    rows = tuple(
        dataclasses.replace(r, count=None) if r.param_group == "layers.0" else r for r in expectation().rows
    )
    book.declare(dataclasses.replace(expectation(), rows=rows))
    add_step(book, forward=gathers()[:2])
    report = build(book)
    assert report.ok and cell(report, PARAM_UNSHARD, "forward").expected is None


def test_a_unit_that_is_never_gathered_again_is_a_note_where_the_number_is_open() -> None:
    """What backward needs is not known when a model is installed; that a unit lost all of it can be seen."""
    book = ledger()
    rows = [dataclasses.replace(r, count=None) if r.phase == "regather" else r for r in expectation().rows]
    book.declare(dataclasses.replace(expectation(), rows=tuple(rows)))
    kept = tuple(r for r in backward_rows() if r.transport != "all_gather" or r.param_group != "layers.1")
    add_step(book, backward=kept)
    report = build(book)
    (note,) = report.notes
    assert report.ok and note.startswith("step 0/0, fsdp.param_unshard, regather: layers.1: resharded after")
    assert "?: re-gathers are one for each parameter whose value backward needs" in render_text(report)


def test_an_unexpected_role_is_a_failure() -> None:
    book = ledger()
    one = (ExpectedRow(PARAM_UNSHARD, "forward", name, None, 2, 1) for name in GROUPS)
    book.declare(dataclasses.replace(expectation(), rows=tuple(one)))
    add_step(book, backward=reduces())
    (failure,) = build(book).failures
    assert "fsdp.grad_reduce_shard, backward: expected 0 explicit, found 6 captured" in failure


def test_without_a_declaration_there_is_nothing_to_fail() -> None:
    book = ledger()
    add_step(book, forward=gathers(source="inferred"))
    report = build(book)
    assert report.ok and cell(report, PARAM_UNSHARD, "forward").expected is None
    assert cell(report, PARAM_UNSHARD, "forward").inferred == 6
    assert any("no producer declared" in note for note in report.notes)


def test_other_collectives_are_counted_by_role_and_never_as_fsdp() -> None:
    book = declared()
    others = (
        row(6, role="tp.activation_gather", group="1"),
        row(7, node="ar", transport="all_reduce", role=None, source=None, absence="never_had", group="1"),
    )
    add_step(book, forward=(*gathers(), *others))
    data = build(book).to_dict()
    assert data["ok"] and data["counts"]["other"] == 2
    assert data["other"] == {"tp.activation_gather": 1, "(all_reduce)": 1}


def test_losses_are_counted_by_code_over_every_graph() -> None:
    book = declared()
    for name in ("0/0", "0/1"):
        log = book.begin_graph("forward", name, "inductor")
        log.captured(gathers())
        log.event(codes.DROPPED_MIXED, node="bucket_0", role=PARAM_UNSHARD, pass_name="upstream")
        log.event(codes.STRUCTURE_MISMATCH, node="all_gather_into_tensor_1")
        lost = row(9, node="bucket_0", role=None, source=None, absence="dropped", code="CI030")
        log.finish((*gathers(1), lost))
    report = build(book)
    assert report.ranks[0].counts["dropped"] == 2
    assert cell(report, PARAM_UNSHARD, "forward").dropped == {"CI030": 1}
    by_code = {warned["code"]: warned for warned in report.to_dict()["warnings"]}
    assert by_code["CI030"]["count"] == by_code["CI020"]["count"] == 2
    assert by_code["CI030"]["examples"][0] == {
        "graph": "forward 0/0",
        "node": "bucket_0",
        "role": PARAM_UNSHARD,
        "pass": "upstream",
        "detail": "",
        "params": None,
        "stack": None,
    }
    assert len(report.faults(["lost"])) == len(report.faults(["conflict"])) == 2
    with pytest.raises(ValueError, match="found 'everything'"):
        report.faults(["everything"])


def test_failed_and_unfinished_compiles_are_said() -> None:
    book = ledger()
    book.begin_graph("forward", "0/0", "inductor").failed(ValueError("no such op"))
    book.begin_graph("forward", "0/1", "inductor")
    report = build(book)
    assert report.failures == (
        "forward graph 0/0: the compile failed: ValueError: no such op",
        "forward graph 0/1: its compile did not end, or its record was cut off",
    )
    assert [graph["state"] for graph in report.to_dict()["graphs"]] == ["failed", "unfinished"]


def test_a_joint_graph_that_only_carries_passes_is_neither_unfinished_nor_counted() -> None:
    book = declared()
    book.begin_graph("joint", "0/0", "inductor").pass_ran("reshard", 0.5, True, {}, {}, {})
    add_step(book)
    report = build(book)
    assert report.ok and report.notes == () and report.ranks[0].seconds["passes"] == 0.75
    assert report.to_dict()["graphs"][0]["state"] == "passes only"


def test_two_lazy_backwards_of_one_name_find_a_forward_each() -> None:
    book = declared()
    for phase, before in (("forward", gathers()), ("backward", backward_rows())):
        for _ in range(2):
            log = book.begin_graph(phase, "0/0", "inductor")  # type: ignore[arg-type]
            log.captured(before)
            log.finish(before)
    report = build(book)
    assert report.ok and report.ranks[0].coverage.steps == 2
    assert all(row.captured == row.expected for row in report.ranks[0].coverage.rows)
    book.begin_graph("backward", "0/0", "inductor").finish(())
    assert "0/0: only its backward was seen" in build(book).notes


def test_more_collectives_than_natural_buckets_is_a_note() -> None:
    book = declared()
    log = book.begin_graph("inference", "0/0", "inductor")
    log.captured(gathers())
    log.finish(gathers())
    report = build(book)
    assert report.ok and "6 after the passes, 3 natural buckets" in report.notes[0]


def test_the_worst_agreement_speaks() -> None:
    book = ledger()
    for status in ("agreed", "timeout", "off"):
        log = book.begin_graph("forward", status, "inductor")
        log.finish(())
        book._add(AgreementRecord(log.number, status, "ranks [1] did not publish this graph in time"))
    report = build(book)
    assert report.agreement == "timeout" and report.ok
    assert any("not compared with every rank: ranks [1]" in note for note in report.notes)
    error = RanksDisagree(
        rank=0, peer=1, graph="forward graph x", group="0", position=2, field="role", mine="a", theirs="b"
    )
    log = book.begin_graph("forward", "x", "inductor")
    log.finish(())
    book._add(AgreementRecord(log.number, "differs", str(error)))
    log.event(codes.RANKS_DISAGREE, detail=str(error))
    report = build(book)
    assert (
        report.agreement == "differs" and len(report.failures) == 1 and "collective 2" in report.failures[0]
    )


def run_record(rank: int, ranks: int, *, restart: int = 0, started: float = 1.0) -> RunRecord:
    return RunRecord(rank, ranks, "optimize", "r", restart, "host", 1, started, "2.13.0", "0")


def records(run: RunRecord, book: Ledger) -> tuple[Record, ...]:
    return (run, *book.records()[1:])


def test_every_rank_can_fail_the_run(tmp_path: Path) -> None:
    good, bad = declared(), declared()
    add_step(good)
    add_step(bad, forward=gathers()[1:])
    for rank, book in enumerate((good, bad)):
        write_run(tmp_path, rank, records(run_record(rank, 2), book))
    report = report_of(tmp_path)
    assert not report.ok and report.failures[0].startswith("rank 1: CI052")
    data = report.to_dict()
    assert (data["rank"], data["ranks"]) == (0, 2)
    assert [rank["ok"] for rank in data["by_rank"]] == [True, False]


def test_files_of_an_earlier_start_and_missing_ranks_are_said() -> None:
    book = declared()
    add_step(book)
    logs = [
        RankLog(0, records(run_record(0, 3, restart=1, started=9.0), book)),
        RankLog(1, records(run_record(1, 4), book)),
        RankLog(2, records(run_record(2, 3, restart=1, started=9.0), book)),
        RankLog(3, records(run_record(3, 4), book)),
    ]
    report = build_report(logs)
    assert [rank.rank for rank in report.ranks] == [0, 2]
    assert any("ranks [1, 3] are of an earlier start" in note for note in report.notes)
    assert any("ranks [1] of 3 left no readable file" in failure for failure in report.failures)
    report = build_report([logs[0]])
    assert any("ranks [1, 2] of 3 left no readable file" in failure for failure in report.failures)
    assert build_report([logs[0]], folder=False).ok


def test_the_terminal_shows_the_tables_without_colour_where_there_is_none(
    capsys: pytest.CaptureFixture[str],
) -> None:
    book = declared()
    add_step(book, forward=gathers()[1:])
    log = book.begin_graph("forward", "1/0", "inductor")
    log.event(codes.DROPPED_MIXED, node="bucket_[0]", pass_name="upstream")
    log.finish((), cached=True, lite="full")
    report = build(book)
    text = render_text(report)
    for part in (
        "NOT OK",
        "fsdp.param_unshard",
        "regather",
        "from cache",
        "lite full",
        "CI030",
        "bucket_[0]",
    ):
        assert part in text, part
    assert "Failures" in text and "expected 6 explicit" in text
    render(report)
    out = capsys.readouterr().out
    assert "\x1b[" not in out and "fsdp.param_unshard" in out
