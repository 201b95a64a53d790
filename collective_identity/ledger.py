"""What happened to each identity, from capture to the compiled graph? The ledger writes it down and says it
once.

A `Ledger` keeps the records of a session in memory and, with a run folder, on disk; a `GraphLog` is its
face for one compile. Both may be used from any thread: a lazy backward compiles in autograd's.
"""

from __future__ import annotations

import atexit
import logging
import os
import socket
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, Literal, get_args

import torch
from torch import fx

from . import artifacts, saved_graph
from .agreement import AgreementResult, AgreementState, RanksDisagree
from .codes import AGREEMENT_TIMEOUT, CODES, RANKS_DISAGREE, Code
from .declared import Declared
from .digest import CollectiveRow
from .job import rank_and_ranks, run_and_restart
from .places import place_of
from .reporting.jsonl import RankLog, RankWriter
from .reporting.records import (
    AgreementRecord,
    CapturedRecord,
    EndRecord,
    EventRecord,
    Expectation,
    ExpectedRecord,
    ExpectedRow,
    FinishRecord,
    GraphRecord,
    PassRecord,
    Record,
    RunRecord,
)
from .service import Service
from .sharing import Shared
from .storage import Storage
from .version import __version__

__all__ = ["Expectation", "ExpectedRow", "GraphKind", "GraphLog", "Ledger"]

logger = logging.getLogger(__name__)

GraphKind = Literal["joint", "forward", "backward", "inference", "step"]
"""``"step"``: forward and backward as one graph, compiled as one."""
STEP: Final = "collective_identity.step"
"""Key in a graph module's ``meta``: it is a whole training step, of this name."""


class Ledger:
    """The records of one session. Opened and closed by the session.

    The rank is read when the first record is written, since a session may open before the process group. `session`
    is then written down too: the number of this session in its process, from 1.
    """

    def __init__(self, *, mode: str, run_dir: str | None, agreement_timeout: float, watch: bool = True) -> None:
        self.agreement_timeout = agreement_timeout
        self.agreement_state = AgreementState()
        self.service = Service(self.agreement_state, run_dir=run_dir) if watch else None
        self._mode = mode
        self.run_dir = run_dir
        self.session: int | None = None
        self.models = Declared()
        self._lock = threading.RLock()
        self._records = Storage()
        self._graphs = 0
        self._writer: RankWriter | None = None
        self._closed = False
        self._seen: dict[int | None, set[tuple[object, ...]]] = {}

    @property
    def closed(self) -> bool:
        """Whether the session has ended."""
        return self._closed

    def declare(self, expectation: Expectation, module: object | None = None) -> None:
        """Record what a producer will emit; the same model name, or module, again replaces it."""
        with self._lock:
            said, name = self.models.named(expectation, module)
            self._add(ExpectedRecord(said.model, said.world, tuple(said.rows), name))

    def begin_graph(
        self, kind: GraphKind, name: str, backend: str, *, lite: str = "off", modules: tuple[str, ...] | None = None
    ) -> GraphLog:
        """Start the log of one compile.

        `name` must be the same for the forward and the backward of one compile (Dynamo's compile id): the
        report pairs them by it. `lite`: reported for a graph that never finishes. `modules`: whose graph it is,
        from `Declared.of`; None where that is not known. ValueError for an unknown kind.
        """
        if kind not in get_args(GraphKind):
            raise ValueError(f"kind: expected one of {', '.join(get_args(GraphKind))}, found {kind!r}")
        with self._lock:
            number = self._graphs
            self._graphs += 1
            self._add(GraphRecord(number, kind, name, backend, lite, modules))
        return GraphLog(self, number, kind, name)

    def event(
        self, code: Code, *, node: str | None = None, role: str | None = None, detail: str = ""
    ) -> None:
        """Record something that belongs to no graph, once per (code, node, detail)."""
        if self._first(None, (code.id, node, detail)):
            self._event(None, "", code, node, role, None, detail)

    def take_over(self, other: Ledger) -> None:
        """Close another ledger and declare what was declared there of models that still live: they may be installed
        before `enable`."""
        other.close()
        self.models.take_over(other.models)
        for record in other.records():
            if isinstance(record, ExpectedRecord) and not other.models.gone(record.module):
                self._add(record)

    def records(self) -> tuple[Record, ...]:
        """What was recorded so far, oldest first."""
        with self._lock:
            return tuple(self._records)

    def nbytes(self) -> dict[str, int]:
        """Bytes of the records in memory: ``rows``, ``events``, and the numbering of ``texts`` (`Storage.nbytes`)."""
        with self._lock:
            return self._records.nbytes()

    def rank_log(self) -> RankLog:
        """The records in the form the report is built from."""
        with self._lock:
            if not self._records:
                self._add_run()
            records = tuple(self._records)
            rank = records[0].rank if isinstance(records[0], RunRecord) else 0
            return RankLog(rank, records)

    def close(self, error: BaseException | None = None) -> None:
        """Write what was never written (an empty run still leaves its `run` line), the `end` line, and close the file.

        A session that is open when Python ends is closed then.
        """
        if self.service is not None:
            self.service.close()
        with self._lock:
            if self._closed:
                return
            if not self._records:
                self._add_run()
            text = None if error is None else f"{type(error).__name__}: {error}".split("\n")[0]
            self._append(EndRecord(time.time(), text))
            self._closed = True
            atexit.unregister(self._leave)
            if self._writer is not None:
                self._writer.close()
                self._writer = None

    def _leave(self) -> None:
        self.close(getattr(sys, "last_value", None))

    def _first(self, graph: int | None, key: tuple[object, ...]) -> bool:
        with self._lock:
            seen = self._seen.setdefault(graph, set())
            known = key in seen
            seen.add(key)
        return not known

    def _ended(self, graph: int) -> None:
        """A compile is over: forget what only tells its events apart."""
        with self._lock:
            self._seen.pop(graph, None)
            self._records.graph_ended(graph)

    def _add(self, record: Record) -> Record:
        with self._lock:
            if not self._records:
                self._add_run()
            return self._append(record)

    def _add_run(self) -> None:
        rank, ranks = rank_and_ranks()
        run_id, restart = run_and_restart()
        if self.run_dir is not None and not self._closed:
            try:
                self._writer = RankWriter(self.run_dir, rank)
                atexit.register(self._leave)
            except OSError as error:
                logger.warning(
                    "%s: no run file for rank %d (%s); the run goes on", self.run_dir, rank, error
                )
        self._append(
            RunRecord(
                rank=rank,
                ranks=ranks,
                mode=self._mode,
                run_id=run_id,
                restart=restart,
                host=socket.gethostname(),
                pid=os.getpid(),
                started=time.time(),
                torch=str(torch.__version__),
                package=__version__,
                session=self.session,
            )
        )

    def _append(self, record: Record) -> Record:
        if self._writer is not None:
            self._writer.write(record)
        return self._records.append(record)

    def _event(
        self,
        graph: int | None,
        where: str,
        code: Code,
        node: str | None,
        role: str | None,
        pass_name: str | None,
        detail: str,
        *,
        said: bool = False,
        params: tuple[str, ...] | None = None,
        stack: str | None = None,
    ) -> None:
        self._add(
            EventRecord(
                graph,
                code.id,
                code.slug,
                code.severity,
                code.text,
                code.remedy,
                node,
                role,
                pass_name,
                detail,
                params,
                stack,
            )
        )
        if said:
            return
        logger.log(
            {"info": logging.DEBUG, "warning": logging.WARNING}.get(code.severity, logging.ERROR),
            "%s %s: %s%s%s%s%s%s%s%s. %s",
            code.id,
            code.slug,
            code.text,
            f"; node {node}" if node else "",
            f" of {where}" if where else "",
            f"; role {role}" if role else "",
            f"; pass {pass_name}" if pass_name else "",
            f"; parameters {_few(params)}" if params else "",
            f"; at {stack}" if stack else "",
            f"; {detail}" if detail else "",
            code.remedy,
        )


