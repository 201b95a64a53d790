"""Do the ranks that share a process group run the same collectives? Asked before a graph's first run.

Ranks that disagree hang or compute garbage; here they stop within a bound and each says why. The exchange
goes through the job's store and nothing else: no collective, no blocking call, only `set` and `check` until
a key is there. Every rank publishes one record per graph, and compares it, pair by pair, with the records
of the ranks that are members of a group its rows run on. A pair compares only what runs on groups the two
share, in program order: pipeline stages with different graphs agree, two groups in swapped order do not.

Keys: `collective_identity/{run}/{restart}/{session}/...`, where `session` counts the sessions this rank has
opened on that store, so that nothing left by an earlier one is read.
  record/{rank}/{kind}/{tag}/{n}   digests of the rows, whole and by group, for the n-th graph with this kind
                                   and tag on that rank
  rows/{rank}/{kind}/{tag}/{n}     the rows themselves, read only where the digests differ
  order/{group}/{rank}/{n}         kind and tag of the n-th graph that runs on this group on that rank
  cached/{rank}/{tag}/{n}          that rank took this graph, backward included, from its compile cache
  done/{rank}/{kind}/{tag}/{n}     that rank has its verdict
  raised/{rank}                    that rank found a difference
"""

from __future__ import annotations

import json
import logging
import threading
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NoReturn

import torch

from . import compat
from .codes import AGREEMENT_TIMEOUT
from .comparison import WHOLE, RanksDisagree, comparable, digests, first_difference
from .digest import CollectiveRow
from .job import run_and_restart

__all__ = ["AgreementResult", "AgreementState", "RanksDisagree", "agree"]

logger = logging.getLogger(__name__)

Status = Literal["agreed", "alone", "timeout", "off", "skipped"]

_SLACK = 1.0  # seconds past the timeout after which the store counts as hung
_LINGER = 5.0  # seconds a rank that found a difference waits for its peers to have read it
_FIRST_PAUSE, _LAST_PAUSE = 0.002, 0.1  # seconds between two looks at the store
_RUNS = ("forward", "joint", "inference")  # kinds that a rank runs in the order in which it compiles them


@dataclass(frozen=True, slots=True)
class AgreementResult:
    """`status`: "agreed" with every peer; "alone", no other rank shares a group; "timeout", a peer did not
    arrive or the store failed; "off", timeout 0; "skipped", no real process group or a cached graph of
    unknown groups."""

    status: Status
    detail: str


@dataclass(slots=True)
class AgreementState:
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

    def namespace(self, store: Any, rank: int, run: str) -> str:
        """The key prefix of this session on this store; every rank must open its sessions in the same
        order."""
        with self._prefix_lock:
            if self._prefix is None:
                base = f"collective_identity/{run}"
                self._prefix = f"{base}/{store.add(f'{base}/sessions/{rank}', 1)}"
            return self._prefix


def agree(
    rows: Sequence[CollectiveRow],
    *,
    kind: str,
    cached: bool,
    tag: str,
    timeout: float,
    run: str | None = None,
    groups: Sequence[str] | None = None,
    state: AgreementState | None = None,
    name: str = "",
) -> AgreementResult:
    """Compare this graph with the same graph of every rank that shares one of its process groups.

    Args:
        rows: the collectives of the graph (`collective_table`), in graph order; none for a cached graph.
        kind: "forward", "backward", "joint" or "inference".
        cached: the graph came from a compile cache. Its rows are not compared, its tag is.
        tag: digest of the captured graph and every option that can change it. Always compared.
        timeout: seconds to wait for peers; 0 turns the check off.
        run: a name for the run in the store's keys; torchrun's run id and restart count by default.
        groups: process-group names the graph runs on, where they are known without rows.
        state: counters of the session; the current session's by default.
        name: of the graph, for messages.

    Raises:
        RanksDisagree: on every rank that shares a group on which a difference was found.
    """
    if timeout <= 0:
        return AgreementResult("off", "agreement_timeout is 0")
    reason = _no_real_group()
    if reason is not None:
        return AgreementResult("skipped", reason)
    if state is None:
        from .session import ensure

        state = ensure().ledger.agreement_state
    exchange = _Exchange(state, kind, tag, cached, name, run, timeout)
    return exchange.bounded(rows, groups)


