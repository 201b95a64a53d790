"""The commands over saved graphs: `dump` lists and exports them, `debugify` checks passes on one."""

from __future__ import annotations

import importlib
import json
import shutil
import sys
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer

from .. import saved_graph
from ..debugify import STAMPS, DebugifyError, DebugifyReport, debugify

DEFAULT_PASS = "inductor_passes.debugging:backend_passes"
_BAD_INPUT = 2

AsJson = Annotated[bool, typer.Option("--json", help="One JSON object on stdout instead of tables.")]


def dump_command(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="Run folder of a run with the backend option dump=True.")],
    rank: Annotated[int | None, typer.Option(help="Only graphs of this rank.")] = None,
    phase: Annotated[str | None, typer.Option(help="Only forward, backward or inference graphs.")] = None,
    out: Annotated[Path | None, typer.Option(help="Copy the files into this folder.")] = None,
    as_json: AsJson = False,
) -> None:
    """List the saved graphs of a run, or copy them out. Reads headers only; nothing is unpickled.

    Exit code 0; 2 when RUN holds no such graph, or a file in it is damaged.
    """
    folder = run / saved_graph.FOLDER
    paths = sorted(folder.glob(f"*{saved_graph.SUFFIX}"), key=lambda path: (len(path.name), path.name))
    try:
        headers = {path: saved_graph.header_of(path) for path in paths}
    except saved_graph.SavedGraphError as error:
        _fail(str(error))
    found = {p: h for p, h in headers.items() if rank in (None, h.rank) and phase in (None, h.phase)}
    if not found:
        _fail(
            f"{folder}: holds {'none of these graphs' if paths else 'no saved graph'}; graphs are saved by the backend "
            "option dump=True in a session with a run folder"
        )
    if out is not None:
        try:
            out.mkdir(parents=True, exist_ok=True)
            found = {Path(shutil.copy2(path, out)): header for path, header in found.items()}
        except OSError as error:
            _fail(f"{out}: cannot be written: {error}")
    if as_json:
        typer.echo(json.dumps({"graphs": [{"path": str(path), **asdict(header)} for path, header in found.items()]}))
        return
    for path, header in found.items():
        typer.echo(f"{path}  rank {header.rank}, {header.phase} graph {header.name}, torch {header.torch}")


def debugify_command(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="A graph that `dump` lists. Loading one can run code.")],
    passes: Annotated[
        list[str] | None,
        typer.Option("--pass", metavar="MODULE:CALLABLE", help=f"In order; by default {DEFAULT_PASS}."),
    ] = None,
    stamps: Annotated[
        list[str] | None, typer.Option(help=f"Sets of identities: {', '.join(STAMPS)}; by default all.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Run passes over a saved graph with synthetic identities, and say what became of each.

    FILE holds a pickle, and loading a pickle can run code: give only files that you or your job wrote. Modules
    are found in the current folder as well.

    Exit code 0 when every pass keeps the contract, 1 when one does not, 2 when FILE, a pass or a set of
    identities cannot be used, or a pass raised.
    """
    try:
        _, gm = saved_graph.read(file)
        named = [(name, _callable(name)) for name in passes or [DEFAULT_PASS]]
        report = debugify(named, gm, stamps=tuple(stamps or STAMPS))
    except (saved_graph.SavedGraphError, DebugifyError, ValueError) as error:
        _fail(" ".join(str(error).split()))
    if as_json:
        typer.echo(json.dumps(report.to_dict()))
    else:
        _show(report)
    if report.faults:
        raise typer.Exit(1)


def _callable(name: str) -> Callable[..., Any]:
    module, _, attribute = name.partition(":")
    if "" not in sys.path and str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))
    try:
        found: Any = importlib.import_module(module)
        for part in attribute.split("."):
            found = getattr(found, part)
    except Exception as error:  # whatever importing a user's module raises
        why = f"{type(error).__name__}: {error}"
        raise ValueError(f"--pass: expected MODULE:CALLABLE, found {name!r} ({why})") from error
    if not callable(found):
        raise ValueError(f"--pass: expected a callable, found {name!r}, which is a {type(found).__name__}")
    return found  # type: ignore[no-any-return]


def _show(report: DebugifyReport) -> None:
    """A table by rich and the faults below it; plain text where rich is not installed."""
    try:
        from rich.console import Console
        from rich.table import Table
    except ImportError:
        typer.echo(str(report))
        return
    table = Table("pass", "identities", "graph", "what became of them")
    for one in report.passes:
        counts = ", ".join(f"{count} {kind}" for kind, count in one.counts.items()) or "no collective"
        table.add_row(one.name, one.stamp, "changed" if one.changed else "as before", counts)
    console = Console(highlight=False)
    (console if console.is_terminal else Console(highlight=False, width=140)).print(table)
    for line in str(report).splitlines() if report.faults else ():
        if line.startswith(" "):
            typer.echo(line.strip())
    typer.echo("ok" if not report.faults else f"{len(report.faults)} faults")


def _fail(text: str) -> NoReturn:
    print(f"error: {text}", file=sys.stderr)
    raise typer.Exit(_BAD_INPUT)
