"""What diagnostics cost: bytes a collective, seconds of a report, share of a cold compile.

``python -m benchmarks diagnostics [--json] [--collectives 100000] [--layers 8]``. Processor seconds; the report's are
those of a new process, Python and torch included. Exit code 1 when a promise is not kept: 200 bytes a collective and
32 an event, 5 s for the report, 0.5 % of a compile.
"""

from __future__ import annotations

import logging
import resource
import subprocess
import sys
import tempfile
import time
import tracemalloc
from pathlib import Path
from typing import Any

import torch

from benchmarks.identity import captured
from benchmarks.measure import Stopwatch, parser, show
from collective_identity import codes
from collective_identity.ledger import GraphLog, Ledger
from collective_identity.reporting import read_run
from collective_identity.reporting.records import EventRecord, FinishRecord
from collective_identity.storage import Storage
from tests.large_run import write

_COMMAND = "from collective_identity.cli import main; main()"


def memory(folder: Path, collectives: int) -> dict[str, Any]:
    """Bytes that stay allocated for a run's records once its names and FQNs exist."""
    records = read_run(folder)[0].records
    numbers = {record.graph for record in records if isinstance(record, FinishRecord)}
    tracemalloc.start()
    try:
        store = Storage()
        for record in records:
            store.append(record)
        for number in numbers:
            store.graph_ended(number)
        rows = tracemalloc.get_traced_memory()[0]
        code = codes.MOVED_PAYLOAD
        what = (code.id, code.slug, code.severity, code.text, code.remedy)
        before = tracemalloc.get_traced_memory()[0]
        for i in range(collectives):  # each of a node, parameter and detail of its own
            own = {"params": (f"layers.{i // 8}.weight_{i % 8}",), "stack": f"model.py:{i % 400} in forward"}
            store.append(EventRecord(9, *what, f"node_{i}", detail=f"from wait_tensor_{i} to node_{i}", **own))  # type: ignore[arg-type]
        store.graph_ended(9)
        events = tracemalloc.get_traced_memory()[0] - before
    finally:
        tracemalloc.stop()
    return {"bytes_per_collective": rows / collectives, "bytes_per_event": events / collectives}


def seconds_of(*arguments: str) -> tuple[float, float]:
    """Wall and processor seconds of the command in a new process."""
    before, start = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    subprocess.run([sys.executable, "-c", _COMMAND, *arguments], check=True, stdout=subprocess.DEVNULL)
    wall, after = time.perf_counter() - start, resource.getrusage(resource.RUSAGE_CHILDREN)
    return wall, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def compile_share(layers: int, folder: Path) -> dict[str, Any]:
    """The ledger's share of a cold compile without Inductor, the shortest: INFO is on, a run folder kept."""
    root = logging.getLogger("collective_identity")
    handler = logging.FileHandler(folder / "info.log")
    root.addHandler(handler)
    root.setLevel(logging.INFO)
    watch = Stopwatch()
    methods = ("captured", "event", "pass_ran", "finish", "failed")
    try:
        with watch.attached(GraphLog, *methods), watch.attached(Ledger, "begin_graph", "declare"):
            graphs, compile_s = captured(layers, run_dir=folder / "compiled")
    finally:
        root.removeHandler(handler)
        handler.close()
    lines = len((folder / "info.log").read_text().splitlines())
    row = {"compile_s": compile_s, "ledger_s": watch.seconds, "share": watch.seconds / compile_s}
    return {"graphs": len(graphs), "info_lines": lines, **row}


def main() -> int:
    """Run the benchmark."""
    options = parser("what diagnostics cost")
    options.add_argument("--collectives", type=int, default=100_000)
    options.add_argument("--layers", type=int, default=8, help="layers of the captured model (default 8)")
    given = options.parse_args()
    show({"benchmark": "diagnostics", "torch": torch.__version__}, as_json=given.json)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write(folder / "run", given.collectives)
        kept = memory(folder / "run", given.collectives)
        show({"what": "ledger", "collectives": given.collectives, **kept}, as_json=given.json)
        wall, processor = seconds_of("report", str(folder / "run"))
        show({"what": "report", "wall_s": wall, "processor_s": processor}, as_json=given.json)
        page_wall, page_processor = seconds_of("report", str(folder / "run"), "--html")
        size = (folder / "run" / "report.html").stat().st_size / 1e6
        page = {"wall_s": page_wall, "processor_s": page_processor, "page_mb": size}
        show({"what": "report --html", **page}, as_json=given.json)
        share = compile_share(given.layers, folder)
        show({"what": "compile without Inductor, INFO on", **share}, as_json=given.json)
    held = {
        "bytes_per_collective": kept["bytes_per_collective"] <= 200,
        "bytes_per_event": kept["bytes_per_event"] <= 32,
        "report": processor <= 5,
        "compile": share["share"] <= 0.005,
    }
    show({"what": "kept", **held}, as_json=given.json)
    return 0 if all(held.values()) else 1


if __name__ == "__main__":
    raise SystemExit(main())
