"""The command `collective-identity watch`: where does a running job stand, and who keeps it waiting?"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any, Final, NoReturn

import typer

from ..comparison import RanksDisagree
from ..standstill import Kind, Seen, Verdict
from ..watch import PATIENCE, StoreError, Watcher, bounded, open_store
from .jsonl import RunFolderError, read_run
from .report import build_report

_AT_LEAST = 1.0  # seconds that a store is given whatever --wait says
_LOOK = 30.0  # seconds that reading all ranks may take


_DO: Final[Mapping[Kind, str]] = MappingProxyType(
    {
        "silent": "on that host: is the process there, what does dmesg say?",
        "skipped": "its log at that step: an exception that was swallowed?",
        "other_operation": "an eager collective under `if rank == ...`, or batches of different shape?",
        "behind": "its line of code below: data loading, a checkpoint, an evaluation on that rank alone?",
        "unfinished": "the network or a device: NCCL_DEBUG=INFO, the link between these hosts",
    }
)


def lines(seen: list[Seen], verdict: Verdict, difference: dict[str, Any] | None, ranks: int) -> Iterator[str]:
    """What a person reads: the cause first, then where each rank stands."""
    if difference is not None:
        yield str(RanksDisagree(**difference))
    ended = all(one.record["ended"] for one in seen) and not verdict.unheard
    if ended:
        yield f"{ranks} ranks, all have ended"
    elif verdict.stands and all(one.gone for one in seen):
        yield f"{ranks} ranks, none gives a sign of life"
    elif verdict.stands:
        yield f"{ranks} ranks, none has moved for {verdict.still:.0f} s"
    elif verdict.compiling:
        which = ", ".join(map(str, verdict.compiling))
        yield f"{ranks} ranks, not moved for {verdict.still:.0f} s while a compile goes on (ranks {which}): no hang"
    else:
        yield f"{ranks} ranks, moving"
    for number, finding in enumerate(verdict.findings):
        yield f"  {finding}"
        if number == 0:
            yield f"    look at: {_DO[finding.kind]} More: docs/my-job-hangs.md"
    if verdict.unheard:
        yield f"  not heard from ranks {list(verdict.unheard)}: they have compiled nothing yet, or never started"
    if verdict.stands and not verdict.findings and not all(one.gone for one in seen):
        yield "  no rank waits in a collective that another has not reached; look at where they stand"
    for one in seen:
        if verdict.stands or verdict.compiling or one.silent or one.old:
            yield f"  rank {one.rank} ({one.record['host']}, process {one.record['pid']}) {one.where()}"


def last_words(seen: Sequence[Seen], folder: str | None) -> tuple[int, list[str]]:
    """Exit code and text once a job's store is gone: whether it ended well, as its run folder tells, and which rank
    was heard last the longest ago."""
    text = []
    alive = sorted((one for one in seen if not one.record["ended"]), key=lambda one: one.record.get("time", 0.0))
    if len(alive) > 1:
        first, last = alive[0], alive[-1]
        gap = last.record.get("time", 0.0) - first.record.get("time", 0.0)
        every = f"each speaks every {first.record['every']:.0f} s"
        text.append(
            f"  rank {first.rank} ({first.record['host']}, process {first.record['pid']}) fell silent first, "
            f"{gap:.1f} s before rank {last.rank} ({every}); then it {first.where()}"
        )
    if seen and not alive:
        return 0, ["  every rank had ended its session"]
    try:
        reasons = build_report(read_run(folder)).faults(("unfinished",)) if folder is not None else None
    except (RunFolderError, OSError):
        reasons = None
    if reasons is None:
        unknown = "  how it ended is not known: no run folder is at hand (enable(run_dir=...)); see its own log"
        return 2, [*text, unknown]
    if not reasons:
        return 0, ["  every rank had ended its session"]
    return 1, ["  it failed, or was killed:", *(f"  {reason}" for reason in reasons), *text]


@contextmanager
def _without_torchs_words() -> Iterator[None]:
    """Torch's C++ writes a backtrace to stderr when a store is gone, which is no fault of anyone who watches."""
    sys.stderr.flush()
    kept, nowhere = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(nowhere, 2)
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
        os.close(nowhere)