class _Exchange:
    """One graph's publication and comparison on one rank."""

    def __init__(
        self,
        state: AgreementState,
        kind: str,
        tag: str,
        cached: bool,
        name: str,
        run: str | None,
        timeout: float,
    ) -> None:
        self.state, self.kind, self.tag, self.cached, self.timeout = state, kind, tag, cached, timeout
        self.deadline = time.monotonic() + timeout
        self.rank = torch.distributed.get_rank()
        self.graph = f"{kind} graph {name}".rstrip()
        self.job = run if run is not None else "/".join(map(str, run_and_restart()))
        self.store: Any = None
        self.prefix = ""
        self.n = state.next("record", kind, tag)
        self.unsure = 0
        self.members: dict[str, tuple[int, ...]] = {}  # group -> its ranks
        self.digests: dict[str, str] = {}
        self.order: dict[str, int] = {}  # group -> how many graphs of this rank ran on it before

    def bounded(self, rows: Sequence[CollectiveRow], groups: Sequence[str] | None) -> AgreementResult:
        """`run` on a thread of its own: a store whose server hangs may block any call on it for minutes."""
        outcome: list[AgreementResult | RanksDisagree] = []

        def target() -> None:
            try:
                outcome.append(self.run(rows, groups))
            except RanksDisagree as error:
                outcome.append(error)
            except Exception as error:  # the check must not take the training down with it
                logger.debug("%s: the store failed", self.graph, exc_info=True)
                outcome.append(self._given_up(f"the store failed: {type(error).__name__}: {error}"))

        thread = threading.Thread(target=target, name="collective_identity.agreement", daemon=True)
        thread.start()
        thread.join(self.timeout + _SLACK)
        if not outcome:
            return self._given_up("the store does not answer")
        if isinstance(outcome[0], RanksDisagree):
            raise outcome[0]
        return outcome[0]

    def run(self, rows: Sequence[CollectiveRow], groups: Sequence[str] | None) -> AgreementResult:
        """Publish, compare, and say what came of it."""
        store = compat.default_store()
        if store is None:
            return AgreementResult("skipped", "the process group has no store")
        self.store = store
        self.prefix = self.state.namespace(self.store, self.rank, self.job)
        used = dict.fromkeys(row.group for row in rows if row.group is not None) | dict.fromkeys(groups or ())
        for group in used:
            ranks = compat.group_ranks(group)
            if ranks is not None and self.rank in ranks:
                self.members[group] = ranks
        peers = sorted({r for ranks in self.members.values() for r in ranks} - {self.rank})
        unknown = self.cached and not used
        if unknown:
            self.state.doubt()
        self._publish(() if self.cached else rows)
        if unknown:
            return AgreementResult("skipped", "from cache, its process groups are not known here")
        if not peers:
            return AgreementResult("alone", "no other rank is in a process group of this graph")
        missing = self._meet(peers, rows)
        self.store.set(self._key("done", self.rank), b"1")
        if missing:
            return self._given_up(f"ranks {missing} did not publish this graph in time")
        return AgreementResult("agreed", f"with ranks {peers}")

    def _given_up(self, why: str) -> AgreementResult:
        """The graph runs unchecked: a warning, since the peers may only be late."""
        self.state.doubt()
        logger.warning(
            "%s %s: rank %d, %s: %s; it runs unchecked. %s",
            AGREEMENT_TIMEOUT.id,
            AGREEMENT_TIMEOUT.slug,
            self.rank,
            self.graph,
            why,
            AGREEMENT_TIMEOUT.remedy,
        )
        return AgreementResult("timeout", why)

    def _key(self, what: str, rank: int) -> str:
        return f"{self.prefix}/{what}/{rank}/{self.kind}/{self.tag}/{self.n}"

    def _publish(self, rows: Sequence[CollectiveRow]) -> None:
        if self.cached:
            self.store.set(f"{self.prefix}/cached/{self.rank}/{self.tag}/{self.n}", b"1")
        self.digests = digests(rows)
        self.store.set(self._key("rows", self.rank), json.dumps([comparable(row) for row in rows]))
        record = {"cached": self.cached, "digests": self.digests}
        self.store.set(self._key("record", self.rank), json.dumps(record))
        if self.kind not in _RUNS:
            return
        # With any doubt counted before this graph, this rank's order proves nothing to the others.
        self.unsure = self.state.unsure
        for group in self.members:
            self.order[group] = self.state.next("order", group)
            place = json.dumps([self.kind, self.tag, self.unsure])
            self.store.set(f"{self.prefix}/order/{group}/{self.rank}/{self.order[group]}", place)

    def _meet(self, peers: Sequence[int], rows: Sequence[CollectiveRow]) -> list[int]:
        """Compare with each peer as it arrives; the peers that did not until the deadline."""
        pending = list(peers)
        pause = _FIRST_PAUSE
        while True:
            pending = [peer for peer in pending if not self._look(peer, rows)]
            left = self.deadline - time.monotonic()
            if not pending or left <= 0:
                return pending
            time.sleep(min(pause, left))
            pause = min(pause * 1.5, _LAST_PAUSE)

    def _look(self, peer: int, rows: Sequence[CollectiveRow]) -> bool:
        """True when this peer needs no more waiting for; raises on a difference."""
        shared = [group for group, ranks in self.members.items() if peer in ranks]
        if self.store.check([self._key("record", peer)]):
            record = json.loads(self.store.get(self._key("record", peer)))
            if not self.cached and not record["cached"] and self._may_differ(shared, record["digests"]):
                self._compare(peer, shared, rows, json.loads(self.store.get(self._key("rows", peer))))
            return True
        for group, n in self.order.items():
            key = f"{self.prefix}/order/{group}/{peer}/{n}"
            if peer in self.members[group] and self.store.check([key]):
                kind, tag, unsure = json.loads(self.store.get(key))
                if unsure or self.unsure:
                    continue
                if kind != self.kind:
                    self._differ(peer, group, "kind", self.kind, kind)
                if tag != self.tag:
                    key = f"{self.prefix}/rows/{peer}/{kind}/{tag}/{self.n}"
                    theirs = json.loads(self.store.get(key)) if rows and self.store.check([key]) else []
                    if theirs:  # other models: say in which collective they differ, if in one
                        self._compare(peer, shared, rows, theirs)
                    self._differ(peer, group, "tag (captured graph and options)", self.tag, tag)
        return bool(self.store.check([f"{self.prefix}/cached/{peer}/{self.tag}/{self.n}"]))

    def _may_differ(self, shared: Sequence[str], theirs: Mapping[str, str]) -> bool:
        """False when the digests prove the pair equal; on one shared group that group's, else the whole's."""
        what = shared[0] if len(shared) == 1 else WHOLE
        return self.digests.get(what) != theirs.get(what)

    def _compare(
        self,
        peer: int,
        shared: Sequence[str],
        rows: Sequence[CollectiveRow],
        theirs: Sequence[dict[str, Any]],
    ) -> None:
        ours = [row for row in rows if row.group in shared]
        difference = first_difference(ours, [row for row in theirs if row.get("group") in shared])
        if difference is None:
            return
        position, field, a, b = difference
        if position < len(ours):
            self._differ(peer, ours[position].group, field, a, b, position, ours[position].node)
        self._differ(peer, b["group"], field, a, b, position)

    def _differ(
        self,
        peer: int,
        group: str | None,
        field: str,
        mine: Any,
        theirs: Any,
        position: int | None = None,
        node: str | None = None,
    ) -> NoReturn:
        self.store.set(f"{self.prefix}/raised/{self.rank}", b"1")
        self._linger()
        raise RanksDisagree(
            rank=self.rank,
            peer=peer,
            graph=self.graph,
            group=group,
            position=position,
            field=field,
            mine=mine,
            theirs=theirs,
            node=node,
        )

    def _linger(self) -> None:
        """The rank that raises may take the store down with it: give its peers a moment to read it first."""
        end = time.monotonic() + _LINGER
        others = {r for ranks in self.members.values() for r in ranks} - {self.rank}
        while others and time.monotonic() < min(end, max(self.deadline, end - _LINGER + 0.5)):
            others = {
                other
                for other in others
                if not self.store.check([f"{self.prefix}/raised/{other}"])
                and not self.store.check([self._key("done", other)])
            }
            time.sleep(_LAST_PAUSE / 10)


def _no_real_group() -> str | None:
    distributed = torch.distributed
    if not distributed.is_available() or not distributed.is_initialized():
        return "no process group"
    if distributed.get_world_size() == 1:
        return "one rank"
    if distributed.get_backend() == "fake":
        return "a fake process group"
    return None
