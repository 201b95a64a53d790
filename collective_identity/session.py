"""Which session is open? One per process, opened by `enable` (or by the backend), closed by its handle.

The holder at the end of this file is the only mutable state of the package.
"""

from __future__ import annotations

import logging
import os
import threading
import traceback
from collections.abc import Iterable
from pathlib import Path
from types import TracebackType
from typing import Literal, get_args

from .ledger import Expectation, GraphKind, GraphLog, Ledger
from .outside import say_nothing_compiled
from .reporting.coverage import NOTHING_SEEN
from .reporting.jsonl import read_run
from .reporting.report import Report, build_report

Mode = Literal["optimize", "observe"]


logger = logging.getLogger(__name__)


class SessionError(RuntimeError):
    """A session was opened twice or is missing; the text says where and what to do."""


class Session:
    """What a run is asked to do and what it has seen. Every method may be called from any thread.

    Attributes:
        mode: "optimize" lets the passes change graphs, "observe" only looks and reports.
        run_dir: folder of the `rank{N}.jsonl` files, None for memory only.
        agreement_timeout: seconds to wait for other ranks before a graph's first run; 0 is off.
        ledger: the records.
        opened_at: "file:line" of the caller.
        implicit: opened by the backend because nobody had.
    """

    def __init__(
        self,
        *,
        mode: Mode = "optimize",
        run_dir: str | os.PathLike[str] | None = None,
        agreement_timeout: float = 60.0,
        watch: bool = True,
        opened_at: str = "?",
        implicit: bool = False,
    ) -> None:
        if mode not in get_args(Mode):
            raise ValueError(f"mode: expected one of {', '.join(get_args(Mode))}, found {mode!r}")
        if not agreement_timeout >= 0:
            raise ValueError(
                f"agreement_timeout: expected seconds >= 0 (0 = off), found {agreement_timeout!r}"
            )
        self.mode: Mode = mode
        self.run_dir = None if run_dir is None else str(_usable(Path(run_dir)))
        self.agreement_timeout = float(agreement_timeout)
        self.opened_at = opened_at
        self.implicit = implicit
        self.ledger = Ledger(
            mode=mode, run_dir=self.run_dir, agreement_timeout=self.agreement_timeout, watch=watch
        )

    def declare(self, expectation: Expectation, module: object | None = None) -> None:
        """Say what a producer will emit; the same model name again replaces it.

        With the ``nn.Module`` itself two models of one class are two, and graphs are known by its parameters.
        """
        self.ledger.declare(expectation, module)

    def begin_graph(
        self, kind: GraphKind, name: str, backend: str, *, lite: str = "off", modules: tuple[str, ...] | None = None
    ) -> GraphLog:
        """Start the log of one compile; `name` is the same for the forward and backward of one compile, `modules` are
        the declared models whose parameters it takes (`models_of`)."""
        return self.ledger.begin_graph(kind, name, backend, lite=lite, modules=modules)

    def models_of(self, inputs: Iterable[object]) -> tuple[str, ...] | None:
        """The declared models to which some of these tensors belong as parameters; None when there is none."""
        return self.ledger.models.of(inputs)

    def report(self) -> Report:
        """What this process has seen so far."""
        return build_report((self.ledger.rank_log(),), folder=False)

    def close(self, error: BaseException | None = None) -> None:
        """Close the run file, say what went wrong; the records stay readable by `report`. Twice does no harm.

        With the `error` that ended the session nothing more is said: what is missing may be missing because of it.
        """
        _HOLDER.release(self)
        if not self.ledger.closed:
            say_nothing_compiled(self.ledger, failed=error is not None)
            if error is None:
                self._say()
            else:
                logger.info("end of session: by %s: %s", type(error).__name__, error)
        self.ledger.close(error)

    def _say(self) -> None:
        """The end of the run in the log: one line, and a warning for each failure."""
        report = self.report()
        counts = ", ".join(f"{count} {name}" for name, count in report.ranks[0].counts.items() if count)
        logger.info("end of session: %s; ranks %s", counts or "no collective seen", report.agreement)
        several = report.ranks[0].run is not None and report.ranks[0].run.ranks > 1
        for text in (*report.failures, *(note for note in report.notes if note == NOTHING_SEEN and several)):
            logger.warning("end of session: %s", text)


