"""How does a report look in a terminal? Tables by rich, plain text where the output is no terminal."""

from __future__ import annotations

from typing import IO, Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from .report import Report
from .steps import PHASES

_STYLE = {"error": "bold red", "warning": "yellow", "info": "dim"}
_PLAIN_WIDTH = 140  # columns where the output is no terminal


def render(report: Report, *, file: IO[str] | None = None, width: int | None = None) -> None:
    """Print a report to `file` (stdout by default), in colour only when it is a terminal."""
    console = Console(file=file, width=width, highlight=False, soft_wrap=False)
    if width is None and not console.is_terminal:
        console = Console(file=file, width=_PLAIN_WIDTH, highlight=False)
    data = report.to_dict()
    _head(console, data)
    if data["coverage"]:
        console.print(_coverage(data))
    if data["graphs"]:
        console.print(_graphs(data))
    if data["warnings"]:
        console.print(_warnings(data))
    if len(data["by_rank"]) > 1:
        console.print(_ranks(data))
    for name, style in (("notes", "dim"), ("failures", "bold red")):
        if data[name]:
            console.print(Text(name.capitalize(), style="bold"))
        for text in data[name]:
            console.print(Text(f"  {text}", style=style))


def render_text(report: Report, *, width: int = _PLAIN_WIDTH) -> str:
    """The same as plain text, without colour."""
    import io

    out = io.StringIO()
    render(report, file=out, width=width)
    return out.getvalue()


def _head(console: Console, data: dict[str, Any]) -> None:
    run = data["run"] or {}
    counts = data["counts"]
    line = Text("collective identity: ")
    line.append("ok" if data["ok"] else "NOT OK", style="bold green" if data["ok"] else "bold red")
    line.append(
        f"  {data['ranks']} ranks, mode {run.get('mode', '?')}, torch {run.get('torch', '?')}; "
        f"agreement {data['agreement']}; compile {data['seconds']['compile']:.2f} s, "
        f"our passes {data['seconds']['passes']:.3f} s"
    )
    console.print(line)
    console.print(
        Text("collectives: " + ", ".join(f"{n} {what.replace('_', ' ')}" for what, n in counts.items()))
    )


def _coverage(data: dict[str, Any]) -> Table:
    table = Table(title="Coverage of one step", title_justify="left")
    for column in ("role", "phase"):
        table.add_column(column, no_wrap=True)
    numbers = ("expected", "captured", "explicit", "inferred", "malformed", "unlabelled", "dropped")
    for column in (*numbers, "not captured", "after passes", "natural buckets"):
        table.add_column(column, justify="right")
    for row in sorted(data["coverage"], key=lambda r: (r["role"], PHASES.index(r["phase"]))):
        good = row["expected"] is None or row["expected"] == row["captured"] == row["explicit"]
        dropped = ", ".join(f"{n} {code}" for code, n in row["dropped"].items()) or 0
        cells = [row["expected"], row["captured"], row["explicit"], row["inferred"], row["malformed"]]
        cells += [row["unlabelled"], dropped, row["not_captured"], row["after"], row["buckets_expected"]]
        table.add_row(
            Text(row["role"]),
            Text(row["phase"]),
            *map(_cell, cells),
            style=None if good else _STYLE["warning"],
        )
    return table


def _graphs(data: dict[str, Any]) -> Table:
    table = Table(title="Graphs", title_justify="left")
    for column in ("graph", "state", "captured", "after passes", "agreement"):
        table.add_column(column)
    for column in ("compile s", "passes s"):
        table.add_column(column, justify="right", no_wrap=True)
    for graph in data["graphs"]:
        state = [graph["state"]]
        state += ["from cache"] if graph["cached"] else []
        state += [f"lite {graph['lite']}"] if graph["lite"] != "off" else []
        seconds = graph["compile_seconds"]
        table.add_row(
            Text(f"{graph['phase']} {graph['name']}"),
            Text(", ".join(state)),
            _roles(graph["captured"]),
            _roles(graph["after"]),
            Text(graph["agreement"]),
            "?" if seconds is None else f"{seconds:.2f}",
            f"{sum(p['seconds'] for p in graph['passes']):.3f}",
        )
    return table


def _warnings(data: dict[str, Any]) -> Table:
    table = Table(title="Losses and warnings", title_justify="left")
    for column in ("code", "count", "what", "first place", "what to do"):
        table.add_column(column, justify="right" if column == "count" else "left")
    for warned in data["warnings"]:
        first = warned["examples"][0]
        place = ", ".join(f"{k} {first[k]}" for k in ("graph", "node", "pass", "detail") if first[k])
        table.add_row(
            Text(f"{warned['code']} {warned['slug']}"),
            str(warned["count"]),
            Text(warned["text"]),
            Text(place),
            Text(warned["remedy"]),
            style=_STYLE.get(warned["severity"]),
        )
    return table


def _ranks(data: dict[str, Any]) -> Table:
    table = Table(title="Ranks", title_justify="left")
    for column in ("rank", "ok", *data["counts"], "graphs", "agreement"):
        table.add_column(column.replace("_", " "), justify="right")
    for rank in data["by_rank"]:
        counts = [str(n) for n in rank["counts"].values()]
        table.add_row(
            str(rank["rank"]), "yes" if rank["ok"] else "no", *counts, str(rank["graphs"]), rank["agreement"]
        )
    return table


def _cell(value: object) -> Text:
    return Text("?" if value is None else str(value))


def _roles(counts: dict[str, int] | None) -> Text:
    if counts is None:
        return Text("?")
    return Text("\n".join(f"{n} {role}" for role, n in counts.items()) or "none")
