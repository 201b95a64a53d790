"""docs/fsdp2-options.md: its table, written from runs. `python -m tests.distributed.options_page` rewrites it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.distributed import options_runs
from tests.distributed.launch import launch
from tests.distributed.options_cases import Row, rows

PAGE = Path(__file__).resolve().parents[2] / "docs" / "fsdp2-options.md"
BEGIN, END = "<!-- table: begin -->\n", "<!-- table: end -->\n"
HEAD = "| option | verdict | explicit | meaning or message |\n| --- | --- | --- | --- |\n"


def seen() -> dict[str, list[dict[str, Any]]]:
    """Every row of the installed torch, run: what each rank saw."""
    found: dict[str, list[dict[str, Any]]] = {}
    for ranks in (2, 4):
        results = launch(options_runs.run, ranks, timeout=550)
        found |= {option: [one[option] for one in results] for option in results[0]}
    return found


def line(row: Row, ranks: list[dict[str, Any]]) -> str:
    """One line of the table, from what was seen."""
    if row.refuse is not None:
        return f"| {row.option} | refused | | {ranks[0]['message']} |\n"
    worst = max(max(one["loss"], one["param"]) for one in ranks)
    verdict = "equal to eager" if worst == 0.0 else "equal to eager, ≤ 1e-5" if worst <= 1e-5 else "DIFFERENT"
    counts = ranks[0]["counts"]
    captured = sum(n for phases in ranks[0]["captured"].values() for n in phases.values() if n)
    return f"| {row.option} | {verdict} | {counts['explicit']} of {captured} | {row.meaning} |\n"


def table(found: dict[str, list[dict[str, Any]]]) -> str:
    """The table of everything that was run."""
    return HEAD + "".join(line(row, found[row.option]) for row in rows())


def written(page: str, new: str) -> str:
    """The page with its table replaced."""
    before, rest = page.split(BEGIN)
    return before + BEGIN + new + END + rest.split(END)[1]


if __name__ == "__main__":
    PAGE.write_text(written(PAGE.read_text(), table(seen())))
