"""Compile seconds of N equal FSDP2 blocks: captured whole, cold and warm, against each block compiled by itself.

``python -m benchmarks compile_time [--json] [--blocks 2 4 8] [--no-kernels] [--inner aot_eager]``, or, of a model that
`train` measures, in bf16 mixed precision, ``--model 1b --device cuda``. Every figure is of a fresh process in a
pretended world of two ranks on one device, with a cache folder that is new (cold) or left by the cold run (warm).
Beside `per_block` and `captured`: `packed`, captured with ``kernels="triton"``; `whole`, the model without FSDP as one
graph, which torch compiles block after block however equal they are; `gathers`, whose blocks multiply their input with
one row of each parameter, is what the collectives alone cost to compile; `regions`, whose blocks compute in a nested
compile region that is given their gathered parameters, has one body for all of them (docs/results.md says what is in
its way).

Ratios are of processor seconds on the CPU: `python_s` of the compiling thread and `compiler_s` of the C++ compiler and
other children. On CUDA they are of the clock's (`wall_s`, the first step included), because Triton compiles in worker
processes, which `compiler_s` does not see. `--no-kernels` leaves the C++ compiler out, so the values computed mean
nothing. `phases` are parts of `python_s` by torch's own timers, some inside others; `ours_s` is everything of this
package, keys, tables and report included; `passes_s` its passes alone, by the clock.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from argparse import Namespace
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch

from benchmarks.compile_once import WAYS, Work, measure
from benchmarks.measure import parser, show
from benchmarks.models import SHAPES, Shape

Row = Mapping[str, Any]

TOKENS = MappingProxyType({None: (2, 64), "tiny": (2, 64), "1b": (4, 2048)})
"""Sequences and tokens of each, by model."""


def work_of(given: Namespace, blocks: int) -> Work:
    """The model that the command line asks for, with so many blocks, and its tokens."""
    small = Shape(vocabulary=300, width=given.width, heads=4, layers=blocks)
    shape = replace(SHAPES[given.model], layers=blocks) if given.model else small
    batch, window = TOKENS[given.model]
    return Work(shape, given.device, bool(given.model), batch, window)


def in_new_process(way: str, blocks: int, given: Namespace, cache: Path) -> dict[str, Any]:
    """`measure` in a process of its own, whose compile caches are in ``cache``."""
    command = [sys.executable, "-m", "benchmarks", "compile_time", "--only", way, "--blocks", str(blocks)]
    for name in ("model", "device", "width", "inner"):
        value = getattr(given, name)
        command += [] if value is None else [f"--{name}", str(value)]
    command += ["--no-kernels"] if given.no_kernels else []
    places = {"TORCHINDUCTOR_CACHE_DIR": str(cache), "TRITON_CACHE_DIR": str(cache / "triton")}
    done = subprocess.run(command, env={**os.environ, **places}, stdout=subprocess.PIPE, text=True, check=True)
    return dict(json.loads(done.stdout.splitlines()[-1]))


def rows_of(given: Namespace, blocks: int) -> Iterator[dict[str, Any]]:
    """The rows of one number of blocks: each way cold, and warm after that where it is asked for."""
    for way in given.ways:
        with tempfile.TemporaryDirectory(prefix="compile-time-", ignore_cleanup_errors=True) as name:
            for what in ("cold", "warm") if way in given.warm else ("cold",):
                yield {"what": what, **in_new_process(way, blocks, given, Path(name))}


def ratios(rows: Sequence[Row], *, clock: bool) -> dict[str, Any]:
    """What the rows of one number of blocks say.

    Args:
        rows: of `rows_of`.
        clock: compare the clock's seconds, not the processor's.
    """

    def seconds(row: Row) -> float:
        return float(row["wall_s"]) if clock else float(row["python_s"]) + float(row["compiler_s"])

    cold = {row["way"]: row for row in rows if row["what"] == "cold"}
    warm = {row["way"]: row for row in rows if row["what"] == "warm"}
    made: dict[str, Any] = {"what": "ratios", "blocks": rows[0]["blocks"], "seconds": "wall" if clock else "processor"}
    if "per_block" in cold:
        base = seconds(cold["per_block"])
        made.update({f"{way}_to_per_block": seconds(row) / base for way, row in cold.items() if way != "per_block"})
    made.update({f"{way}_cold_to_warm": seconds(cold[way]) / seconds(row) for way, row in warm.items()})
    made.update({f"{way}_ours_share": row["ours_s"] / seconds(row) for way, row in cold.items() if row["ours_s"]})
    passes = {way: row["passes_s"] for way, row in cold.items() if row["passes_s"]}
    made.update({f"{way}_passes_share": spent / cold[way]["wall_s"] for way, spent in passes.items()})
    return made


def _arguments() -> Namespace:
    options = parser("compile seconds of equal blocks")
    options.add_argument("--model", choices=("tiny", "1b"), help="of `train`, in bf16; default: small blocks in fp32")
    options.add_argument("--blocks", type=int, nargs="+", help="default: the model's, else 2 4 8")
    options.add_argument("--width", type=int, default=64, help="of the small blocks")
    options.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    options.add_argument("--inner", choices=("inductor", "aot_eager"), default="inductor")
    options.add_argument("--no-kernels", action="store_true", help="leave the C++ compiler out")
    options.add_argument("--ways", nargs="+", choices=WAYS, help="default: all; of a model the first four")
    options.add_argument("--warm", nargs="*", choices=WAYS, default=WAYS[:2], help="of which a warm start is measured")
    options.add_argument("--only", choices=WAYS, help="one way, once, in this process")
    given = options.parse_args()
    given.blocks = given.blocks or ([SHAPES[given.model].layers] if given.model else [2, 4, 8])
    given.ways = given.ways or (WAYS[:4] if given.model else WAYS)
    return given


def main() -> int:
    """Run the benchmark; exit code 1 if our own part of a whole cold compile is over 1 %."""
    given = _arguments()
    if given.only:
        (blocks, *_) = given.blocks
        row = measure(given.only, work_of(given, blocks), inner=given.inner, kernels=not given.no_kernels)
        show(row, as_json=True)
        return 0
    about = {key: getattr(given, key) for key in ("model", "device", "inner")}
    show({"benchmark": "compile_time", "torch": torch.__version__, **about}, as_json=given.json)
    held = True
    for blocks in given.blocks:
        rows = []
        for row in rows_of(given, blocks):
            rows.append(row)
            show(row, as_json=given.json)
        last = ratios(rows, clock=given.device == "cuda")
        show(last, as_json=given.json)
        held &= given.inner != "inductor" or given.no_kernels or last.get("captured_ours_share", 0) <= 0.01
    return 0 if held else 1
