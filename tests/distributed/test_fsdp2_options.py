"""Every FSDP2 option: equal to eager or refused by name, and docs/fsdp2-options.md says what was seen."""

from __future__ import annotations

from typing import Any

import pytest

from tests.distributed.options_cases import rows, surface
from tests.distributed.options_page import BEGIN, END, PAGE, line, seen

pytestmark = pytest.mark.distributed


@pytest.fixture(scope="module")
def found() -> dict[str, list[dict[str, Any]]]:
    return seen()


def test_every_option_of_the_installed_torch_has_a_row() -> None:
    assert {name for row in rows() for name in row.covers} == surface()


def test_each_is_equal_to_eager_or_refused(found: dict[str, list[dict[str, Any]]]) -> None:
    for row in rows():
        for one in found[row.option]:
            if row.refuse is not None:
                assert "fsdp_hooks does not support" in one["message"], row.option
                continue
            assert one["trained"], row.option
            limit = 0.0 if row.exact else 1e-5
            assert (row.option, max(one["loss"], one["param"]) <= limit) == (row.option, True)


def test_every_captured_collective_is_explicit_and_declared(found: dict[str, list[dict[str, Any]]]) -> None:
    for row in rows():
        if row.refuse is not None:
            continue
        for one in found[row.option]:
            counts, captured = one["counts"], one["captured"]
            assert counts["inferred"] == counts["malformed"] == counts["dropped"] == 0, row.option
            assert counts["explicit"] == sum(n for phases in captured.values() for n in phases.values() if n)
            if row.declared:
                assert (row.option, one["failures"], counts["not_captured"]) == (row.option, [], 0)


def test_the_page_says_what_was_seen(found: dict[str, list[dict[str, Any]]]) -> None:
    """Lines of options that only another torch has may stand there too."""
    lines = PAGE.read_text().split(BEGIN)[1].split(END)[0].splitlines(keepends=True)
    for row in rows():
        assert line(row, found[row.option]) in lines, "python -m tests.distributed.options_page rewrites it"
