"""How does the life of one collective read in a terminal? What `explain` found, a block for each that is left."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import groupby
from typing import IO, Any

from rich.text import Text

from .terminal import STYLE, console_for, print_sentence, readable


def render_explanation(found: list[dict[str, Any]], *, file: IO[str] | None = None) -> None:
    """Print what `explanation.explain` found: one block for what became one collective."""
    console = console_for(file, None)
    for _, several in groupby(found, key=lambda one: (one["graph"], one["merged_into"] or one["node"])):
        for text, style in _block(list(several)):
            print_sentence(console, Text(text, style=style))


def _block(ones: list[dict[str, Any]]) -> Iterator[tuple[str, str]]:
    """The lines of one block, each with its style. What the block's collectives share is said once."""
    first = ones[0]
    into = first["merged_into"]
    here = f"rank {first['rank']}, {first['graph']} graph"
    if into is None:
        yield f"{first['node']}, {here}: {first['verdict']}", "bold"
    else:
        role = "" if first["after"] is None else f", which is {first['after']['role'] or 'without a role'}"
        yield f"{into}, {here}: {len(ones)} of its {len(first['members'])} members{role}", "bold"
    for one in ones:
        name = "" if into is None else f" {one['node']}"
        yield f"  captured{name}: {_said(one['captured'])}", ""
    yield f"  after: {_said(first['after'])}", ""
    if first["members"]:
        yield f"  merged, in order: {', '.join(first['members'])}", ""
    told = {repr(event): event for one in ones for event in one["events"]}
    for event in told.values():
        by = f" by pass {event['pass_name']}" if event["pass_name"] else ""
        at = f", at {event['stack']}" if event["stack"] else ""
        node = f" {event['node']}" if len(ones) > 1 else ""
        text = f"  {event['code']} {event['slug']}{node}{by}: {event['text']}. {event['detail']}{at}. {event['remedy']}"
        yield text, STYLE.get(event["severity"], "")
    if first["cached"]:
        yield "  from a compile cache: no pass ran; this is what the passes did when the artifact was made", ""
    else:
        yield f"  passes that changed the graph: {', '.join(first['passes']) or 'none'}", ""


def _said(row: dict[str, Any] | None) -> str:
    if row is None:
        return "not there"
    size = "unknown size" if row["nbytes"] is None else readable(row["nbytes"])
    parts = [
        f"{row['transport']} ({row['form']}) on group {row['group']} of {row['group_size']}",
        row["reduce_op"],
        f"{row['dtype']}, {size}",
        f"{row['role'] or 'no role'}" + (f" {row['source']} by {row['producer']}" if row["source"] else ""),
        row["param_group"] and f"unit {row['param_group']}",
        row["params"] and f"parameters {', '.join(row['params'][:8])}" + (" ..." * (len(row["params"]) > 8)),
    ]
    return "; ".join(part for part in parts if part)
