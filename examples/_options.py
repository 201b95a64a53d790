"""The example's command line: what can be asked for, and what cannot."""

from __future__ import annotations

import argparse
import os
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NoReturn

COMMAND = "torchrun --standalone --nproc-per-node {processes} examples/train_fsdp2.py{options}"
EPILOG = """
Start it with torchrun. Two processes train with FSDP2:
  {}
Four processes train with HSDP, or with FSDP2 over tensor parallelism:
  {}
  {}
""".format(
    COMMAND.format(processes=2, options=" --check-against-eager"),
    COMMAND.format(processes=4, options=" --mesh 2x2"),
    COMMAND.format(processes=4, options=" --tp"),
)


class Unusable(Exception):
    """The options make sense, but not here: the message says what to change. Raised on every rank alike."""


@dataclass(frozen=True, slots=True)
class Options:
    """What one run does; every rank has the same."""

    eager: bool
    check_against_eager: bool
    tolerance: float | None
    mode: Literal["optimize", "observe"]
    inner: str
    bucketing: bool
    plant: str | None
    mesh: tuple[int, ...]
    tp: bool
    sequence_parallel: bool
    precision: str
    reshard: bool | None
    steps: int
    accumulate: int
    clip: float | None
    rate: float
    seed: int
    batch: int
    window: int
    layers: int
    width: int
    hidden: int
    heads: int
    tied: bool
    freeze: tuple[str, ...]
    device: str
    save: Path | None
    resume: Path | None
    run_dir: Path | None

    @property
    def mesh_names(self) -> tuple[str, ...]:
        """Names of the mesh dimensions, outermost first."""
        if self.tp:
            return ("dp", "tp")
        return ("replicate", "shard") if len(self.mesh) == 2 else ("shard",)


def refuse(message: str) -> NoReturn:
    """End the process with status 2 and one line on rank 0's stderr.

    The other ranks wait a moment first, for torchrun stops all of them as soon as one is gone.
    """
    if int(os.environ.get("RANK", "0")) == 0:
        print(f"train_fsdp2.py: error: {message}", file=sys.stderr, flush=True)
    else:
        time.sleep(3)
    raise SystemExit(2)


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        refuse(message)


def _mesh(text: str) -> tuple[int, ...]:
    sizes = tuple(int(part) if part.isdigit() else 0 for part in text.lower().split("x"))
    if len(sizes) > 2 or min(sizes) < 1:
        raise argparse.ArgumentTypeError(f"expected N or OUTERxINNER, as in 2x2, found {text!r}")
    return sizes


def _count(text: str) -> int:
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"expected a whole number of at least 1, found {text!r}")
    return int(text)


