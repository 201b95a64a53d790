"""Inputs of public reports: wrong through torch's own passes, right through ours."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from collective_identity import compat, session
from tests.passes.public_reports import CASES, said

pytestmark = pytest.mark.usefixtures("fake_world")

PAGE = Path(__file__).resolve().parents[2] / "docs" / "transformations.md"
MEASURED = (2, 13)  # the docs table's version
RIGHT_BEFORE = {"overlap"}  # torch 2.11's scheduler copies no payload


@pytest.fixture(autouse=True)
def _no_session_left() -> Iterator[None]:
    yield
    torch._dynamo.reset()
    if (left := session.current()) is not None:
        left.close()


@pytest.mark.parametrize("name", sorted(CASES))
def test_torch_is_wrong_and_ours_is_right(name: str) -> None:
    case = CASES[name]
    torchs, ours = case.torchs(), case.ours()
    assert {key: ours.get(key) for key in case.right} == case.right
    if compat.torch_version() >= MEASURED:
        assert torchs is not None and {key: torchs.get(key) for key in case.right} != case.right
    elif torchs is not None:
        assert ({key: torchs.get(key) for key in case.right} == case.right) == (name in RIGHT_BEFORE)
    if compat.torch_version() == MEASURED:
        assert f"| {case.title} | {said(torchs)} | {said(ours)} |" in PAGE.read_text().splitlines()


def test_the_page_lists_every_input() -> None:
    text = PAGE.read_text()
    assert [case.title for case in CASES.values() if case.title not in text] == []
