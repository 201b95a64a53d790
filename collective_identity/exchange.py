"""How does one graph of one rank meet the same graph of its peers? Published once, compared within a bound."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NoReturn

import torch

from . import compat
from .board import Board, BoardState
from .codes import AGREEMENT_TIMEOUT
from .comparison import WHOLE, RanksDisagree, comparable, digests, fault_of, first_difference
from .digest import CollectiveRow
from .job import run_and_restart

logger = logging.getLogger(__name__)

Status = Literal["agreed", "alone", "timeout", "off", "skipped"]

_SLACK = 1.0  # seconds past the timeout after which the store counts as hung
_LINGER = 5.0  # seconds a rank that found a difference waits for its peers to have read it
_SETTLE = 2.0  # seconds a rank that agrees with its peers gives them to compare among themselves
_FIRST_PAUSE, _LAST_PAUSE = 0.002, 0.1  # seconds between two looks at the store
_RUNS = ("forward", "joint", "inference", "step")  # kinds that a rank runs in the order in which it compiles them


@dataclass(frozen=True, slots=True)
class AgreementResult:
    """`status`: "agreed" with every peer; "alone", no other rank shares a group; "timeout", a peer did not
    arrive or the store failed; "off", timeout 0; "skipped", no real process group or a cached graph of
    unknown groups."""

    status: Status
    detail: str


class Exchange:
    """One graph's publication and comparison on one rank. Made where the compile ends, in program order: the
    places this graph takes among the others of this rank are drawn there, whichever thread publishes it."""

    def __init__(
        self,
        rows: Sequence[CollectiveRow],
        *,
        kind: str,
        cached: bool,
        tag: str,
        state: BoardState,
        run: str | None = None,
        groups: Sequence[str] | None = None,
        name: str = "",
    ) -> None:
        self.state, self.kind, self.tag, self.cached = state, kind, tag, cached
        self.rank = torch.distributed.get_rank()
        self.graph = f"{kind} graph {name}".rstrip()
        self.rows = () if cached else tuple(rows)
        self.digests = digests(self.rows)
        run_id, self._restart = run_and_restart()
        self._run = run_id if run is None else run
        self._n = state.next("record", kind, tag)
        used = dict.fromkeys(row.group for row in rows if row.group is not None) | dict.fromkeys(groups or ())
        self.members: dict[str, tuple[int, ...]] = {}  # group -> its ranks
        for group in used:
            ranks = compat.group_ranks(group)
            if ranks is not None and self.rank in ranks:
                self.members[group] = ranks
        self._unknown = cached and not used
        if self._unknown:
            state.doubt()
        # With any doubt counted before this graph, this rank's order proves nothing to the others.
        self._unsure = state.unsure
        ordered = self.members if kind in _RUNS else ()
        self._order = {group: state.next("order", group) for group in ordered}  # graphs that ran on it before
        self._publishing = threading.Lock()
        self._published = False
        self._board: Board | None = None

    def board(self) -> Board | None:
        """This session's keys, on a connection of this exchange's own. May block."""
        if self._board is None:
            self._board = self.state.board(self.rank, self._run, self._restart)
        return self._board

    def publish(self, board: Board) -> None:
        """Write this graph's record, once whichever threads ask. May block; the caller bounds it."""
        with self._publishing:
            if self._published:
                return
            if self.cached:
                board.set(f"cached/{self.rank}/{self.tag}/{self._n}", 1)
            rows = f"rows/{self.digests[WHOLE]}"
            if not board.has(rows):
                board.set(rows, [comparable(row) for row in self.rows])
            board.set(self._key("record", self.rank), {"cached": self.cached, "digests": self.digests})
            for group, n in self._order.items():
                board.set(f"order/{group}/{self.rank}/{n}", [self.kind, self.tag, self._unsure])
            self._published = True

    def agree(self, timeout: float) -> AgreementResult:
        """Publish if that has not been done, and compare within `timeout` seconds.

        On a thread of its own: a store whose server hangs may block any call on it for minutes.
        """
        deadline = time.monotonic() + timeout
        outcome: list[AgreementResult | RanksDisagree] = []

        def target() -> None:
            try:
                outcome.append(self._compare_all(deadline))
            except RanksDisagree as error:
                outcome.append(error)
            except Exception as error:  # the check must not take the training down with it
                logger.debug("%s: the store failed", self.graph, exc_info=True)
                outcome.append(self._given_up(f"the store failed: {type(error).__name__}: {error}"))

        thread = threading.Thread(target=target, name="collective_identity.agreement", daemon=True)
        thread.start()
        thread.join(timeout + _SLACK)
        if not outcome:
            return self._given_up("the store does not answer")
        if isinstance(outcome[0], RanksDisagree):
            raise outcome[0]
        return outcome[0]

    def _compare_all(self, deadline: float) -> AgreementResult:
        board = self.board()
        if board is None:
            return AgreementResult("skipped", "the process group has no store")
        self.publish(board)
        if self._unknown:
            return AgreementResult("skipped", "from cache, its process groups are not known here")
        peers = sorted({r for ranks in self.members.values() for r in ranks} - {self.rank})
        if not peers:
            return AgreementResult("alone", "no other rank is in a process group of this graph")
        missing = self._meet(board, peers, deadline)
        board.set(self._key("done", self.rank), 1)
        if missing:
            return self._given_up(f"ranks {missing} did not publish this graph in time")
        self._settle(board, peers, min(deadline, time.monotonic() + _SETTLE))
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

    def _key(self, what: str, rank: int, tag: str | None = None) -> str:
        return f"{what}/{rank}/{self.kind}/{tag or self.tag}/{self._n}"

    def _meet(self, board: Board, peers: Sequence[int], deadline: float) -> list[int]:
        """Compare with each peer as it arrives; the peers that did not until the deadline."""
        return self._until(board, peers, lambda peer: self._look(board, peer, deadline), deadline)

    def _settle(self, board: Board, peers: Sequence[int], deadline: float) -> None:
        """Two peers that agree with this rank may differ on a group of their own, and stop: let them compare first."""
        self._until(board, peers, lambda peer: self._has_compared(board, peer), deadline)

    def _until(self, board: Board, peers: Sequence[int], ready: Callable[[int], bool], deadline: float) -> list[int]:
        """The peers that are not ready at the deadline; raises when another pair of ranks is found to differ."""
        pending = list(peers)
        pause = _FIRST_PAUSE
        while True:
            elsewhere = board.get("difference")  # before the look: a difference with this rank is found in its words
            pending = [peer for peer in pending if not ready(peer)]
            if elsewhere is not None:  # those two stop, so this rank's next collective would never end
                board.set(f"raised/{self.rank}", 1)
                raise RanksDisagree(**elsewhere, relayed_to=self.rank)
            left = deadline - time.monotonic()
            if not pending or left <= 0:
                return pending
            time.sleep(min(pause, left))
            pause = min(pause * 1.5, _LAST_PAUSE)

    def _has_compared(self, board: Board, peer: int) -> bool:
        return board.has(self._key("done", peer)) or self._is_cached(board, peer)

    def _is_cached(self, board: Board, peer: int) -> bool:
        return board.has(f"cached/{peer}/{self.tag}/{self._n}")

    def _look(self, board: Board, peer: int, deadline: float) -> bool:
        """True when this peer needs no more waiting for; raises on a difference."""
        record = board.get(self._key("record", peer))
        if record is not None:
            shared = self._shared(peer, record["digests"])
            if not self.cached and not record["cached"] and self._may_differ(shared, record["digests"]):
                theirs = board.rows(record["digests"][WHOLE]) or []
                self._compare(board, peer, shared, theirs, deadline)
            return True
        for group, n in self._order.items():
            place = board.get(f"order/{group}/{peer}/{n}") if peer in self.members[group] else None
            if place is not None:
                kind, tag, unsure = place
                if unsure or self._unsure:
                    continue
                if kind == self.kind and tag != self.tag:  # other models: say in which collective, if in one
                    other = board.get(self._key("record", peer, tag))
                    found = None if other is None or not self.rows else board.rows(other["digests"][WHOLE])
                    if other is not None and found:
                        shared = self._shared(peer, other["digests"])
                        self._compare(board, peer, shared, found, deadline, same_graph=False)
                for field, mine, theirs in (
                    ("kind", self.kind, kind),
                    ("tag (captured graph and options)", self.tag, tag),
                ):
                    if mine != theirs:
                        self._differ(board, deadline, "other_graph", peer, group, field, mine, theirs)
        return self._is_cached(board, peer)

    def _shared(self, peer: int, theirs: Iterable[str]) -> list[str]:
        """Groups that both ranks are in and that either's rows run on."""
        both = {group: compat.group_ranks(group) or () for group in theirs if group != WHOLE} | self.members
        return [group for group, ranks in both.items() if peer in ranks and self.rank in ranks]

    def _may_differ(self, shared: Sequence[str], theirs: Mapping[str, str]) -> bool:
        """False when the digests prove the pair equal; on one shared group that group's, else the whole's."""
        what = shared[0] if len(shared) == 1 else WHOLE
        return self.digests.get(what) != theirs.get(what)

    def _compare(
        self,
        board: Board,
        peer: int,
        shared: Sequence[str],
        rows: Sequence[dict[str, Any]],
        deadline: float,
        *,
        same_graph: bool = True,
    ) -> None:
        ours = [row for row in self.rows if row.group in shared]
        theirs = [row for row in rows if row.get("group") in shared]
        difference = first_difference(ours, theirs)
        if difference is None:
            return
        position, field, a, b = difference
        mine = ours[position] if position < len(ours) else None
        self._differ(
            board,
            deadline,
            fault_of([comparable(row) for row in ours], theirs, field, same_graph=same_graph),
            peer,
            mine.group if mine is not None else b["group"],
            field,
            a,
            b,
            position,
            mine.node if mine is not None else None,
        )

    def _differ(
        self,
        board: Board,
        deadline: float,
        fault: str,
        peer: int,
        group: str | None,
        field: str,
        mine: Any,
        theirs: Any,
        position: int | None = None,
        node: str | None = None,
    ) -> NoReturn:
        found: dict[str, Any] = {
            "rank": self.rank,
            "peer": peer,
            "graph": self.graph,
            "group": group,
            "position": position,
            "field": field,
            "mine": mine,
            "theirs": theirs,
            "node": node,
            "fault": fault,
        }
        board.set_first("difference", found)
        board.set(f"raised/{self.rank}", 1)
        self._linger(board, deadline)
        raise RanksDisagree(**found)

    def _linger(self, board: Board, deadline: float) -> None:
        """The rank that raises may take the store down with it: give its peers a moment to read it first."""
        end = time.monotonic() + _LINGER
        others = {r for ranks in self.members.values() for r in ranks} - {self.rank}
        while others and time.monotonic() < min(end, max(deadline, end - _LINGER + 0.5)):
            others = {r for r in others if not board.has(f"raised/{r}") and not board.has(self._key("done", r))}
            time.sleep(_LAST_PAUSE / 10)