def _parser() -> _Parser:
    parser = _Parser(
        prog="train_fsdp2.py",
        description="Train a small transformer with FSDP2, every collective captured, named and bucketed.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument_group("what to run").add_argument
    add("--eager", action="store_true", help="train with plain FSDP2, without this project")
    add("--check-against-eager", action="store_true", help="train both ways; exit 1 if the losses differ")
    add("--tolerance", type=float, help="largest relative loss difference at any step (fp32: 1e-5; bf16: twice what "
        "compiling block by block changes, measured in the same run over three seeds)")  # fmt: skip
    add("--plant", choices=("remove", "mislabel"), help="break one collective's identity: the run must exit 1")
    add = parser.add_argument_group("capture").add_argument
    add("--mode", choices=("optimize", "observe"), default="optimize", help="change graphs, or only report on them")
    add("--inner", choices=("inductor", "aot_eager"), default="inductor", help="the compiler behind the passes")
    add("--no-bucketing", action="store_true", help="leave every collective on its own")
    add = parser.add_argument_group("parallelism").add_argument
    add("--mesh", type=_mesh, help="2x2: two replicas of two shards each (HSDP); with --tp: data x tensor")
    add("--tp", action="store_true", help="FSDP2 over tensor parallelism, 2x2 unless --mesh says otherwise")
    add("--sequence-parallel", action="store_true", help="with --tp: shard activations along the window as well")
    add("--precision", choices=("fp32", "bf16"), default="fp32", help="bf16: bf16 compute, fp32 gradient reduction")
    add("--reshard", action=argparse.BooleanOptionalAction, help="free parameters after forward (FSDP2's default: "
        "every group but the root's)")  # fmt: skip
    add("--device", choices=("cpu", "cuda"), default="cpu", help="cpu with gloo, or cuda with nccl (%(default)s)")
    add = parser.add_argument_group("training").add_argument
    add("--steps", type=_count, default=20, help="train up to this step (%(default)s)")
    add("--accumulate", type=_count, default=1, help="micro-batches a step (%(default)s)")
    add("--clip", type=float, help="clip the gradient norm to this value")
    add("--rate", type=float, default=3e-3, help="AdamW's learning rate (%(default)s)")
    add("--seed", type=int, default=0, help="seed of the initial weights (%(default)s)")
    add("--batch", type=_count, default=4, help="windows a micro-batch and rank (%(default)s)")
    add("--window", type=_count, default=64, help="tokens a window (%(default)s)")
    add("--layers", type=_count, default=4, help="layers (%(default)s)")
    add("--width", type=_count, default=60, help="channels (%(default)s)")
    add("--hidden", type=_count, default=161, help="hidden units of the feed-forward part (%(default)s; rounded up "
        "to what --tp can split)")  # fmt: skip
    add("--heads", type=_count, default=6, help="attention heads (%(default)s)")
    add("--tied", action="store_true", help="use the embedding as the output head")
    add("--freeze", action="append", default=[], metavar="PATTERN", help="freeze parameters whose name matches, "
        "as in 'embed.*'; can be given several times")  # fmt: skip
    add = parser.add_argument_group("files").add_argument
    add("--save", type=Path, metavar="DIR", help="write model, optimizer and step there at the end (DCP)")
    add("--resume", type=Path, metavar="DIR", help="go on from a checkpoint that --save wrote")
    add("--run-dir", type=Path, metavar="DIR", help="folder for the report's rank*.jsonl (default: runs/TIME)")
    return parser


def parse(arguments: list[str], *, world: int | None) -> Options:
    """Return the run that ``arguments`` ask for; leave with status 2 and one clear line if they make no sense.

    ``world`` is the number of processes torchrun started, ``None`` without torchrun.
    """
    parser = _parser()
    given = vars(parser.parse_args(arguments))
    fail = parser.error
    mesh, tp = given.pop("mesh"), given["tp"]
    if tp or (mesh is not None and len(mesh) == 2):
        mesh = mesh or (2, 2)
    else:
        mesh = mesh or (world or 2,)
    if tp and len(mesh) != 2:
        fail("--tp needs a mesh of data x tensor, as in --mesh 2x2")
    _check_world(parser, mesh, tp, world)
    if given["sequence_parallel"] and not tp:
        fail("--sequence-parallel needs --tp")
    if given["eager"] and (given["check_against_eager"] or given["plant"]):
        fail("--eager trains without this project: --check-against-eager and --plant do not go with it")
    if given["width"] % (2 * given["heads"]):
        fail(f"--width {given['width']} must be a multiple of 2 x --heads = {2 * given['heads']}")
    if tp:
        given["hidden"] += -given["hidden"] % mesh[1]
        if given["heads"] % mesh[1]:
            fail(f"--heads {given['heads']} cannot be split over {mesh[1]} tensor-parallel ranks")
        if given["sequence_parallel"] and given["window"] % mesh[1]:
            fail(f"--window {given['window']} cannot be split over {mesh[1]} tensor-parallel ranks")
    if given["resume"] is not None and not (given["resume"] / ".metadata").is_file():
        fail(f"--resume {given['resume']}: no checkpoint there; write one with --save {given['resume']}")
    bucketing = not given.pop("no_bucketing")
    return Options(**{**given, "mesh": mesh, "bucketing": bucketing, "freeze": tuple(given["freeze"])})


def _check_world(parser: _Parser, mesh: tuple[int, ...], tp: bool, world: int | None) -> None:
    needed = 1
    for size in mesh:
        needed *= size
    shape = "x".join(map(str, mesh))
    options = (" --tp" if tp else "") + (f" --mesh {shape}" if len(mesh) > 1 and not (tp and mesh == (2, 2)) else "")
    run = COMMAND.format(processes=needed, options=options)
    if world is None:
        parser.error(f"start this with torchrun, as in: {run}")
    if needed != world:
        asked = f"--tp with mesh {shape}" if tp else f"--mesh {shape}"
        parser.error(f"{asked} needs {needed} processes, this run has {world}; run: {run}")
