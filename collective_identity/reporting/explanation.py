"""What became of one collective, from its producer to the compiled graph, and why?"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator
from dataclasses import asdict
from typing import Any

from .report import Report
from .steps import Graph

_NAMED = 12


def explain(report: Report, what: str, *, rank: int | None = None) -> list[dict[str, Any]]:
    """The life of each collective that `what` names: a node name, a parameter's FQN or a parameter group.

    A node that was merged leads to what it became, and a merged node to what it was made of.

    Args:
        report: of a run.
        what: as above; exactly, not a part of it.
        rank: the rank to look at; the first of the report by default.

    Returns:
        One object per graph and captured collective, in graph order: ``rank``, ``graph``, ``node``, ``captured`` and
        ``after`` (rows as in docs/run-format.md; null: not captured, or not in the compiled graph), ``merged_into``,
        ``members``, ``events`` on any of these nodes, ``passes`` that changed the graph, ``cached`` (no pass ran: the
        graph came from a compile cache, its tables from the artifact), and ``verdict``, a sentence.
        Empty when nothing has the name.
    """
    chosen = next((one for one in report.ranks if rank is None or one.rank == rank), None)
    if chosen is None:
        return []
    found = []
    for graph in chosen.graphs:
        for one in _in_graph(graph, what):
            found.append({"rank": chosen.rank, "graph": f"{graph.phase} {graph.name}", **one})
    return found


def not_found(report: Report, what: str, *, rank: int | None = None) -> str:
    """What there is instead of a name that nothing has: names like it, and the parameter groups."""
    chosen = [one for one in report.ranks if rank is None or one.rank == rank][:1]
    rows = [row for one in chosen for graph in one.graphs for row in (*(graph.before or ()), *(graph.after or ()))]
    if not rows:
        return "it holds no collective"
    groups = list(dict.fromkeys(row.param_group for row in rows if row.param_group))
    names = dict.fromkeys((*groups, *(p for row in rows for p in row.params or ()), *(row.node for row in rows)))
    close = difflib.get_close_matches(what, names, n=4)
    more = f" and {len(groups) - _NAMED} more" if len(groups) > _NAMED else ""
    said = [f"close to it: {', '.join(close)}"] if close else []
    said += [f"parameter groups: {', '.join(groups[:_NAMED])}{more}"] if groups else [f"a node: {rows[0].node}"]
    return "; ".join(said)


def _in_graph(graph: Graph, what: str) -> Iterator[dict[str, Any]]:
    captured = {row.node: row for row in graph.captured or ()}
    after = {row.node: row for row in graph.after or ()}
    home = {member: row.node for row in after.values() for member in row.members or ()}
    events: dict[str, list[dict[str, Any]]] = {}
    for event in graph.events:
        if event.node is not None:
            events.setdefault(event.node, []).append(asdict(event))
    named = [row.node for row in captured.values() if what in (row.node, row.param_group, *(row.params or ()))]
    if what in home and what not in captured:
        named.append(what)  # a node that one of several passes made and another merged
    if not named and (what in after or what in events):
        named = [what]
    for node in named:
        final = home.get(node, node)
        members = list(after[final].members or ()) if final in after else []
        told = [e for name in dict.fromkeys((node, final)) for e in events.get(name, [])]
        row, left = captured.get(node), after.get(final)
        yield {
            "node": node,
            "captured": None if row is None else asdict(row),
            "after": None if left is None else asdict(left),
            "merged_into": final if final != node else None,
            "members": members,
            "events": told,
            "passes": [p.name for p in graph.passes if p.changed],
            "cached": graph.cached,
            "verdict": _verdict(graph, node, row is not None, final, left, told),
        }


def _verdict(graph: Graph, node: str, was: bool, final: str, left: Any, events: Iterable[dict[str, Any]]) -> str:
    codes = ", ".join(dict.fromkeys(f"{e['code']} {e['slug']}" for e in events if e["severity"] != "info"))
    if graph.after is None:
        fate = f"the graph is {graph.state}{', from cache' * graph.cached}: what became of it is unknown"
    elif left is None:
        fate = "not in the compiled graph under this name; see events and passes"
    elif final != node:
        fate = f"one of {len(left.members)} members of {final}, which is {left.role or 'without a role'}"
    elif left.members and was is False:
        fate = f"made of {len(left.members)} collectives, and is {left.role or 'without a role'}"
    else:
        fate = f"in the compiled graph as {left.role or 'a collective without a role'}"
        fate += f", {left.source}" if left.source else ""
    return fate + (f"; {codes}" if codes else "")
