"""Where do two ranks' tables of collectives differ, and how is that said?"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from .canonical import sha256
from .codes import RANKS_DISAGREE
from .digest import CollectiveRow

FIELDS = (
    "transport",
    "group",
    "role",
    "source",
    "reduce_op",
    "dtype",
    "numel",
    "group_size",
    "params",
    "param_group",
)
"""Fields of a row that must be equal on both ranks, in the order they are looked at. Node names are a
rank's own."""

WHOLE = "*"
"""Key of the digest over all rows; no process group has this name."""

_LABELS = ("role", "source", "params", "param_group")

_UNEVEN = ("all_to_all", "point_to_point")  # transports whose sizes may differ between ranks


class RanksDisagree(RuntimeError):
    """Two ranks are about to run different collectives on a group they share.

    `rank` is this one, `peer` the other; `position` counts the collectives on the groups the two share in
    this graph, from 0, None when the whole graph differs; `field` is what differs, `mine` and `theirs` the
    two values. `fault` names the kind of difference (`FAULTS`). On a rank that only heard of it
    (`relayed_to`), `rank` and `peer` are the two that found it.
    """

    def __init__(
        self,
        *,
        rank: int,
        peer: int,
        graph: str,
        group: str | None,
        position: int | None,
        field: str,
        mine: Any,
        theirs: Any,
        node: str | None = None,
        fault: str = "other_field",
        relayed_to: int | None = None,
    ) -> None:
        self.fault, self.relayed_to = fault, relayed_to
        self.rank, self.peer, self.graph, self.group = rank, peer, graph, group
        self.position, self.field, self.mine, self.theirs, self.node = position, field, mine, theirs, node
        place = f"{graph}"
        if position is not None:
            place += f", collective {position} of those on groups that both ranks are in"
        if group is not None:
            place += f", group {group!r}"
        if node is not None:
            place += f", node {node}"
        super().__init__(
            f"{RANKS_DISAGREE.id} ranks disagree ({fault}): {place}: {field} is {mine!r} on rank {rank} and {theirs!r} "
            f"on rank {peer}. Nothing of this graph has run. Give both ranks the same model, options, "
            f"environment and versions of torch and of this package; if only one of them took graphs from a "
            f"compile cache, clear it. With agreement_timeout=0 this check is off, and such a job hangs or "
            f"computes wrong values."
            + ("" if relayed_to is None else f" Rank {relayed_to} stops because those two do.")
        )


FAULTS = (
    "other_order",
    "swapped_groups",
    "missing_collective",
    "other_role",
    "other_reduce_op",
    "other_field",
    "other_graph",
)
"""Kinds of difference. "other_order": equal collectives, another order. "swapped_groups": equal but for the
groups they run on. "missing_collective": equal but for collectives that one rank has and the other has not.
"other_role", "other_reduce_op", "other_field": the first that differs does so there. "other_graph": the graph itself,
or an option, is another: one rank compiled a graph more, or not the one its peers compiled."""


def fault_of(
    mine: Sequence[dict[str, Any]], theirs: Sequence[dict[str, Any]], field: str, *, same_graph: bool = True
) -> str:
    """Which of `FAULTS` two tables that first differ in `field` show. With another captured graph on either side, a
    table that holds less than half of the other is another graph's, not one that lacks collectives."""
    ours, other = _texts(mine), _texts(theirs)
    if field == "group" and _texts(mine, "group") == _texts(theirs, "group"):
        return "swapped_groups"
    if sorted(ours) == sorted(other):
        return "other_order"
    if len(ours) == len(other):
        named = {"role": "other_role", "reduce_op": "other_reduce_op", "transport": "other_graph"}
        return named.get(field, "other_field")
    short, long = sorted((_texts(mine, ""), _texts(theirs, "")), key=len)
    rest = iter(long)
    if all(row in rest for row in short):  # a subsequence: each is found after the one before it
        return "missing_collective" if same_graph or 2 * len(short) >= len(long) else "other_graph"
    return {"role": "other_role", "reduce_op": "other_reduce_op"}.get(field, "other_graph")


def _texts(rows: Sequence[dict[str, Any]], without: str | None = None) -> list[str]:
    """The rows as texts; without a field also without what structure inferred, which hangs on the rows around."""
    left_out = set() if without is None else {without}
    inferred = left_out if without is None else {*left_out, *_LABELS}
    return [
        json.dumps(
            {k: v for k, v in row.items() if k not in (left_out if row.get("source") == "explicit" else inferred)},
            sort_keys=True,
        )
        for row in rows
    ]


def first_difference(
    mine: Sequence[CollectiveRow], theirs: Sequence[dict[str, Any]]
) -> tuple[int, str, Any, Any] | None:
    """(position, field, my value, their value) of the first divergence; field "collective" where one has no
    more."""
    for position in range(max(len(mine), len(theirs))):
        if position >= len(mine):
            return position, "collective", None, theirs[position]
        if position >= len(theirs):
            return position, "collective", comparable(mine[position]), None
        ours, other = comparable(mine[position]), theirs[position]
        for name in FIELDS:
            a, b = ours[name], other.get(name)
            if a != b and not (name == "numel" and (a is None or b is None)):
                return position, name, a, b
    return None


def digests(rows: Sequence[CollectiveRow]) -> dict[str, str]:
    """sha256 of what other ranks compare: `WHOLE` over all rows, and over the rows of each group by its
    name."""
    by_group: dict[str, list[dict[str, Any]]] = {WHOLE: [comparable(row) for row in rows]}
    for row in by_group[WHOLE]:
        if row["group"] is not None:
            by_group.setdefault(row["group"], []).append(row)
    return {k: sha256(v) for k, v in by_group.items()}


def comparable(row: CollectiveRow) -> dict[str, Any]:
    """The fields of a row that other ranks compare, as JSON values."""
    values = {name: getattr(row, name) for name in FIELDS}
    values["params"] = None if row.params is None else list(row.params)
    if row.transport in _UNEVEN:
        values["numel"] = None
    return values
