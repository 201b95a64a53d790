"""How much is sent for what, and which pass lost how many roles? Sums over every graph of a rank."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Any

from .steps import DROPPED, Graph


def by_role(graphs: Iterable[Graph]) -> list[dict[str, Any]]:
    """Per role and transport over all graphs: ``role`` (null: none), ``transport``, and of what was captured and of
    what is left after the passes ``captured``, ``captured_bytes``, ``after``, ``after_bytes``: collectives and bytes
    that this rank sends; symbolic sizes are counted in ``unknown_sizes``, not in bytes."""
    sums: dict[tuple[str | None, str], Counter[str]] = {}
    for graph in graphs:
        for stage, rows in (("captured", graph.before), ("after", graph.after)):
            for row in rows or ():
                found = sums.setdefault((row.role, row.transport), Counter())
                found[stage] += 1
                found[f"{stage}_bytes"] += row.nbytes or 0
                found["unknown_sizes"] += stage == "captured" and row.nbytes is None
    names = ("captured", "captured_bytes", "after", "after_bytes", "unknown_sizes")
    return [
        {"role": role, "transport": transport, **{name: found[name] for name in names}}
        for (role, transport), found in sorted(sums.items(), key=lambda item: (item[0][0] or "~", item[0][1]))
    ]


def losses(graphs: Iterable[Graph]) -> list[dict[str, Any]]:
    """Identities lost: ``pass`` (null: nobody says), ``code``, ``count``, by pass and code."""
    counts: Counter[tuple[str | None, str]] = Counter()
    for graph in graphs:
        passes = {event.node: event.pass_name for event in graph.events if event.code in DROPPED}
        for node, code in graph.marked(DROPPED, "dropped").items():
            counts[passes.get(node), code] += 1
    return [
        {"pass": name, "code": code, "count": count}
        for (name, code), count in sorted(counts.items(), key=lambda item: (item[0][0] or "~", item[0][1]))
    ]