def watch_command(
    where: Annotated[
        str | None,
        typer.Argument(
            metavar="[RUN|ADDRESS]",
            help="Run folder of the job, or address of its store: tcp://host:port or file:/path. "
            "By default MASTER_ADDR and MASTER_PORT.",
        ),
    ] = None,
    stall: Annotated[float, typer.Option(help="Seconds without movement from which a job stands still.")] = 4.0,
    every: Annotated[float, typer.Option(help="Seconds between two looks.")] = 1.0,
    once: Annotated[bool, typer.Option("--once", help="End with the first verdict.")] = False,
    wait: Annotated[float, typer.Option(help="With --once: seconds after which a job that moves is said to.")] = 10.0,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object per line instead of text.")] = False,
) -> None:
    """Say where a running job stands, rank by rank, and who keeps it waiting. Reads the job's store, changes nothing.

    Goes on until the job ends. Exit code 0 when it moves or has ended well, 1 when it was killed or failed, or with
    --once stands still, 2 when its store cannot be read, or how it ended.
    """
    began, said, heard = time.monotonic(), "", list[Seen]()
    try:
        watcher = Watcher(open_store(where, min(PATIENCE, max(wait, _AT_LEAST)) if once else PATIENCE))
    except StoreError as error:
        _fail(str(error))
    while True:
        try:
            with _without_torchs_words():
                found = bounded(lambda: watcher.look(stall), _LOOK)
        except (StoreError, ValueError, KeyError, TypeError) as error:
            _fail(f"the store cannot be read: {type(error).__name__}: {error}")
        except (RuntimeError, OSError) as error:  # torch's DistError is a RuntimeError
            typer.echo(f"the store is gone, so the job has ended (`report RUN` says how each rank did): "
                f"{str(error).splitlines()[0]}", err=True)
            folder = where if where is not None and Path(where).is_dir() else watcher.start.get("folder")
            code, text = last_words(heard, folder)
            typer.echo("\n".join(text), err=True)
            raise typer.Exit(2 if once else code) from None
        late = time.monotonic() - began >= wait
        if found is None:
            if once and late:
                _fail(
                    "no rank has published anything: the job is still starting, has compiled nothing yet, or has no "
                    "session open (with watch=True)"
                )
        else:
            seen, verdict, difference = found
            heard = seen
            ended = bool(seen) and all(one.record["ended"] for one in seen) and not verdict.unheard
            told = _text(watcher.start, seen, verdict, difference, as_json)
            news = repr((verdict.stands, verdict.findings, verdict.unheard, difference, [s.where() for s in seen]))
            if not verdict.stands:
                news = repr((verdict.unheard, verdict.compiling, difference, ended))
            sure = verdict.stands and not any(one.old for one in seen)  # whether those live is soon known
            final = ended or (once and (sure or difference is not None or late))
            if news != said and (not once or final):
                typer.echo(told)
                said = news
            if final:
                raise typer.Exit(1 if once and (verdict.stands or difference is not None) else 0)
        time.sleep(every)


def _text(
    start: dict[str, Any], seen: list[Seen], verdict: Verdict, difference: dict[str, Any] | None, as_json: bool
) -> str:
    if not as_json:
        return "\n".join(lines(seen, verdict, difference, start["ranks"]))
    told = [{"rank": s.rank, "where": s.where(), "silent": s.silent, **dict(s.record)} for s in seen]
    job = {key: start[key] for key in ("run", "restart", "ranks")}
    return json.dumps({"schema": 1, **job, **verdict.to_dict(), "difference": difference, "by_rank": told})


def _fail(text: str) -> NoReturn:
    typer.echo(f"error: {text}", err=True)
    raise typer.Exit(2)
