"""How is a run folder written and read? `rank{N}.jsonl`, one whole line per record.

A line goes out in one `write` on a file opened for appending, so a process that dies leaves whole lines and
at most one cut line at the end. The reader skips what it cannot read and says so. Each session opens a new
section with a `run` line; a restarted process appends its section to the file of its rank.
"""

from __future__ import annotations

import json
import logging
import os
import re
import threading
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from ..compat import collector_paused
from .records import GraphRecord, Record, RunRecord, from_json, to_json

logger = logging.getLogger(__name__)

_FILE = re.compile(r"rank(\d+)\.jsonl")


class RunFolderError(ValueError):
    """The folder holds no run that can be read; the text names the folder and what to do."""


@dataclass(frozen=True, slots=True)
class RankLog:
    """The last section of one rank's file.

    `sections` is how many the file holds, `damaged` says which lines were skipped and why, `written` when the
    file was last written, in seconds since the epoch.
    """

    rank: int
    records: tuple[Record, ...]
    sections: int = 1
    damaged: tuple[str, ...] = ()
    written: float | None = None


def rank_file(run_dir: str | os.PathLike[str], rank: int) -> Path:
    """The file of one rank."""
    return Path(run_dir) / f"rank{rank}.jsonl"


def encode(record: Record) -> bytes:
    """One line, newline included."""
    return (json.dumps(to_json(record), separators=(",", ":"), allow_nan=False) + "\n").encode()


class RankWriter:
    """Appends records to one rank's file; from any thread. A failing disk costs the records, never the
    training."""

    def __init__(self, run_dir: str | os.PathLike[str], rank: int) -> None:
        self.path = rank_file(run_dir, rank)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._lock = threading.Lock()
        self._fd: int | None = os.open(self.path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
        size = os.fstat(self._fd).st_size
        if size and os.pread(self._fd, 1, size - 1) != b"\n":
            os.write(self._fd, b"\n")  # an earlier process died in the middle of a line

    def write(self, record: Record) -> None:
        """Append one record, whole, before returning."""
        try:
            line = encode(record)
        except ValueError as error:
            logger.warning("%s: a record is left out, it is no JSON: %s", self.path, error)
            return
        with self._lock:
            if self._fd is None:
                return
            try:
                while line:
                    line = line[os.write(self._fd, line) :]
            except OSError as error:
                logger.warning("%s: writing failed (%s); this rank's run file ends here", self.path, error)
                self._close()

    def close(self) -> None:
        """Close the file; later records are ignored."""
        with self._lock:
            self._close()

    def _close(self) -> None:
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None


def rank_files(run_dir: str | os.PathLike[str]) -> dict[int, Path]:
    """The files of a run folder by rank; `RunFolderError` when there is no folder or none in it."""
    folder = Path(run_dir)
    if not folder.is_dir():
        raise RunFolderError(
            f"{folder}: not a folder; give the run_dir of a session or of fsdp_hooks.install"
        )
    found = {int(m[1]): p for p in folder.iterdir() if (m := _FILE.fullmatch(p.name)) and p.is_file()}
    if not found:
        raise RunFolderError(f"{folder}: holds no rank<N>.jsonl; is it the run_dir of a session?")
    return dict(sorted(found.items()))


def read_rank(path: Path, rank: int) -> RankLog:
    """The last section of one file; lines that cannot be read are skipped and listed in `damaged`.

    A file without a readable line has no records. Characters that no text can hold (half a surrogate pair, as in
    the name of a file that is not UTF-8) become question marks.
    """
    try:
        lines = path.read_bytes().split(b"\n")
        written = path.stat().st_mtime
    except OSError as error:
        return RankLog(rank, (), 0, (f"{path}: cannot be read: {error}",))
    records: list[Record] = []
    damaged: list[str] = []
    sections = 0
    graph, doubt = -1, False
    for number, line in enumerate(lines, 1):
        if not line:
            continue
        try:
            with collector_paused():
                record = from_json(_json(line))
        except (ValueError, RecursionError) as error:  # BadRecord, bytes that are no UTF-8, text that is no JSON
            what = "cut off" if number == len(lines) else "unreadable"
            damaged.append(f"line {number} is {what} and skipped: {error}")
            doubt = True
            continue
        if isinstance(record, RunRecord) or (doubt and isinstance(record, GraphRecord) and record.graph <= graph):
            sections += 1
            records, graph, doubt = [], -1, False
        if isinstance(record, GraphRecord):
            graph = record.graph
        records.append(record)
    if not records:
        damaged = [f"{path}: no readable line" + (f"; first fault: {damaged[0]}" if damaged else " in it")]
    return RankLog(rank, tuple(records), max(sections, 1), tuple(damaged), written)


def _json(line: bytes) -> object:
    value = json.loads(line)
    if b"\\ud" in line.lower():
        value = json.loads(json.dumps(value, ensure_ascii=False).encode("utf-8", "replace"))
    return value


def read_run(run_dir: str | os.PathLike[str]) -> tuple[RankLog, ...]:
    """Every rank's last section, in rank order, without records where a file holds none; `RunFolderError` when
    the folder holds no record at all."""
    logs = tuple(read_rank(path, rank) for rank, path in rank_files(run_dir).items())
    if not any(log.records for log in logs):
        raise RunFolderError(logs[0].damaged[0])
    return logs


def write_run(run_dir: str | os.PathLike[str], rank: int, records: Iterable[Record]) -> Path:
    """Write records as one rank's file at once, for tools and tests."""
    writer = RankWriter(run_dir, rank)
    for record in records:
        writer.write(record)
    writer.close()
    return writer.path