class GraphLog:
    """The life of one compiled graph. Every method may be called from any thread, at most one at a time."""

    def __init__(self, ledger: Ledger, number: int, kind: GraphKind, name: str) -> None:
        self._ledger = ledger
        self.number = number
        self.kind = kind
        self.name = name
        self._where = f"{kind} graph {name}"
        self._captured: tuple[CollectiveRow, ...] = ()
        self._seconds = 0.0
        self.shared = Shared(ledger.agreement_state, ledger.service, number, kind, name)

    def captured(self, rows: Iterable[CollectiveRow]) -> Sequence[CollectiveRow]:
        """The collectives of the graph before any pass of ours (`collective_table`); returns them as they are kept."""
        self._captured = tuple(rows)
        kept = self._ledger._add(CapturedRecord(self.number, self._captured))
        if logger.isEnabledFor(logging.DEBUG):
            logger.debug("%s: captured %s", self._where, _by_role(self._captured))
        assert isinstance(kept, CapturedRecord)
        return kept.rows

    def dump(self, gm: fx.GraphModule) -> None:
        """Save the graph under ``graphs/`` of the run folder; a graph or disk that does not allow it is logged."""
        if self._ledger.run_dir is None:
            return
        folder = Path(self._ledger.run_dir) / saved_graph.FOLDER
        rank, _ = rank_and_ranks()
        try:
            saved_graph.write(folder, gm, rank=rank, phase=self.kind, name=self.name, number=self.number)
        except (saved_graph.SavedGraphError, OSError) as error:
            logger.warning("%s: not saved: %s", self._where, error)

    def event(
        self,
        code: Code,
        *,
        node: object = None,
        role: str | None = None,
        pass_name: str | None = None,
        detail: str = "",
    ) -> None:
        """Record what happened to one identity; said and kept once per (code, node name), without a
        node once per (code, pass, detail).

        Severity "info" is logged at DEBUG, the others at their own level. `node` is an FX node or its name.
        """
        named = None if node is None else str(getattr(node, "name", node))
        place = named if named is not None else f"{pass_name} {detail}"
        if self._ledger._first(self.number, (code.id, place)):
            params, stack = place_of(node)
            self._ledger._event(
                self.number, self._where, code, named, role, pass_name, detail, params=params, stack=stack
            )

    def pass_ran(
        self,
        name: str,
        seconds: float,
        changed: bool,
        before: Mapping[str, int],
        after: Mapping[str, int],
        summary: Mapping[str, Any],
    ) -> None:
        """A pass ran for `seconds`; `before` and `after` count the collectives by role."""
        self._seconds += seconds
        self._ledger._add(
            PassRecord(self.number, name, seconds, changed, dict(before), dict(after), dict(summary))
        )
        logger.debug(
            "%s: pass %s %s in %.4f s, %s -> %s %s",
            self._where,
            name,
            "changed the graph" if changed else "changed nothing",
            seconds,
            dict(before),
            dict(after),
            dict(summary),
        )

    def publish(
        self, rows: Sequence[CollectiveRow], *, tag: str, cached: bool = False, groups: Sequence[str] | None = None
    ) -> None:
        """Let the other ranks know of the graph, without waiting; arguments as in `agreement.agree`."""
        self.shared.publish(rows, tag=tag, cached=cached, groups=groups)

    def agree(
        self,
        rows: Sequence[CollectiveRow],
        *,
        tag: str,
        cached: bool = False,
        groups: Sequence[str] | None = None,
        timeout: float | None = None,
    ) -> AgreementResult:
        """`agreement.agree` with this graph's kind and this session's state and bound; the verdict is
        recorded.

        Raises `RanksDisagree` after recording it.
        """
        self.publish(rows, tag=tag, cached=cached, groups=groups)
        try:
            result = self.shared.agree(self._ledger.agreement_timeout if timeout is None else timeout)
        except RanksDisagree as error:
            self._ledger._add(AgreementRecord(self.number, "differs", str(error)))
            self.event(RANKS_DISAGREE, node=error.node, detail=str(error))
            raise
        self._ledger._add(AgreementRecord(self.number, result.status, result.detail))
        if result.status == "timeout":
            self._ledger._event(
                self.number, self._where, AGREEMENT_TIMEOUT, None, None, None, result.detail, said=True
            )
        return result

    def finish(
        self,
        rows: Iterable[CollectiveRow],
        *,
        cached: bool = False,
        lite: str = "off",
        compile_seconds: float | None = None,
    ) -> Sequence[CollectiveRow]:
        """The compile ended with these collectives; `cached` when it came from a cache and no pass ran. Returns them
        as they are kept."""
        self.shared.busy(None)
        final = tuple(rows)
        self._absences((*self._captured, *final))
        finished = FinishRecord(self.number, final, cached, lite, compile_seconds)
        kept = self._ledger._add(finished)
        logger.info(
            "%s: %s%s, passes %.3f s%s%s",
            self._where,
            "from cache, no pass ran" if cached else f"captured {_by_role(self._captured)}",
            "" if cached else f", now {_by_role(final)}",
            self._seconds,
            "" if compile_seconds is None else f" of {compile_seconds:.2f} s",
            "" if lite == "off" else f", lite {lite}",
        )
        self._ended(finished)
        assert isinstance(kept, FinishRecord)
        return kept.rows

    def failed(self, error: BaseException | str, *, compile_seconds: float | None = None) -> None:
        """The compile ended in an error."""
        self.shared.busy(None)
        text = error if isinstance(error, str) else f"{type(error).__name__}: {error}"
        self._absences(self._captured)
        finished = FinishRecord(self.number, (), compile_seconds=compile_seconds, error=text)
        self._ledger._add(finished)
        logger.warning("%s: the compile failed: %s", self._where, text)
        self._ended(finished)

    def _ended(self, finished: FinishRecord) -> None:
        artifacts.count(finished, self._captured)
        artifacts.trace(self.kind, self.name, finished, self._captured, self._events)
        self._captured = ()
        self._ledger._ended(self.number)

    def _events(self) -> tuple[EventRecord, ...]:
        records = self._ledger.records()
        return tuple(r for r in records if isinstance(r, EventRecord) and r.graph == self.number)

    def _absences(self, rows: Iterable[CollectiveRow]) -> None:
        """Say what the rows say and no event has: a lost payload is never silent."""
        for row in rows:
            code = CODES.get(row.code) if row.code else None
            if code is not None and row.absence in ("malformed", "dropped"):
                self.event(code, node=row.node, role=row.role)


def _few(names: Sequence[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def _by_role(rows: Iterable[CollectiveRow]) -> str:
    counts = Counter((row.role or f"no role ({row.transport})", row.source) for row in rows)
    if not counts:
        return "no collective"
    return ", ".join(f"{n} {role}{f' {source}' if source else ''}" for (role, source), n in counts.items())
