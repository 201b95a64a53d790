"""The commands over runs: `report`, `check`, `diff` and `explain`."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer

from ..compat import collector_paused
from .differences import rank_differences, run_difference
from .explanation import explain, not_found
from .jsonl import RunFolderError, read_run
from .report import FAULTS, Report, build_report
from .terminal import render, render_difference
from .terminal_explanation import render_explanation

_BAD_USAGE = 2

RunFolder = Annotated[Path, typer.Argument(metavar="RUN", help="Run folder, with one rank<N>.jsonl per rank.")]
AsJson = Annotated[bool, typer.Option("--json", help="One JSON object on stdout instead of tables.")]


def report_command(
    run: RunFolder,
    html: Annotated[bool, typer.Option("--html", help="Write one self-contained HTML page instead.")] = False,
    out: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Where --html writes; by default RUN/report.html.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Show what a run captured, labelled, merged and lost.

    With --html the page holds the first rank's collectives, the differences of the other ranks, and needs no network.

    Exit code 0 whatever the report says, 2 when RUN holds no readable run or the page cannot be written.
    """
    found = _read(run)
    if html or out is not None:
        from .page import page

        path = out if out is not None else run / "report.html"
        try:
            with collector_paused():
                path.write_text(page(found, title=str(run)), encoding="utf-8")
        except OSError as error:
            _fail(f"{path}: cannot be written: {error}")
        if as_json:
            _print_json({"page": str(path), "ok": found.ok})
        else:
            typer.echo(str(path))
    elif as_json:
        _print_json({**found.to_dict(), "differences": rank_differences(found)})
    else:
        render(found, run=run)


def check_command(
    run: RunFolder,
    fail_on: Annotated[
        str,
        typer.Option(
            "--fail-on", help=f"Comma-separated kinds of fault that fail the check: {', '.join(FAULTS)}."
        ),
    ] = ",".join(FAULTS),
    as_json: AsJson = False,
) -> None:
    """Fail when a run lost, contradicted, refuted or missed identities, or is not what its producers declared.

    Exit code 0 when the run passes, 1 with the reasons when it does not, 2 when RUN holds no readable run.
    """
    found = _read(run)
    kinds = [kind.strip() for kind in fail_on.split(",") if kind.strip()]
    try:
        reasons = [f"failure: {text}" for text in found.failures] + found.faults(kinds)
    except ValueError as error:
        _fail(f"--fail-on: {error}")
    if as_json:
        _print_json({"ok": not reasons, "fail_on": kinds, "reasons": reasons})
    else:
        for reason in reasons:
            typer.echo(reason)
        typer.echo("ok" if not reasons else f"{len(reasons)} reasons to fail")
    if reasons:
        raise typer.Exit(1)


def diff_command(
    run_a: Annotated[Path, typer.Argument(metavar="RUN_A", help="Run folder.")],
    run_b: Annotated[Path, typer.Argument(metavar="RUN_B", help="Run folder to compare with it.")],
    as_json: AsJson = False,
) -> None:
    """Say in what run B differs from run A: collectives, coverage, codes, failures, by the first rank of each.

    Graphs are paired by phase and name, collectives by what they do and for which parameters; node and group names
    are not compared.

    Exit code 0 when they are the same, 1 when they differ, 2 when one holds no readable run.
    """
    with collector_paused():
        difference = run_difference(_read(run_a), _read(run_b))
    if as_json:
        _print_json(difference)
    else:
        render_difference(difference)
    if not difference["same"]:
        raise typer.Exit(1)


def explain_command(
    run: RunFolder,
    what: Annotated[
        str, typer.Argument(metavar="NODE", help="A node's name, a parameter's FQN, or a parameter group.")
    ],
    rank: Annotated[int | None, typer.Option(help="The rank to look at; by default the first.")] = None,
    as_json: AsJson = False,
) -> None:
    """Tell the life of a collective: captured, moved, merged, dropped, where and why.

    Exit code 0, or 2 when RUN holds no readable run or nothing of that name.
    """
    report = _read(run)
    found = explain(report, what, rank=rank)
    if not found:
        where = "" if rank is None else f" on rank {rank}"
        instead = not_found(report, what, rank=rank)
        _fail(f"{run}: expected a node, parameter or parameter group, found none named {what!r}{where}; {instead}")
    if as_json:
        _print_json({"found": found})
    else:
        render_explanation(found)


def _read(run: Path) -> Report:
    try:
        with collector_paused():
            return build_report(read_run(run))
    except (RunFolderError, OSError) as error:
        _fail(str(error))


def _fail(text: str) -> NoReturn:
    print(f"error: {text}", file=sys.stderr)
    raise typer.Exit(_BAD_USAGE)


def _print_json(value: dict[str, Any]) -> None:
    typer.echo(json.dumps(value))
