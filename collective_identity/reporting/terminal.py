"""How does a report look in a terminal? Tables by rich, plain text where the output is no terminal."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path
from typing import IO, Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from .report import FAULTS, Report
from .steps import PHASES

STYLE = {"error": "bold red", "warning": "yellow", "info": "dim"}
_PLAIN_WIDTH = 140  # columns where the output is no terminal


def render(
    report: Report, *, file: IO[str] | None = None, width: int | None = None, run: Path | None = None
) -> None:
    """Print a report to `file` (stdout by default), in colour only when it is a terminal.

    With the folder `run` it came from, the last line names the commands to go on with.
    """
    console = console_for(file, width)
    data = report.to_dict()
    _head(console, data, len(report.faults(FAULTS)))
    if data["coverage"]:
        for part in _coverage(data, console.width):
            console.print(part)
    if data["roles"]:
        console.print(_totals(data))
    if data["graphs"]:
        console.print(_graphs(data))
    if data["losses"]:
        console.print(_losses(data))
    if data["warnings"]:
        console.print(_warnings(data))
    if len(data["by_rank"]) > 1:
        console.print(_ranks(data))
    for name, style in (("notes", "dim"), ("failures", "bold red")):
        if data[name]:
            console.print(Text(name.capitalize(), style="bold"))
        for text in data[name]:
            print_sentence(console, Text(f"  {text}", style=style))
    if run is not None:
        print_sentence(console, Text(_next(data, run), style="dim"))


def _next(data: dict[str, Any], run: Path) -> str:
    beside = Path(sys.executable).parent / "collective-identity"
    program = str(beside) if shutil.which("collective-identity") is None and beside.is_file() else beside.name
    commands = [f"{program} check {run}", f"{program} report {run} --html"]
    if data["roles"]:
        commands.append(f"{program} explain {run} NAME (a parameter, a parameter group or a node)")
    return f"next: {'; '.join(commands)}"


def print_sentence(console: Console, text: Text) -> None:
    """A sentence: wrapped on a terminal only, so that elsewhere it can be searched for."""
    console.print(text, soft_wrap=not console.is_terminal)


def render_text(report: Report, *, width: int = _PLAIN_WIDTH) -> str:
    """The same as plain text, without colour."""
    import io

    out = io.StringIO()
    render(report, file=out, width=width)
    return out.getvalue()


def console_for(file: IO[str] | None, width: int | None) -> Console:
    """Of the terminal's width and colours, or plain and wide where there is none."""
    console = Console(file=file, width=width, highlight=False, soft_wrap=False)
    if width is None and not console.is_terminal:
        console = Console(file=file, width=_PLAIN_WIDTH, highlight=False)
    return console


def _head(console: Console, data: dict[str, Any], faults: int) -> None:
    run = data["run"] or {}
    counts = data["counts"]
    line = Text("collective identity: ")
    if data["ok"] and faults:
        line.append(f"as declared, but `check` finds {faults} fault{'s' * (faults > 1)}", style="bold yellow")
    else:
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


def _coverage(data: dict[str, Any], width: int) -> list[Table | Text]:
    """The table, and where the width is too small for all columns a line that names those left out: all zero."""
    rows = sorted(data["coverage"], key=lambda r: (r["role"], PHASES.index(r["phase"])))
    cells: dict[str, list[str]] = {"role": [row["role"] for row in rows], "phase": [row["phase"] for row in rows]}
    for header, name in _NUMBERS.items():
        cells[header] = [_number(row[name]) for row in rows]
    needed = {h: max(map(len, (*h.split("\n"), *texts))) + 3 for h, texts in cells.items()}
    empty = [] if sum(needed.values()) < width else [h for h in _MAY_GO if set(cells[h]) in ({"0"}, {"?"})]
    tight = sum(n for h, n in needed.items() if h not in empty) >= width
    table = Table(title="Coverage of one step", title_justify="left", padding=0 if tight else (0, 1))
    for header in cells:
        if header not in empty:
            text = header in ("role", "phase")
            table.add_column(header, no_wrap=text, overflow="fold", justify="left" if text else "right")
    for place, row in enumerate(rows):
        good = row["expected"] is None or row["expected"] == row["captured"] == row["explicit"]
        shown = [Text(texts[place]) for header, texts in cells.items() if header not in empty]
        table.add_row(*shown, style=None if good else STYLE["warning"])
    said = []
    for value, word in (("0", "none"), ("?", "unknown")):
        names = [_NUMBERS[header].replace("_", " ") for header in empty if cells[header][0] == value]
        said += [f"{word}: {', '.join(names)}"] if names else []
    lines = [Text("; ".join(said), style="dim")] if said else []
    if any(row["expected"] is None and row["phase"] == "regather" for row in rows):
        lines.append(Text(_OPEN, style="dim"))
    return [table, *lines]


