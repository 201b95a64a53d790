"""Operator policies: what they cost, and the proof that they isolate and are in both cache keys.

``python -m benchmarks policy`` measures cold compiles and calls, stock against a policy in the same run.
``python -m benchmarks policy --prove`` starts a fresh process per row of its table, all on one cache folder.
``--device cuda`` takes a real accelerator instead of the test device on host memory.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import tempfile
import time
from typing import Any

import torch

from .measure import parser, show
from .policy_case import Tables, backend, inputs, install, mixed, wrong

ROWS = ("none", "A", "A", "B", "B", "none", "A")


def main() -> int:
    options = parser(__doc__ or "")
    options.add_argument("--prove", action="store_true", help="print the isolation and cache proof as a table")
    options.add_argument("--device", default="polydev", help="polydev (built here, needs a C++ compiler) or cuda")
    options.add_argument("--repeat", type=int, default=5, help="pairs of cold compiles to measure")
    options.add_argument("--one", help="run one row in this process and print it (the proof uses this)")
    given = options.parse_args()
    if given.prove:
        return prove(given.device, as_json=given.json)
    install(given.device)
    torch.compile(lambda a: a + 1)(torch.ones(4).to(given.device))  # torch fills its own tables lazily
    if given.one:
        print(json.dumps(one(given.one, given.device)), flush=True)
        os._exit(0)
    return measure(given.device, given.repeat, as_json=given.json)


def one(name: str, device: str) -> dict[str, Any]:
    """One compile in a fresh process: is it right, which caches hit, did a table change."""
    from torch._dynamo.utils import counters

    tables = Tables()
    counters.clear()
    bad = wrong(torch.compile(mixed, backend=backend(name, device), fullgraph=True), name, device)
    aot, fx = counters["aot_autograd"], counters["inductor"]
    return {
        "policy": name,
        "right": not bad,
        "aot_hit": aot["autograd_cache_hit"], "aot_miss": aot["autograd_cache_miss"],
        "fx_hit": fx["fxgraph_cache_hit"], "fx_miss": fx["fxgraph_cache_miss"],
        "tables_changed": tables.changed(),
        "wrong": bad,
    }  # fmt: skip


def prove(device: str, *, as_json: bool) -> int:
    """Each row in a fresh process; the first of a policy must miss at both levels, the next must hit AOTAutograd's.

    The last column of the second hit is asked with AOTAutogradCache off, so that FxGraphCache answers alone.
    """
    rows, seen = [], set()
    with tempfile.TemporaryDirectory(prefix="policy-proof-") as folder:
        for name, aot in [(name, "1") for name in ROWS] + [(name, "0") for name in ("none", "A", "B")]:
            environment = {
                **os.environ, "TORCHINDUCTOR_CACHE_DIR": folder, "TORCHINDUCTOR_AUTOGRAD_CACHE": aot,
                "TORCHINDUCTOR_FX_GRAPH_CACHE": "1", "OMP_NUM_THREADS": "1",
            }  # fmt: skip
            command = [sys.executable, "-m", "benchmarks", "policy", "--one", name, "--device", device]
            done = subprocess.run(command, env=environment, capture_output=True, text=True)
            if done.returncode:
                print(done.stderr[-3000:], file=sys.stderr)
                return 1
            row = json.loads(done.stdout.splitlines()[-1])
            again = name in seen
            seen.add(name)
            if aot == "0":
                fits = row["fx_hit"] > 0 and row["fx_miss"] == 0
            elif again:
                fits = row["aot_hit"] == 1 and row["aot_miss"] == 0
            else:
                fits = row["aot_miss"] == 1 and row["aot_hit"] == 0 and row["fx_miss"] == 2 and row["fx_hit"] == 0
            wanted = "FX hit alone" if aot == "0" else "hit" if again else "miss at both"
            rows.append({**row, "wanted": wanted, "holds": fits and row["right"] and not row["tables_changed"]})
    table(rows, device, as_json=as_json)
    return 0 if all(row["holds"] for row in rows) else 1


def table(rows: list[dict[str, Any]], device: str, *, as_json: bool) -> None:
    """For a reviewer: rich where it is installed, aligned text otherwise."""
    title = f"operator policies, torch {torch.__version__}, device {device}, one process a row"
    names = ("policy", "wanted", "aot_hit", "aot_miss", "fx_hit", "fx_miss", "right", "tables_changed", "holds")
    if as_json:
        for row in rows:
            show({**row, "torch": torch.__version__, "device": device}, as_json=True)
    elif importlib.util.find_spec("rich"):
        from rich.console import Console
        from rich.table import Table

        made = Table(*names, title=title)
        for row in rows:
            made.add_row(*(str(row[name]) for name in names))
        Console().print(made)
    else:
        print(title)
        for line in (dict(zip(names, names, strict=True)), *rows):
            print("".join(f"{line[name]!s:16}" for name in names))


def measure(device: str, repeat: int, *, as_json: bool) -> int:
    """Cold compiles and calls in pairs, stock then policy C (same kernels but for two eager calls); least of each."""
    compile_s: dict[str, list[float]] = {"none": [], "C": []}
    call_us: dict[str, list[float]] = {"none": [], "C": []}
    from torch._inductor import config

    with config.patch(force_disable_caches=True):
        for _ in range(repeat + 1):
            for name in compile_s:
                torch._dynamo.reset()
                start = time.process_time()
                compiled = torch.compile(mixed, backend=backend(name, device), fullgraph=True)
                wrong(compiled, name, device)
                compile_s[name].append(time.process_time() - start)
                x, y, w = inputs(device)
                start = time.process_time()
                for _ in range(200):
                    compiled(x, y, w)
                call_us[name].append((time.process_time() - start) * 5e3)
    stock, ours = (min(compile_s[name][1:]) for name in ("none", "C"))
    row = {
        "torch": torch.__version__, "device": device, "stock_s": stock, "policy_s": ours,
        "stock_call_us": min(call_us["none"]), "policy_call_us": min(call_us["C"]),
        "overhead_percent": 100 * (ours / stock - 1), "ratio": stock / ours,
    }  # fmt: skip
    show(row, as_json=as_json)
    return 0