class Handle:
    """Closes what `enable` opened; a context manager."""

    def __init__(self, session: Session) -> None:
        self.session = session

    def report(self) -> Report:
        """What this process has seen so far; also after `close`."""
        return self.session.report()

    def close(self) -> None:
        """End the session. Twice does no harm."""
        self.session.close()

    def __enter__(self) -> Handle:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.session.close(None if isinstance(error, SystemExit) and not error.code else error)


def enable(
    *,
    mode: Mode = "optimize",
    run_dir: str | os.PathLike[str] | None = None,
    agreement_timeout: float = 60.0,
    watch: bool = True,
) -> Handle:
    """Open the session of this process.

    Args:
        mode: "optimize", or "observe" to classify and report without changing any graph.
        run_dir: folder for `rank{N}.jsonl`, made if absent; None keeps the records in memory.
        agreement_timeout: seconds to wait for the other ranks before a graph's first run; 0 turns the check
        off.
        watch: keep telling the job's store where this rank stands, for `collective-identity watch`; one thread, no
            collective. Of no effect without other ranks.

    Raises:
        SessionError: a session is open already; names where. One that a producer or the backend opened by
            itself is replaced and hands its declarations on.
        ValueError: unknown mode or negative timeout.
        OSError: the folder cannot be made or written.
    """
    session = Session(
        mode=mode, run_dir=run_dir, agreement_timeout=agreement_timeout, watch=watch, opened_at=_caller()
    )
    _HOLDER.open(session)
    if session.ledger.service is not None:
        session.ledger.service.start()
    return Handle(session)


def current() -> Session | None:
    """The open session, None when there is none."""
    return _HOLDER.session


def ensure(run_dir: str | os.PathLike[str] | None = None) -> Session:
    """The open session; without one, a new implicit one in mode "optimize".

    Args:
        run_dir: where an implicit session keeps its records; one that has another folder, or none, is
            replaced and hands its declarations on.

    Raises:
        SessionError: an explicit session is open and keeps its records elsewhere.
        OSError: the folder cannot be made or written.
    """
    return _HOLDER.ensure(_caller(), None if run_dir is None else str(Path(run_dir).absolute()))


def report(run_dir: str | os.PathLike[str] | None = None) -> Report:
    """The report of the open session (this rank), or of a run folder (every rank in it).

    Raises:
        SessionError: no `run_dir` and no open session.
        RunFolderError: the folder holds no readable run.
    """
    if run_dir is not None:
        return build_report(read_run(run_dir))
    session = current()
    if session is None:
        raise SessionError(
            "expected an open session or a run_dir, found neither: call report() before the handle of "
            "enable() is closed, use handle.report(), or give the run_dir"
        )
    return session.report()


class _Holder:
    """The one session of this process."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.session: Session | None = None
        self.ended = 0

    def open(self, session: Session) -> None:
        with self.lock:
            replaced = self.session
            if replaced is not None and not replaced.implicit:
                raise SessionError(
                    f"expected no open session, found one opened at {replaced.opened_at}: close its "
                    f"handle first, or use `with enable(...)`"
                )
            self.session = session
            session.ledger.session = self.ended + 1
            if replaced is not None:
                session.ledger.take_over(replaced.ledger)

    def ensure(self, caller: str, run_dir: str | None) -> Session:
        with self.lock:
            open_now = self.session
            if open_now is not None and run_dir in (None, open_now.run_dir):
                return open_now
            if open_now is not None and not open_now.implicit:
                raise SessionError(
                    f"expected run_dir {open_now.run_dir!r} or none, found {run_dir!r}: the session opened "
                    f"at {open_now.opened_at} decides where records are kept; give the folder to "
                    f"enable(run_dir=...)"
                )
            self.session = opened = Session(run_dir=run_dir, opened_at=caller, implicit=True)
            opened.ledger.session = self.ended + 1
            if open_now is not None:
                opened.ledger.take_over(open_now.ledger)
            return opened

    def release(self, session: Session) -> None:
        with self.lock:
            if self.session is session:
                self.session = None
                self.ended += 1


_HOLDER = _Holder()


def _usable(folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    if not os.access(folder, os.W_OK | os.X_OK):
        raise PermissionError(
            f"run_dir: expected a folder that can be written, found {folder}; choose another"
        )
    return folder.absolute()


def _caller() -> str:
    here = Path(__file__).parent
    for frame in reversed(traceback.extract_stack()):
        if Path(frame.filename).parent != here:
            return f"{frame.filename}:{frame.lineno}"
    return "?"