_OPEN = "?: re-gathers are one for each parameter whose value backward needs (seldom a bias); which, nobody declared"


_NUMBERS = {
    "expected": "expected",
    "captured": "captured",
    "explicit": "explicit",
    "inferred": "inferred",
    "mal-\nformed": "malformed",
    "un-\nlabelled": "unlabelled",
    "dropped": "dropped",
    "not\ncaptured": "not_captured",
    "after\npasses": "after",
    "natural\nbuckets": "buckets_expected",
}
_MAY_GO = ("inferred", "mal-\nformed", "un-\nlabelled", "dropped", "not\ncaptured")


def _number(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{n} {code}" for code, n in value.items()) or "0"
    return "?" if value is None else str(value)


def _totals(data: dict[str, Any]) -> Table:
    table = Table(title="Sent by this rank, all graphs", title_justify="left")
    table.add_column("role")
    table.add_column("transport")
    for column in ("captured", "bytes", "after passes", "bytes"):
        table.add_column(column, justify="right", no_wrap=True)
    for row in data["roles"]:
        more = f" + {row['unknown_sizes']} of unknown size" if row["unknown_sizes"] else ""
        table.add_row(
            Text(row["role"] or "none"),
            Text(row["transport"]),
            str(row["captured"]),
            readable(row["captured_bytes"]) + more,
            str(row["after"]),
            readable(row["after_bytes"]),
        )
    return table


def readable(count: int) -> str:
    """A number of bytes in binary units: ``1.50 MiB``."""
    size, units = float(count), ["B", "KiB", "MiB", "GiB", "TiB"]
    while size >= 1024 and len(units) > 1:
        size /= 1024
        units.pop(0)
    return f"{size:.0f} {units[0]}" if units[0] == "B" else f"{size:.2f} {units[0]}"


def _losses(data: dict[str, Any]) -> Table:
    table = Table(title="Identities lost, by pass", title_justify="left")
    table.add_column("pass")
    table.add_column("code")
    table.add_column("count", justify="right")
    for row in data["losses"]:
        table.add_row(Text(row["pass"] or "nobody says"), row["code"], str(row["count"]))
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
        place += f", at {first['stack']}" if first["stack"] else ""
        table.add_row(
            Text(f"{warned['code']} {warned['slug']}"),
            str(warned["count"]),
            Text(warned["text"]),
            Text(place),
            Text(warned["remedy"]),
            style=STYLE.get(warned["severity"]),
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


def _roles(counts: dict[str, int] | None) -> Text:
    if counts is None:
        return Text("?")
    return Text("\n".join(f"{n} {role}" for role, n in counts.items()) or "none")


def render_difference(difference: dict[str, Any], *, file: IO[str] | None = None) -> None:
    """Print what `differences.run_difference` found."""
    console = console_for(file, None)
    if difference["same"]:
        console.print("the runs are the same")
        return
    for row in difference["coverage"]:
        what = ", ".join(
            f"{name} {_number(v[0])} -> {_number(v[1])}" for name, v in row.items() if isinstance(v, list)
        )
        print_sentence(console, Text(f"{row['role']}, {row['phase']}: {what}"))
    for code, (a, b) in difference["codes"].items():
        print_sentence(console, Text(f"{code}: {a} -> {b}"))
    for graph in difference["graphs"]:
        if graph["in"] != "both":
            print_sentence(console, Text(f"{graph['graph']}: only in run {graph['in'].upper()}"))
            continue
        a, b = (_number(n) for n in graph["count"])
        print_sentence(console, Text(f"{graph['graph']}, {graph['stage']}: {a} -> {b} collectives"))
        if first := graph["first"]:
            text = f"  first at {first['position']}: {first['field']} {first['a']!r} -> {first['b']!r}"
            print_sentence(console, Text(text))
        for example in graph["examples"]:
            sign = "-" if example["in"] == "a" else "+"
            names = ", ".join(example["params"] or ()) or example["param_group"] or example["node"]
            text = f"  {sign} {example['count']} x {example['role'] or 'no role'} ({example['transport']}) of {names}"
            print_sentence(console, Text(text, style="red" if sign == "-" else "green"))
    for sign, name in (("-", "only_a"), ("+", "only_b")):
        for failure in difference["failures"][name]:
            print_sentence(console, Text(f"{sign} {failure}"))
