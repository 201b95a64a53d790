"""Where in the job's store does what lie? The keys that ranks write and that ranks and `watch` read.

Everything lies in the root of the store (past the prefixes that torch and torchrun put in front), so that a
client that knows only its address finds it. Nothing is ever listed: `newest` names the prefix of the newest
start, and under that prefix each key can be told in advance or stands in an index. Values are JSON.

`collective_identity/newest`     the prefix below, run id, restart count, number of ranks, seconds between beats
`{prefix}` is `collective_identity/{job}/{run}/{start}/{session}`: `job` is drawn once for each store (past torch's
prefixes), `session` counts the sessions this rank has opened in this start. `start` is the restart count, plus one,
counted here as well: torchrun keeps one store over restarts, and counts a restart only on the host where a rank
failed. So what an earlier start or session left is not read.

  graphs/{rank}                    the index: number, kind, name, digest and cache state of each graph so far
  record/{rank}/{kind}/{tag}/{n}   digests of the rows, whole and by group, for the n-th graph with this kind
                                   and tag on that rank
  rows/{digest}                    the rows themselves, once for all ranks that have equal ones
  order/{group}/{rank}/{n}         kind and tag of the n-th graph that runs on this group on that rank
  cached/{rank}/{tag}/{n}          that rank took this graph, backward included, from its compile cache
  done/{rank}/{kind}/{tag}/{n}     that rank has its verdict
  raised/{rank}                    that rank found a difference, or read of one
  difference                       the first difference that any rank found
  at/{rank}                        where that rank stands (`standing.Standing.look`), overwritten
  operations/{rank}                torch's own record of its newest collectives, when it last came to stand still
"""

from __future__ import annotations

import json
import os
import socket
import threading
import uuid
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from . import compat
from .job import store_outlives_restarts

ROOT: Final = "collective_identity"
NEWEST: Final = f"{ROOT}/newest"


@dataclass(frozen=True, slots=True)
class Board:
    """One start's keys in a store. Safe to use from one thread at a time."""

    store: Any
    prefix: str

    def set(self, key: str, value: object) -> None:
        """Write one value as JSON."""
        self.store.set(f"{self.prefix}/{key}", json.dumps(value))

    def has(self, *keys: str) -> bool:
        """Whether all keys are there. Does not wait."""
        return bool(self.store.check([f"{self.prefix}/{key}" for key in keys]))

    def get(self, key: str) -> Any:
        """The value of a key, None when it is not there. Does not wait."""
        return json.loads(self.store.get(f"{self.prefix}/{key}")) if self.has(key) else None

    def set_first(self, key: str, value: object) -> None:
        """Write one value unless there is one."""
        self.store.compare_set(f"{self.prefix}/{key}", "", json.dumps(value))

    def rows(self, digest: str) -> list[dict[str, Any]] | None:
        """The table with this digest."""
        found: list[dict[str, Any]] | None = self.get(f"rows/{digest}")
        return found


@dataclass(slots=True)
class BoardState:
    """What one rank remembers between its graphs; lives on the session. Its methods may be called from any
    thread."""

    unsure: int = 0
    _prefix: str | None = None
    _prefix_lock: threading.Lock = field(default_factory=threading.Lock)  # may be held by a hung call
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _counts: Counter[tuple[str, ...]] = field(default_factory=Counter)

    def next(self, *key: str) -> int:
        """0, 1, 2, ... for each key."""
        with self._lock:
            self._counts[key] += 1
            return self._counts[key] - 1

    def doubt(self) -> None:
        """From here on this rank's order of graphs may rightly differ from its peers'."""
        with self._lock:
            self.unsure += 1

    def board(self, rank: int, run: str, restart: int = 0) -> Board | None:
        """This session's keys, on a connection of their own; None when there is no store. May block.

        Every rank must open its sessions in the same order.
        """
        store = compat.default_store()
        if store is None:
            return None
        with self._prefix_lock:
            if self._prefix is None:
                job = store.compare_set(f"{ROOT}/job", "", uuid.uuid4().hex[:12]).decode()
                base = f"{ROOT}/{job}/{run}"
                counted = restart if store_outlives_restarts() else 0
                base = f"{base}/{start_number(store, base, rank, counted, this_process())}"
                self._prefix = f"{base}/{store.add(f'{base}/sessions/{rank}', 1)}"
            return Board(compat.root_store(store), self._prefix)


def start_number(store: Any, base: str, rank: int, restart: int, process: str) -> int:
    """1 for a job's first start, 2 for the next, ...: the same on every rank, whatever it did in earlier ones.

    A process that was not there before is a new start of its rank; one that missed earlier starts follows the
    highest number that any rank has reached, and torchrun's own count where that is ahead.

    Args:
        store: where the ranks count.
        base: of the keys.
        rank: of this process.
        restart: torchrun's restart count on this host; 0 for a store that is new in each start.
        process: names this process among all that the job ever has.
    """
    mine, top = f"{base}/starts/{rank}", f"{base}/starts"
    known, number = json.loads(store.get(mine)) if store.check([mine]) else ("", 0)
    process = f"{process}:{restart}"
    if known == process:
        return int(number)
    highest = int(store.get(top)) if store.check([top]) else 0
    number = max(int(number) + 1, highest, restart + 1)
    store.set(mine, json.dumps([process, number]))
    if number > highest:
        store.set(top, str(number))
    return number


def this_process() -> str:
    """Host, process id and when the process began: no other process of the job has all three."""
    try:
        began = os.stat(f"/proc/{os.getpid()}").st_ctime_ns
    except OSError:  # not Linux
        began = 0
    return f"{socket.gethostname()}:{os.getpid()}:{began}"


def spell(ranks: Sequence[int]) -> str:
    """Ranks as a short text: "0-7", "1-13/4" (every fourth), "0,3,5". Equal for equal ranks in equal order."""
    if len(ranks) > 2:
        step = ranks[1] - ranks[0]
        if step > 0 and all(b - a == step for a, b in zip(ranks, ranks[1:], strict=False)):
            return f"{ranks[0]}-{ranks[-1]}" + (f"/{step}" if step > 1 else "")
    return ",".join(map(str, ranks))


def unspell(text: str) -> tuple[int, ...]:
    """The ranks that `spell` wrote."""
    if "-" not in text:
        return tuple(int(part) for part in text.split(",") if part)
    ends, _, step = text.partition("/")
    first, _, last = ends.partition("-")
    return tuple(range(int(first), int(last) + 1, int(step or 1)))
