"""Where does a running job stand? Read by a client of the job's own store, which changes nothing there."""

from __future__ import annotations

import json
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any, Final, TypeVar

import torch.distributed as dist

from .board import NEWEST, ROOT, Board
from .file_store import StoreFile
from .service import STORE_FILE
from .standstill import Graph, Seen, Verdict, judge

PATIENCE: Final = 5.0
"""Seconds that a store is given to answer for the first time."""
_GRACE: Final = 3  # missed signs of life after which a rank counts as silent
_LATE: Final = 1.5  # seconds after which what a rank has to say is on the store


_T = TypeVar("_T")


class StoreError(RuntimeError):
    """The store of the job cannot be found or read; the text says which and what to do."""


class Watcher:
    """Reads the newest start in a store again and again. `store` is the root store of the job."""

    def __init__(self, store: Any) -> None:
        self._store = store
        self._board: Board | None = None
        self._start: dict[str, Any] = {}
        self._beats: dict[int, tuple[int, float]] = {}  # rank -> its last beat, and when it was seen first
        self._rows: dict[str, list[dict[str, Any]]] = {}
        self._operations: dict[int, dict[str, Any]] = {}

    @property
    def start(self) -> dict[str, Any]:
        """The start that is read: `run`, `restart`, `ranks`, `every`, `prefix`."""
        return self._start

    def look(self, stall: float) -> tuple[list[Seen], Verdict, dict[str, Any] | None] | None:
        """Every rank that was heard, what it amounts to, and a difference that ranks found; None while nothing
        was ever published."""
        if not self._store.check([NEWEST]):
            return None
        start = json.loads(self._store.get(NEWEST))
        if self._board is None or self._board.prefix != start["prefix"]:  # the job began again
            self._board, self._start = Board(self._store, start["prefix"]), start
            self._beats, self._operations = {}, {}
        board = self._board
        seen = [one for rank in range(start["ranks"]) if (one := self._rank(board, rank)) is not None]
        newest = max((one.record.get("time", 0.0) for one in seen), default=0.0)
        for i, one in enumerate(seen):
            age = newest - one.record.get("time", newest)
            if not one.gone and age > _GRACE * one.record["every"] + _LATE:
                seen[i] = replace(one, old=age)
        return seen, judge(seen, start["ranks"], stall), board.get("difference")

    def _rank(self, board: Board, rank: int) -> Seen | None:
        record = board.get(f"at/{rank}")
        if record is None:
            return None
        now = time.monotonic()
        beat, since = self._beats.get(rank, (None, now))
        if beat != record["beat"]:
            since = now
            self._beats[rank] = record["beat"], now
        silent = not record["ended"] and now - since > _GRACE * record["every"]
        if record["frames"]:  # it said that it stands, and would say when it moves
            record["still"] += max(0.0, now - since - _LATE)
        if record["frames"] and beat != record["beat"]:  # it stands: torch's record was written with it
            self._operations[rank] = board.get(f"operations/{rank}") or {}
        elif not record["frames"]:
            self._operations.pop(rank, None)
        graphs = {
            number: Graph(kind, name, self._table(board, digest))
            for number, kind, name, digest, _ in board.get(f"graphs/{rank}") or ()
        }
        return Seen(rank, record, graphs, self._operations.get(rank, {}), silent)

    def _table(self, board: Board, digest: str) -> list[dict[str, Any]]:
        if digest not in self._rows:
            self._rows[digest] = board.rows(digest) or []
        return self._rows[digest]


def open_store(where: str | None, patience: float = PATIENCE) -> Any:
    """The root store at an address, of a run folder, or of `MASTER_ADDR` and `MASTER_PORT`, within `patience` seconds.

    Raises:
        StoreError: not an address, or no store answers there.
    """
    address = _address(where)
    if address.startswith("file:"):
        path = address.removeprefix("file:")
        if not Path(path).is_file():
            raise StoreError(f"expected the file of a store, found none at {path}: has the job ended?")
        store = StoreFile(path, ROOT)
        with _told(address):
            store.check([NEWEST])
        return store
    host, _, port = address.removeprefix("tcp://").rpartition(":")
    with _told(address):
        number = int(port)
        socket.create_connection((host, number), timeout=patience).close()
        bound = timedelta(seconds=patience)
        return bounded(
            lambda: dist.TCPStore(host, number, None, False, timeout=bound, wait_for_workers=False), patience
        )


def bounded(call: Callable[[], _T], seconds: float) -> _T:
    """What `call` returns or raises, `StoreError` when it takes longer. A client of torch's TCPStore waits without end
    for a server that does not answer; such a call is left behind in its thread."""
    outcome: Future[_T] = Future()

    def target() -> None:
        try:
            outcome.set_result(call())
        except BaseException as error:
            outcome.set_exception(error)

    threading.Thread(target=target, name="collective_identity.watch", daemon=True).start()
    try:
        return outcome.result(seconds)
    except FutureTimeout:
        raise StoreError(f"no answer within {seconds:.0f} s: it is no store, or its process is stopped") from None


@contextmanager
def _told(address: str) -> Iterator[None]:
    try:
        yield
    except (OSError, ValueError, RuntimeError) as error:  # torch's DistError is a RuntimeError
        what = "" if isinstance(error, StoreError) else f"{type(error).__name__}: "
        raise StoreError(
            f"expected the store of a running job at {address}, found {what}{str(error).splitlines()[0]}: the job "
            "has ended (`collective-identity report RUN` shows what it left), or this machine does not reach that "
            f"address. A running job logs its address at INFO, and rank 0 writes it to {STORE_FILE} in the run folder"
        ) from None


def _address(where: str | None) -> str:
    if where is None:
        host, port = os.environ.get("MASTER_ADDR"), os.environ.get("MASTER_PORT")
        if not host or not port:
            raise StoreError("expected an address, a run folder or MASTER_ADDR and MASTER_PORT, found none of them")
        return f"tcp://{host}:{port}"
    if where.startswith(("tcp://", "file:")):
        return where
    noted = Path(where, STORE_FILE)
    if noted.is_file():
        try:
            return str(json.loads(noted.read_text())["store"])
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise StoreError(
                f'expected {{"store": address}} in {noted}, found {type(error).__name__}: {error}; give the address '
                "(tcp://host:port), which the job logs at INFO"
            ) from None
    if Path(where).exists() or ":" not in where:
        raise StoreError(
            f"expected {STORE_FILE} in the run folder {where}, found none: give the address (tcp://host:port)"
        )
    return f"tcp://{where}"
