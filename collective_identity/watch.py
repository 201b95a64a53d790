"""Where does a running job stand? Read by a client of the job's own store, which changes nothing there."""

from __future__ import annotations

import json
import os
import socket
import time
from datetime import timedelta
from pathlib import Path
from typing import Any, Final

import torch.distributed as dist

from .board import NEWEST, Board
from .service import STORE_FILE
from .standstill import Graph, Seen, Verdict, judge

_CONNECT: Final = 5.0  # seconds
_GRACE: Final = 3  # missed signs of life after which a rank counts as silent


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


def open_store(where: str | None) -> Any:
    """The root store at an address, of a run folder, or of `MASTER_ADDR` and `MASTER_PORT`.

    Raises:
        StoreError: not an address, or nobody answers there.
    """
    address = _address(where)
    if address.startswith("file:"):
        path = address.removeprefix("file:")
        if not Path(path).exists():
            raise StoreError(f"expected the file of a store, found nothing at {path}: has the job ended?")
        return dist.FileStore(path, -1)
    host, _, port = address.removeprefix("tcp://").rpartition(":")
    try:
        socket.create_connection((host, int(port)), timeout=_CONNECT).close()
        bound = timedelta(seconds=_CONNECT)
        return dist.TCPStore(host, int(port), None, False, timeout=bound, wait_for_workers=False)
    except (OSError, ValueError, RuntimeError) as error:
        raise StoreError(
            f"expected the store of a running job at {address}, found {type(error).__name__}: {error}; the job logs "
            f"its address at INFO, and rank 0 writes it to {STORE_FILE} in the run folder"
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
        return str(json.loads(noted.read_text())["store"])
    if Path(where).exists() or ":" not in where:
        raise StoreError(
            f"expected {STORE_FILE} in the run folder {where}, found none: give the address (tcp://host:port)"
        )
    return f"tcp://{where}"
