"""The proof of ``python -m benchmarks policy --prove``: which process must hit and which must miss, as a table."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import torch

from .measure import show

Row = dict[str, Any]


def missed(row: Row) -> bool:
    """Neither level knew it: one graph for AOTAutograd, its forward and its backward for Inductor."""
    return (row["aot_miss"], row["aot_hit"], row["fx_miss"], row["fx_hit"]) == (1, 0, 2, 0)


def hit(row: Row) -> bool:
    """AOTAutogradCache had the whole."""
    return (row["aot_miss"], row["aot_hit"]) == (0, 1)


def fx_hit(row: Row) -> bool:
    """With AOTAutogradCache off, FxGraphCache had forward and backward."""
    return (row["aot_hit"], row["fx_hit"], row["fx_miss"]) == (0, 2, 0)


@dataclass(frozen=True, slots=True)
class Wanted:
    """One process: what it runs, what its caches must say, and whose keys it must have, byte for byte."""

    name: str
    says: str
    holds: Callable[[Row], bool]
    keys_of: str | None = None
    aot: str = "1"


PLAN = (
    (Wanted("torch", "miss at both", missed),),
    (
        Wanted("A", "miss at both", missed),
        Wanted("none", "hit, keys of torch", hit, "torch"),
        Wanted("idle", "hit, keys of torch", hit, "torch"),
    ),
    (
        Wanted("B", "miss at both", missed),
        Wanted("A", "hit, keys of A", hit, "A"),
        *(Wanted(f"A, {what}", "miss at both", missed) for what in ("helper", "constant", "default", "python")),
    ),
    (
        Wanted("B", "hit, keys of B", hit, "B"),
        Wanted("none", "hit, keys of torch", hit, "torch"),
        Wanted("A", "hit, keys of A", hit, "A"),
        Wanted("none", "FX hit alone, keys of torch", fx_hit, "torch", aot="0"),
        Wanted("A", "FX hit alone, keys of A", fx_hit, "A", aot="0"),
        Wanted("B", "FX hit alone, keys of B", fx_hit, "B", aot="0"),
    ),
)
"""All on one cache folder. Each group starts when the one before has ended, so that what must miss beside an entry
finds it there; within a group nobody reads what another writes. A policy's first process must miss, later ones hit."""


def prove(device: str, *, as_json: bool, processes: int = 1) -> int:
    """Run the plan, a fresh process a row, up to ``processes`` at once; print the table; 0 when every row holds."""
    rows = []
    first: dict[str, Row] = {}
    with tempfile.TemporaryDirectory(prefix="policy-proof-") as folder, ThreadPoolExecutor(processes) as pool:
        for group in PLAN:
            for wanted, row in zip(group, pool.map(lambda one: fresh(one, device, folder), group), strict=True):
                if row is None:
                    return 1
                same = None if wanted.keys_of is None else same_keys(row, first[wanted.keys_of])
                first.setdefault(wanted.name, row)
                holds = wanted.holds(row) and row["right"] and not row["tables_changed"] and same is not False
                print(f"{wanted.name}: {'holds' if holds else 'DOES NOT HOLD'}", file=sys.stderr, flush=True)
                rows.append({**row, "wanted": wanted.says, "same_keys": "" if same is None else same, "holds": holds})
    table(rows, device, as_json=as_json)
    distinct = distinct_keys([first[name] for name in first if name not in ("none", "idle")])
    print(f"keys: {distinct}", file=sys.stderr if as_json else sys.stdout)
    return 0 if all(row["holds"] for row in rows) and not distinct.startswith("NOT") else 1


def fresh(wanted: Wanted, device: str, folder: str) -> Row | None:
    """One row in a process of its own; None, and its error printed, when that fails."""
    environment = {
        **os.environ, "TORCHINDUCTOR_CACHE_DIR": folder, "TORCHINDUCTOR_AUTOGRAD_CACHE": wanted.aot,
        "TORCHINDUCTOR_FX_GRAPH_CACHE": "1", "OMP_NUM_THREADS": "1",
    }  # fmt: skip
    command = [sys.executable, "-m", "benchmarks.policy_row", wanted.name, device]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    if done.returncode:
        print(f"{' '.join(command)} failed:\n{done.stderr[-3000:]}", file=sys.stderr)
        return None
    return json.loads(done.stdout.splitlines()[-1])  # type: ignore[no-any-return]


def same_keys(row: Row, first: Row) -> bool:
    """Whether every key that this process asked for is one of the first's, at each level that was asked."""
    asked = [(cache, key) for cache in ("aot", "fx") for key in row["keys"][cache]]
    return bool(asked) and all(key in first["keys"][cache] for cache, key in asked)


def distinct_keys(rows: list[Row]) -> str:
    """In words: whether no two of these have a key in common."""
    def pairs() -> Iterator[str]:
        for cache in ("aot", "fx"):
            for i, one in enumerate(rows):
                for other in rows[:i]:
                    if set(one["keys"][cache]) & set(other["keys"][cache]):
                        yield f"{one['policy']} and {other['policy']} share one of {cache}"

    shared = list(pairs())
    names = "; ".join(row["policy"] for row in rows)
    return f"NOT distinct: {'; '.join(shared)}" if shared else f"no two of [{names}] share one, at either level"


def table(rows: list[Row], device: str, *, as_json: bool) -> None:
    """For a reviewer: rich where it is installed, aligned text otherwise; then what is wrong, if anything."""
    title = f"operator policies, torch {torch.__version__}, device {device}, one process a row"
    names = (
        "policy", "wanted", "aot_hit", "aot_miss", "fx_hit", "fx_miss", "same_keys", "right", "tables_changed", "holds",
    )  # fmt: skip
    if as_json:
        for row in rows:
            show({**row, "torch": torch.__version__, "device": device}, as_json=True)
    elif importlib.util.find_spec("rich"):
        from rich.console import Console
        from rich.table import Table

        made = Table(*names, title=title)
        for row in rows:
            made.add_row(*(str(row[name]) for name in names))
        Console(width=150).print(made)
    else:
        print(title)
        widths = {name: 1 + max(len(name), *(len(str(row[name])) for row in rows)) for name in names}
        for line in (dict(zip(names, names, strict=True)), *rows):
            print("".join(f"{line[name]!s:{widths[name]}}" for name in names))
    for row in rows:
        for bad in row["wrong"]:
            print(f"{row['policy']}: {bad}", file=sys.stderr)
