"""Random programs in lite mode against ``aot_eager``: a few in every run, 300 with ``-m long``."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from typing import Any

import pytest

import collective_identity as ci
from tests import lite_programs
from tests.lite_programs import STEPS, Program, run, world

LITE = {"backend": "collective_identity", "options": {"strict_lite": True}}
FEW = 25


@pytest.fixture(scope="module", autouse=True)
def one_rank() -> Iterator[None]:
    with world(), ci.enable(agreement_timeout=0):
        yield


def test_a_few_programs() -> None:
    assert list(run(FEW, 0, **LITE)) == []


@pytest.mark.long
def test_three_hundred_programs() -> None:
    assert list(run(300, 0, **LITE)) == []


def test_a_few_programs_have_every_step_and_both_kinds_of_shape() -> None:
    programs = [Program(seed) for seed in range(FEW)]
    assert {name for program in programs for name, _ in program.steps()} == set(STEPS)
    assert {program.dynamic for program in programs} == {False, True}


def test_a_program_that_raises_is_named_and_the_others_run(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def differing(programs: Sequence[Program], **lite: Any) -> list[Program]:
        if Program(3) in programs:
            raise AssertionError("expected size\nmore")
        return [program for program in programs if program.seed == 8]

    monkeypatch.setattr(lite_programs, "differing", differing)
    monkeypatch.setattr(lite_programs, "world", nullcontext)
    monkeypatch.setattr(lite_programs.ci, "enable", lambda **_: nullcontext())
    monkeypatch.setattr("sys.argv", ["lite_programs", "--programs", "10"])
    assert lite_programs.main() == 1
    said = capsys.readouterr().out.splitlines()
    assert [line.partition(": [")[0] for line in said] == [
        "raises AssertionError: expected size: --programs 1 --seed 3",
        "differs: --programs 1 --seed 8",
        "10 programs from seed 0: 2 differ from aot_eager or raise",
    ]


def test_a_difference_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Planted: one program computes something else in its second compile, which is the one in lite mode."""
    original, compiles = lite_programs.results, []

    def counted(*args: Any, **how: Any) -> Any:
        compiles.append(how)
        return original(*args, **how)

    monkeypatch.setattr(lite_programs, "results", counted)
    monkeypatch.setitem(lite_programs.STEPS, "gelu", lambda x, o, n: x * len(compiles))
    (*_, with_it), (*_, without) = (
        [one for one in map(Program, range(20)) if ("gelu" in dict(one.steps())) is wanted] for wanted in (True, False)
    )
    assert lite_programs.differing([with_it], backend="aot_eager") == [with_it]
    assert lite_programs.differing([without], backend="aot_eager") == []
