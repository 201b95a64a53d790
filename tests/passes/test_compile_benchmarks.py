"""The benchmarks of compile seconds run on small models and graphs; no clock is asked."""

from __future__ import annotations

import pytest

from benchmarks import compile_time, passes
from benchmarks.compile_once import WAYS, Work, measure
from benchmarks.measure import too_fast
from benchmarks.models import Shape
from tests.unit.test_benchmarks import lines

PARAMETERS_OF_A_BLOCK, OTHERS = 9, 3  # of the model: embedding, norm, head


def test_every_way_compiles_the_same_collectives() -> None:
    work = Work(Shape(vocabulary=300, width=16, heads=4, layers=1))
    found = {way: measure(way, work, inner="aot_eager") for way in WAYS}
    for way in ("per_block", "whole"):
        assert found[way]["collectives"] == 0 and found[way]["ours_s"] == 0 and found[way]["passes_s"] is None
    gathered_once = PARAMETERS_OF_A_BLOCK + OTHERS
    for way in ("captured", "packed", "gathers"):  # gathered, gathered again in backward but the root's, reduced
        assert found[way]["collectives"] == 3 * gathered_once - OTHERS and found[way]["ok"], found[way]
        assert 0 < found[way]["passes_s"] and 0 < found[way]["ours_s"] < found[way]["python_s"]


def test_the_rows_of_one_number_of_blocks() -> None:
    def row(what: str, way: str, python_s: float, compiler_s: float, wall_s: float) -> dict[str, object]:
        ours = 0 if way == "per_block" else 0.5
        seconds = {"python_s": python_s, "compiler_s": compiler_s, "wall_s": wall_s}
        return {"what": what, "way": way, "blocks": 4, **seconds, "ours_s": ours, "passes_s": ours / 2 or None}

    rows = [row("cold", "per_block", 2, 3, 4), row("warm", "per_block", 1, 1.5, 1)]
    rows += [row("cold", "captured", 20, 5, 40), row("warm", "captured", 2.5, 0, 5), row("cold", "packed", 5, 5, 8)]
    found = compile_time.ratios(rows, clock=False)
    assert (found["captured_to_per_block"], found["packed_to_per_block"]) == (5, 2)
    assert (found["per_block_cold_to_warm"], found["captured_cold_to_warm"]) == (2, 10)
    assert (found["captured_ours_share"], found["packed_ours_share"]) == (0.02, 0.05)
    assert (found["captured_passes_share"], found["packed_passes_share"]) == (0.00625, 0.03125)
    by_clock = compile_time.ratios(rows, clock=True)
    assert (by_clock["captured_to_per_block"], by_clock["captured_cold_to_warm"]) == (10, 8)
    assert "per_block_ours_share" not in by_clock
    without = compile_time.ratios(rows[2:3], clock=False)
    assert set(without) == {"what", "blocks", "seconds", "captured_ours_share", "captured_passes_share"}


def test_growth_of_the_passes(capsys: pytest.CaptureFixture[str]) -> None:
    first, *rows = lines(passes, capsys, "--large", "200")
    assert first["benchmark"] == "passes"
    done = {(row["what"], row["collectives"]): row.get("done") for row in rows}
    assert done["overlap", 200] == 200 and done["coalesce", 200] == 4 and done["fuse", 200] == 200
    assert done["packed", 200] == 4 and done["dedup", 200] == 150 and done["reshard", 200] == 500
    assert done["manual_overlap", 200] == 50
    assert {what for what, _ in done} == {run.__name__ for run, _ in passes.PASSES} | {"manual_overlap", "provenance"}
    assert all(row["bytes_per_collective"] > 0 for row in rows if row["what"] == "provenance")


def test_one_pass_alone(capsys: pytest.CaptureFixture[str]) -> None:
    _, *rows = lines(passes, capsys, "--large", "100", "--only", "guard")
    assert [row["what"] for row in rows] == ["guard"] * 3
    with pytest.raises(SystemExit):
        lines(passes, capsys, "--only", "no_such_pass")


def test_a_benchmark_fails_where_a_pass_grows_too_fast() -> None:
    def row(collectives: int, growth: float) -> dict[str, object]:
        return {"what": "overlap", "collectives": collectives, "times_the_seconds_for_10_times_the_graph": growth}

    assert too_fast([{"what": "overlap", "collectives": 1000}, row(1000, 20), row(10_000, 12)]) == []
    (line,) = too_fast([row(10_000, 13), row(100_000, 11)])
    assert line == "overlap: 10000 collectives took 13.0 times a tenth's seconds, at most 12 expected"
