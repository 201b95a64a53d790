"""How much faster does the second process compile? The example trains two steps, twice, in fresh processes.

    python examples/warm_start.py [--nproc N] [options of train_fsdp2.py]

Both runs share one new cache folder: the first misses torch's two compile caches, the second hits them. Prints for
each the seconds that compiling took on rank 0, from Dynamo to the last line of generated code, forward and backward,
without imports; and what the caches said. Ends with 1 if the second run is not from the caches.

What a CPU's compiler and processor can do is found out once for each cache folder, in a run of its own before both.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
CHILD = "WARM_START_RUN_DIR"
PREPARE = "import torch; torch.compile(lambda x: x.exp() + 1)(torch.ones(64))"


def child(argv: list[str]) -> None:
    """One rank of one run: train, and print on rank 0 what compiling took."""
    sys.path.insert(0, str(HERE))
    from torch._dynamo.utils import calculate_time_spent, counters
    from train_fsdp2 import captured, cluster, parse

    options = parse(["--steps", "2", *argv, "--run-dir", os.environ[CHILD]], world=int(os.environ["WORLD_SIZE"]))
    with cluster(options) as ranks:
        _, outcome = captured(options, ranks)
    if ranks.rank == 0:
        found = {
            "seconds": calculate_time_spent()["total_wall_time"],
            "AOTAutogradCache": {kind: counters["aot_autograd"][f"autograd_cache_{kind}"] for kind in ("hit", "miss")},
            "FxGraphCache": {kind: counters["inductor"][f"fxgraph_cache_{kind}"] for kind in ("hit", "miss")},
            "failures": list(outcome.failures),
        }
        print(json.dumps(found), flush=True)
    sys.stderr.flush()
    os._exit(0)  # as train_fsdp2.py does


def run(processes: str, argv: list[str], folder: Path, name: str) -> dict[str, Any]:
    """Start one run under torchrun and return what its rank 0 printed."""
    caches = {
        "OMP_NUM_THREADS": "1",
        "TORCHINDUCTOR_FX_GRAPH_CACHE": "1",
        "TORCHINDUCTOR_AUTOGRAD_CACHE": "1",
        "TORCHINDUCTOR_CACHE_DIR": str(folder / "cache"),
    }
    env = {**os.environ, **caches, CHILD: str(folder / name)}
    if name == "cold":
        subprocess.run([sys.executable, "-c", PREPARE], env=env, check=True)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", processes]
    done = subprocess.run([*torchrun, __file__, *argv], env=env, stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def said(cache: dict[str, int]) -> str:
    """What one cache said: ``2 hit``, ``1 miss``, or ``not asked``."""
    return ", ".join(f"{count} {kind}" for kind, count in cache.items() if count) or "not asked"


def main(argv: list[str]) -> int:
    """Return 0 if the second run was taken from the caches and both were right."""
    processes = "2"
    if argv[:1] == ["--nproc"] and len(argv) > 1:
        processes, argv = argv[1], argv[2:]
    found = {}
    with tempfile.TemporaryDirectory(prefix="warm-start-") as folder:
        for name in ("cold", "warm"):
            found[name] = one = run(processes, argv, Path(folder), name)
            print(
                f"{name} {one['seconds']:7.2f} s   AOTAutogradCache: {said(one['AOTAutogradCache'])}   "
                f"FxGraphCache: {said(one['FxGraphCache'])}",
                flush=True,
            )
    print(f"warm is {found['cold']['seconds'] / found['warm']['seconds']:.1f} times as fast")
    for name, one in found.items():
        for failure in one["failures"]:
            print(f"warm_start.py: {name} run: {failure}", file=sys.stderr)
    missed = found["warm"]["FxGraphCache"]["miss"] or not found["warm"]["FxGraphCache"]["hit"]
    return 1 if missed or any(one["failures"] for one in found.values()) else 0


if __name__ == "__main__":
    if CHILD in os.environ:
        child(sys.argv[1:])
    sys.exit(main(sys.argv[1:]))
