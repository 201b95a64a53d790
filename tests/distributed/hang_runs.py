"""Ranks that stand still on purpose, and one of them, in a thread of its own, running `collective-identity watch`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

import collective_identity as ci
from inductor_passes.backend import collective_identity

SKIPPED_CALL = 2
"""The call of the forward graph in which the last rank skips its all-reduce."""


def functional(x: torch.Tensor, name: str, ranks: int) -> torch.Tensor:
    """Gather, multiply, reduce: three collectives, the last an all-reduce."""
    ops = torch.ops._c10d_functional
    whole = ops.wait_tensor(ops.all_gather_into_tensor(x, ranks, name))
    part = ops.wait_tensor(ops.reduce_scatter_tensor(whole * 2, "sum", ranks, name))
    total: torch.Tensor = ops.wait_tensor(ops.all_reduce(part, "sum", name))
    return total + 1


def skipping_all_reduce(flag: threading.Event) -> torch.library.Library:
    """An all-reduce that does nothing while the flag is set: what a fault in a communication library looks like."""

    def kernel(x: torch.Tensor, op: str, name: str) -> torch.Tensor:
        out = x.clone()
        if not flag.is_set():
            dist.all_reduce(out, group=distributed_c10d._resolve_process_group(name))  # type: ignore[arg-type]
        return out

    library = torch.library.Library("_c10d_functional", "IMPL")
    library.impl("all_reduce", kernel, "CPU")
    return library


def compiled() -> Any:
    torch._dynamo.reset()
    return torch.compile(functional, backend=collective_identity, fullgraph=True, options={"inner": "aot_eager"})


def train_until_it_hangs(rank: int, ranks: int, folder: str, watching: bool) -> None:
    """Each step calls one graph, then meets the others in a barrier on a group of its own."""
    flag = threading.Event()
    library = skipping_all_reduce(flag) if rank == ranks - 1 else None
    everyone = dist.new_group()
    name = dist.group.WORLD.group_name  # type: ignore[union-attr]
    session = ci.enable(run_dir=folder, agreement_timeout=30)
    step = compiled()
    if watching:
        threading.Thread(target=watch_and_end, args=(Path(folder), ranks), daemon=True).start()
    threading.Thread(target=end_when_seen, args=(Path(folder),), daemon=True).start()
    try:
        for call in range(SKIPPED_CALL + 1):
            dist.barrier(group=everyone)
            if call == SKIPPED_CALL:
                if library is not None:
                    flag.set()
                Path(folder, f"hangs{rank}").write_text(str(time.time()))
            step(torch.ones(4), name, ranks)
        dist.barrier(group=everyone)
    except RuntimeError:
        if not Path(folder, "seen").exists():
            raise
        os._exit(0)  # the others have seen it and ended a moment before
    session.close()
    raise AssertionError(f"rank {rank}: expected to hang, did not")


def watch_and_end(folder: Path, ranks: int) -> None:
    """Once every rank has begun the call that hangs, run the command and keep what it said, and when.

    The first has imported torch by then, like one that runs beside the job; the second starts from nothing.
    """
    begin = "import sys, time; from pathlib import Path; from collective_identity.cli import main"
    wait = f"\nwhile len(list(Path({str(folder)!r}).glob('hangs*'))) < {ranks}: time.sleep(0.02)\nmain()"
    command = ["watch", str(folder), "--once", "--wait", "30"]
    beside = subprocess.Popen(
        [sys.executable, "-c", begin + wait, *command, "--json"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    while len(list(folder.glob("hangs*"))) < ranks:
        time.sleep(0.02)
    hangs = max(float(path.read_text()) for path in folder.glob("hangs*"))
    said = [beside.communicate(timeout=60)]
    seconds = time.time() - hangs
    cold = subprocess.run(
        [sys.executable, "-c", f"{begin}; main()", *command], capture_output=True, text=True, timeout=60, check=False
    )
    said.append((cold.stdout, cold.stderr))
    outcome = {
        "json": json.loads(said[0][0]) if beside.returncode == 1 else None,
        "text": said[1][0],
        "errors": said[0][1] + said[1][1],
        "codes": [beside.returncode, cold.returncode],
        "seconds": seconds,
        "cold_seconds": time.time() - hangs - seconds,
    }
    (folder / "seen.new").write_text(json.dumps(outcome))
    (folder / "seen.new").rename(folder / "seen")


def end_when_seen(folder: Path) -> None:
    while not (folder / "seen").exists():
        time.sleep(0.05)
    time.sleep(0.5)
    os._exit(0)


def begin_again(rank: int, ranks: int, folder: Path) -> None:
    """In the first start of a job the last rank publishes a graph that the others have not, and dies."""
    if (folder / "failed").exists():
        return
    if rank == ranks - 1:
        with ci.enable(agreement_timeout=0.5):
            alone = dist.new_group([rank], use_local_synchronization=True)
            compiled()(torch.ones(1), alone.group_name, 1)
        (folder / "failed").touch()
        os._exit(3)
    time.sleep(600)  # until torchrun ends this process


if __name__ == "__main__":  # under torchrun: the rank and the store are its own
    dist.init_process_group("gloo")
    here = dist.get_rank(), dist.get_world_size()
    dist.barrier()
    begin_again(*here, Path(sys.argv[1]))
    train_until_it_hangs(*here, sys.argv[1], dist.get_rank() == 0)
