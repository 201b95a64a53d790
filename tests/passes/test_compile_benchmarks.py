"""The benchmarks of compile seconds run on small models and graphs; no clock is asked."""

from __future__ import annotations

import pytest

from benchmarks import compile_time, passes
from benchmarks.measure import too_fast
from tests.unit.test_benchmarks import lines

PARAMETERS_OF_A_BLOCK, OTHERS = 9, 3  # of the model: embedding, norm, head


def test_every_way_compiles_the_same_collectives() -> None:
    found = {way: compile_time.measure(way, 1, width=16, inner="aot_eager") for way in compile_time.WAYS}
    assert found["per_block"]["collectives"] == 0 and found["per_block"]["ours_s"] == 0
    gathered_once = PARAMETERS_OF_A_BLOCK + OTHERS
    for way in ("captured", "gathers"):  # gathered, gathered again in backward but the root's, reduced
        assert found[way]["collectives"] == 3 * gathered_once - OTHERS and found[way]["ok"], found[way]
        assert 0 < found[way]["ours_s"] < found[way]["python_s"]


def test_the_rows_of_one_number_of_blocks() -> None:
    def row(python_s: float, compiler_s: float) -> dict[str, float]:
        return {"blocks": 4, "python_s": python_s, "compiler_s": compiler_s, "ours_s": 0.5}

    made = {"per_block": row(2, 3), "captured": row(20, 5), "warm": row(2.5, 0), "gathers": row(10, 0)}
    made["regions"] = row(5, 10)
    found = compile_time.ratios(made)
    assert (found["captured_to_per_block"], found["gathers_to_per_block"], found["regions_to_per_block"]) == (5, 2, 3)
    assert (found["cold_to_warm"], found["ours_share"]) == (10, 0.02)


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
