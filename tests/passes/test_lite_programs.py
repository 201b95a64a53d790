"""300 random programs in lite mode against ``aot_eager``, and what finds and names one that is wrong.

In classes, which pytest-xdist's ``--dist loadscope`` gives to its workers one by one.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from typing import Any

import pytest

import collective_identity as ci
from tests import lite_programs
from tests.lite_programs import BUNDLE, LENGTHS, STEPS, Program, bundles, world, wrong_of

LITE = {"backend": "collective_identity", "options": {"strict_lite": True}}
COUNT, PARTS = 300, 4


@pytest.fixture(scope="module", autouse=True)
def one_rank() -> Iterator[None]:
    with world(), ci.enable(agreement_timeout=0):
        yield


def check(part: int, third: int) -> None:
    """A twelfth of the programs."""
    count = COUNT // PARTS // 3
    found = [line for group in bundles(count, (3 * part + third) * count) for line in wrong_of(group, **LITE)]
    assert not found, "\n".join(found)


@pytest.mark.parametrize("third", range(3))
class TestFirstQuarter:
    def test_as_aot_eager(self, third: int) -> None:
        check(0, third)


@pytest.mark.parametrize("third", range(3))
class TestSecondQuarter:
    def test_as_aot_eager(self, third: int) -> None:
        check(1, third)


@pytest.mark.parametrize("third", range(3))
class TestThirdQuarter:
    def test_as_aot_eager(self, third: int) -> None:
        check(2, third)


@pytest.mark.parametrize("third", range(3))
class TestFourthQuarter:
    def test_as_aot_eager(self, third: int) -> None:
        check(3, third)


def test_the_programs_are_three_hundred_of_every_kind() -> None:
    """Each step in several programs for one size and in several for any, also as the first of two or more."""
    programs = [Program(seed) for seed in range(COUNT)]
    assert COUNT >= 300 and COUNT % (3 * PARTS * BUNDLE) == 0, "no part is cut within a bundle"
    assert sum(program.dynamic for program in programs) == COUNT // 3
    assert {len(program.steps()) for program in programs} == set(LENGTHS)
    for dynamic in (False, True):
        for name in STEPS:
            having = [p for p in programs if p.dynamic is dynamic and name in [step for step, _ in p.steps()]]
            assert len(having) >= 5 and any(len(p.steps()) > 1 for p in having), (name, dynamic)


def test_a_program_that_raises_is_named_and_the_others_run(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def differing(programs: Sequence[Program], **lite: Any) -> list[Program]:
        if Program(3) in programs:
            raise AssertionError("expected size\nmore")
        wrong = {8} if len(programs) == 1 else {8, 11}  # one is wrong in company only
        return [program for program in programs if program.seed in wrong]

    monkeypatch.setattr(lite_programs, "differing", differing)
    monkeypatch.setattr(lite_programs, "world", nullcontext)
    monkeypatch.setattr(lite_programs.ci, "enable", lambda **_: nullcontext())
    monkeypatch.setattr("sys.argv", ["lite_programs", "--programs", "15"])
    assert lite_programs.main() == 1
    said = capsys.readouterr().out.splitlines()
    repeat = "python -m tests.lite_programs"
    assert [line.partition(": [")[0] for line in said] == [
        f"raises AssertionError: expected size: {repeat} --programs 1 --seed 3",
        f"differs: {repeat} --programs 1 --seed 8",
        f"differs: {repeat} --programs 5 --seed 10",
        "15 programs from seed 0: 3 differ from aot_eager or raise",
    ]


def test_no_bundle_starts_after_the_time_given(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(lite_programs, "world", nullcontext)
    monkeypatch.setattr(lite_programs.ci, "enable", lambda **_: nullcontext())
    monkeypatch.setattr("sys.argv", ["lite_programs", "--programs", "15", "--seconds", "-1"])
    assert lite_programs.main() == 0
    assert capsys.readouterr().out == "0 programs from seed 0: 0 differ from aot_eager or raise\n"


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
