"""How does a run look in a browser? One HTML page without any reference to a network.

The page's tables are written here; its collectives go along as columns of numbers, and the page's own script draws
only what is on the screen, so that 100,000 rows open and filter at once.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from ..digest import CollectiveRow
from .differences import rank_differences
from .report import Report
from .steps import Graph
from .terminal import readable

_TEMPLATE = "page.html.j2"
_COMMON = ("transport", "form", "role", "source", "producer", "group", "group_size", "reduce_op", "dtype", "backward")


def page(report: Report, *, title: str) -> str:
    """The HTML text of a report; `title` is the run's name.

    Collectives are those of the report's first rank; of the others their differences are shown.
    """
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["bytes"] = readable
    data = json.dumps(_data(report), separators=(",", ":"))
    safe = data.replace("&", "\\u0026").replace("<", "\\u003c")  # no text of the run may end the script element
    return environment.get_template(_TEMPLATE).render(
        title=title.encode("utf-8", "backslashreplace").decode(),
        report=report.to_dict(),
        differences=rank_differences(report),
        data=safe,
    )


def _data(report: Report) -> dict[str, Any]:
    texts: dict[str, int] = {}
    kinds: dict[tuple[Any, ...], int] = {}
    graphs = []
    for graph in report.ranks[0].graphs:
        columns = {}
        for stage, rows in (("captured", graph.before), ("after", graph.after)):
            columns[stage] = None if rows is None else _columns(rows, texts, kinds)
        if columns["captured"] is not None or columns["after"] is not None:
            graphs.append({"name": f"{graph.phase} {graph.name}", **columns, "events": _events(graph)})
    return {
        "common": list(_COMMON),
        "kinds": [dict(zip(_COMMON, kind, strict=True)) for kind in kinds],
        "texts": list(texts),
        "graphs": graphs,
    }


def _columns(rows: Sequence[CollectiveRow], texts: dict[str, int], kinds: dict[tuple[Any, ...], int]) -> dict[str, Any]:
    def number(text: str | None) -> int:
        return -1 if text is None else texts.setdefault(text, len(texts))

    def several(values: tuple[str, ...] | None) -> list[int] | None:
        return None if values is None else [number(value) for value in values]

    return {
        "node": [number(row.node) for row in rows],
        "kind": [kinds.setdefault(tuple(getattr(row, name) for name in _COMMON), len(kinds)) for row in rows],
        "nbytes": [row.nbytes for row in rows],
        "unit": [number(row.param_group) for row in rows],
        "params": [several(row.params) for row in rows],
        "members": [several(row.members) for row in rows],
        "lost": [number(" ".join(filter(None, (row.absence, row.code))) or None) for row in rows],
    }


def _events(graph: Graph) -> list[list[str | None]]:
    return [[e.node, f"{e.code} {e.slug}", e.severity, e.pass_name, e.detail, e.stack] for e in graph.events]
