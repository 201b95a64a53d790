"""What does a rank tell the others, and when? One background thread per session puts it on the board.

Graphs go on the board when their compile ends: the caller only queues them. Where the rank stands is looked at once
a second and written when it has begun to stand still, when it moves again, and every few seconds in between. The
thread has a connection of its own, issues no collective, and ends by itself when the store fails or the session ends.
"""

from __future__ import annotations

import atexit
import json
import logging
import os
import queue
import socket
import threading
import time
from pathlib import Path
from typing import Any, Final

from . import compat
from .agreement import no_real_group
from .board import NEWEST, Board, BoardState
from .comparison import WHOLE, RanksDisagree
from .exchange import Exchange
from .job import rank_and_ranks, run_and_restart
from .standing import Standing

logger = logging.getLogger(__name__)

STORE_FILE: Final = "store.json"
"""In the run folder: the address of the job's store, for `watch`."""

_LOOK: Final = 1.0  # seconds between two looks at where this rank stands
_STILL: Final = 2.0  # seconds after which a rank that does not move says so
_BEAT: Final = 2.0  # seconds between two signs of life
_RANKS_A_SECOND: Final = 500  # signs of life that one store is given; larger jobs beat more slowly
_FILE_BEAT: Final = 10.0  # a file store only grows
_PATIENCE: Final = 2.0  # seconds that the end of a session waits for the thread


class Service:
    """The board of one session, written from a thread of its own. Methods may be called from any thread and
    never wait for the store."""

    def __init__(self, state: BoardState, *, run_dir: str | None = None) -> None:
        self.standing = Standing()
        self._state = state
        self._run_dir = run_dir
        self._queue: queue.SimpleQueue[tuple[Exchange, list[Any]]] = queue.SimpleQueue()
        self._index: list[list[Any]] = []
        self._wake = threading.Event()
        self._stop = False
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None

    def start(self) -> bool:
        """Begin, if this process is one of several ranks; True when the thread runs."""
        with self._lock:
            if self._thread is None and not self._stop and no_real_group() is None:
                place = rank_and_ranks()
                self._thread = threading.Thread(
                    target=self._run, args=place, name="collective_identity.service", daemon=True
                )
                self._thread.start()
                # A daemon thread must not be inside the store while the interpreter is taken down.
                atexit.register(self.close)
            return self._thread is not None

    def publish(self, exchange: Exchange, number: int, kind: str, name: str) -> None:
        """Put a graph on the board, soon."""
        if self.start():
            self._queue.put((exchange, [number, kind, name, exchange.digests[WHOLE], exchange.cached]))
            self._wake.set()

    def close(self) -> None:
        """Say that this rank has ended, and stop. Twice does no harm."""
        with self._lock:
            self._stop = True
            thread = self._thread
        self._wake.set()
        if thread is not None and thread is not threading.current_thread():
            thread.join(_PATIENCE)
            atexit.unregister(self.close)

    def _run(self, rank: int, ranks: int) -> None:
        try:
            run, restart = run_and_restart()
            board = self._state.board(rank, run, restart)
            if board is None:
                return
            every = max(_BEAT, ranks / _RANKS_A_SECOND)
            address = compat.store_address(board.store)
            if address is not None and address.startswith("file:"):
                every = max(every, _FILE_BEAT)
            start = {"prefix": board.prefix, "run": run, "restart": restart, "ranks": ranks, "every": every}
            start["folder"] = self._run_dir
            board.store.set(NEWEST, json.dumps(start))
            if rank == 0 and address is not None:
                self._say_where(address)
            self._keep(board, rank, _Beats(self.standing, every))
        except Exception:  # the service must not take the training down with it
            logger.debug("the job's store failed; this rank tells no more where it stands", exc_info=True)

    def _keep(self, board: Board, rank: int, beats: _Beats) -> None:
        warned = False
        while True:
            stopping = self._stop
            while not self._queue.empty():
                exchange, entry = self._queue.get()
                exchange.publish(board)
                self._index.append(entry)
                board.set(f"graphs/{rank}", self._index)
            record, operations = beats.next(ended=stopping)
            if operations is not None:
                board.set(f"operations/{rank}", operations)
            if record is not None:
                board.set(f"at/{rank}", record)
                found = None if warned else board.get("difference")
                if found is not None and rank not in (found["rank"], found["peer"]):
                    warned = True
                    logger.error("%s", RanksDisagree(**found, relayed_to=rank))
            if stopping:
                return
            self._wake.wait(_LOOK)
            self._wake.clear()

    def _say_where(self, address: str) -> None:
        logger.info("to see where this job stands: collective-identity watch %s", address)
        if self._run_dir is not None:
            whole = Path(self._run_dir, STORE_FILE)
            part = whole.with_suffix(f".{os.getpid()}")
            try:
                part.write_text(json.dumps({"store": address}) + "\n")
                part.replace(whole)  # whole or not at all
            except OSError as error:
                logger.warning("%s: %s not written: %s", self._run_dir, STORE_FILE, error)


class _Beats:
    """When is there something to say? Fed once a second by the service's thread."""

    def __init__(self, standing: Standing, every: float) -> None:
        self._standing, self._every = standing, every
        self._last: dict[str, Any] | None = None
        self._frames: list[str] = []
        self._moved = self._sent = time.monotonic()
        self._beat = 0
        self._said_still = False

    def next(self, *, ended: bool) -> tuple[dict[str, Any] | None, dict[str, Any] | None]:
        """The record to write, and torch's own record of the newest operations when this rank has just stopped;
        None for nothing new."""
        now = time.monotonic()
        look = self._standing.look()
        moved = look != self._last
        if moved:
            self._moved, self._last, self._frames = now, look, []
        still = now - self._moved
        begins = still >= _STILL and not self._said_still
        again = moved and self._said_still
        if not (begins or again or ended or self._beat == 0 or now - self._sent >= self._every):
            return None, None
        if begins:
            self._frames = self._standing.frames()
        self._said_still = still >= _STILL
        self._sent = now
        self._beat += 1
        compiling = self._said_still and not look["doing"] and compat.compiling()
        record = {
            **look,
            "doing": ["compiles, in torch.compile"] if compiling else look["doing"],
            "beat": self._beat,
            "time": round(time.time(), 3),
            "every": self._every,
            "still": round(still, 1),
            "ended": ended,
            "frames": self._frames,
            "host": socket.gethostname(),
            "pid": os.getpid(),
        }
        return record, compat.recent_operations() if begins else None
