"""How is a function run on several ranks in a test? One process per rank, a deadline, a log of each.

The processes meet over a file in a folder of their own: no port, no name that another test could have taken.
Each rank is a Python that calls `main` with the folder and its number.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import pickle
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..reporting import Report, build_report
from ..reporting.jsonl import RunFolderError, read_run
from .asserts import Stage, assert_nothing_lost, assert_roles

_TAIL = 60  # lines of each rank's log in the text of a failure
_START = (  # stacks into the log when asked, from the start: torch's import takes its time
    "import faulthandler, signal; faulthandler.register(signal.SIGUSR1); "
    "from collective_identity.testing.ranks import main; main()"
)
_SAY = 2.0  # seconds that ranks get at the deadline to write down where they stand
_GRACE = 5.0  # seconds that the other ranks get to end by themselves after one has failed


class RanksFailed(AssertionError):
    """A rank raised, ended badly or was killed at the deadline; the text holds the end of every rank's log."""


@dataclass(frozen=True, slots=True)
class RankOutcome:
    """One rank: what the function returned (None if it did not return), exit code (None: killed), stdout and
    stderr."""

    rank: int
    value: Any
    exit_code: int | None
    log: str


@dataclass(frozen=True, slots=True)
class RanksRun:
    """What a function did on every rank: `outcomes` in rank order and the run's `report`, None without a session."""

    outcomes: tuple[RankOutcome, ...]
    report: Report | None

    @property
    def values(self) -> list[Any]:
        """What the function returned, in rank order."""
        return [outcome.value for outcome in self.outcomes]

    def assert_roles(self, expected: Mapping[str, int], *, stage: Stage = "captured") -> None:
        """`assert_roles` on this run's report."""
        __tracebackhide__ = True
        assert_roles(self._report(), expected, stage=stage)

    def assert_nothing_lost(self) -> None:
        """`assert_nothing_lost` on this run's report."""
        __tracebackhide__ = True
        assert_nothing_lost(self._report())

    def _report(self) -> Report:
        if self.report is None:
            raise AssertionError("expected a run with a session, found one without: leave out session=False")
        return self.report


def run_on_ranks(
    function: Callable[..., Any],
    ranks: int,
    *args: Any,
    timeout: float = 60.0,
    backend: str = "gloo",
    session: bool = True,
    env: Mapping[str, str] | None = None,
    check: bool = True,
) -> RanksRun:
    """Run ``function(*args)`` on each of so many ranks, in processes of their own with a process group.

    Args:
        function: of a module or of a class without arguments that the processes can import again.
        ranks: number of processes.
        args: picklable.
        timeout: seconds for everything, the start of Python (about 3 s) included.
        backend: of the process group.
        session: open a session with a run folder around the call; the run's `report` is made of it. False where the
            function calls `collective_identity.enable` itself.
        env: added to the environment. One thread and an Inductor cache of its own are the default.
        check: raise when a rank fails; False returns the outcomes instead. The deadline always raises.

    Raises:
        RanksFailed: see there. At the deadline its text says where each rank stands, as `watch` does, and each log ends
            with the stacks of that rank's threads.
        ValueError: a function that no other process can import.
    """
    __tracebackhide__ = True
    module = sys.modules.get(function.__module__)
    file = getattr(module, "__file__", None)
    if file is None or "<locals>" in function.__qualname__:
        raise ValueError(f"expected a function at the top of a module or class, found {function.__qualname__}")
    work = Path(tempfile.mkdtemp(prefix="ranks-"))
    job = {"path": sys.path, "module": function.__module__, "file": file, "name": function.__qualname__, "args": args}
    job |= {"ranks": ranks, "backend": backend, "session": session}
    processes: list[subprocess.Popen[bytes]] = []
    try:
        (work / "job").write_bytes(pickle.dumps(job))
        processes += [_start(work, rank, env) for rank in range(ranks)]
        ended: list[int] = []
        expired = not _wait(processes, timeout, ended)
        standing = _standing(work, processes) if expired else ()
        for process in processes:
            _kill(process)
        outcomes = tuple(_outcome(work, rank, process) for rank, process in enumerate(processes))
        if expired or (check and any(outcome.exit_code != 0 for outcome in outcomes)):
            outcomes_in_order = sorted(outcomes, key=lambda one: (one.exit_code == 0, _place(one.rank, ended)))
            late = [f"no end after {timeout} s"] if expired else []
            raise RanksFailed(_text(function.__qualname__, outcomes_in_order, late, standing))
        try:
            report = build_report(read_run(work / "run")) if session else None
        except RunFolderError:
            report = None  # no rank got as far as a record
        return RanksRun(outcomes, report)
    finally:
        for process in processes:
            _kill(process)
        shutil.rmtree(work, ignore_errors=True)


def _start(work: Path, rank: int, extra: Mapping[str, str] | None) -> subprocess.Popen[bytes]:
    env = {k: v for k, v in os.environ.items() if not k.startswith(("TORCHELASTIC_", "PYTEST_"))}
    package = str(Path(__file__).resolve().parents[2])
    env["PYTHONPATH"] = os.pathsep.join(filter(None, (package, env.get("PYTHONPATH"))))
    env["TORCHINDUCTOR_CACHE_DIR"] = str(work / f"inductor{rank}")
    env.setdefault("OMP_NUM_THREADS", "1")
    env.update(extra or {})
    with open(work / f"log{rank}", "wb") as log:
        return subprocess.Popen(
            [sys.executable, "-u", "-c", _START, str(work), str(rank)],
            stdout=log,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            env=env,
            start_new_session=True,
        )


def _wait(processes: Sequence[subprocess.Popen[bytes]], timeout: float, ended: list[int]) -> bool:
    """False at the deadline; True when all have ended, or one badly and the others had their time. `ended` gets the
    ranks in the order in which they ended."""
    deadline, failed = time.monotonic() + timeout, None
    while True:
        codes, now = [process.poll() for process in processes], time.monotonic()
        ended += [rank for rank, code in enumerate(codes) if code is not None and rank not in ended]
        if None not in codes:
            return True
        if any(code not in (None, 0) for code in codes):
            failed = failed or now
            if now > failed + _GRACE:
                return True
        if now > deadline:
            return False
        time.sleep(0.02)


def _place(rank: int, ended: Sequence[int]) -> int:
    return ended.index(rank) if rank in ended else len(ended)


def _standing(work: Path, processes: Sequence[subprocess.Popen[bytes]]) -> Sequence[str]:
    """Have every rank write its stacks into its log, and say what `watch` would; nothing where no session is open."""
    for process in processes:
        if process.poll() is None:
            process.send_signal(signal.SIGUSR1)
    said: Sequence[str] = ()
    try:
        from ..reporting.watch_command import lines
        from ..watch import Watcher, open_store

        watcher = Watcher(open_store(f"file:{work / 'store'}", _SAY))
        found = watcher.look(0.0)
        said = () if found is None else list(lines(*found, watcher.start["ranks"]))
    except (ImportError, RuntimeError, OSError, ValueError, KeyError):
        pass  # without the `report` extra, or before any rank has spoken: the stacks remain
    _wait(processes, _SAY, [])
    return said


def _kill(process: subprocess.Popen[bytes]) -> None:
    """End a rank and whatever it started."""
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except (ProcessLookupError, PermissionError):
        pass  # it has ended, and what it started too
    process.wait()


def _outcome(work: Path, rank: int, process: subprocess.Popen[bytes]) -> RankOutcome:
    written = work / f"value{rank}"
    value = pickle.loads(written.read_bytes()) if process.returncode == 0 and written.exists() else None
    code = None if process.returncode in (-signal.SIGKILL, -signal.SIGUSR1) else process.returncode
    return RankOutcome(rank, value, code, (work / f"log{rank}").read_text(errors="replace"))


def _text(name: str, outcomes: Sequence[RankOutcome], late: Sequence[str], standing: Sequence[str]) -> str:
    """The ranks in this order: who ended badly first is the likeliest cause."""
    codes = {one.rank: one.exit_code for one in outcomes if one.exit_code != 0}
    bad = [f"rank {r} {'was killed' if c is None else f'ended with exit code {c}'}" for r, c in codes.items()]
    text = [f"{name}: {'; '.join([*late, *bad])}", *standing]
    for one in outcomes:
        text += [f"----- rank {one.rank}, last lines -----", *one.log.splitlines()[-_TAIL:]]
    return "\n".join(text)


# ---- in the process of one rank ----


def _load(name: str, file: str) -> Any:
    """The module under the name it has in the test process, whatever way pytest imported it."""
    try:
        module = importlib.import_module(name)
        if getattr(module, "__file__", None) == file:
            return module
    except ImportError:
        pass
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None and spec.loader is not None, file
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _end_with(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(0.5)
    os._exit(99)


def _rank(work: Path, rank: int) -> None:
    import torch.distributed as dist

    from ..session import enable

    threading.Thread(target=_end_with, args=(os.getppid(),), daemon=True).start()
    job = pickle.loads((work / "job").read_bytes())
    sys.path[:] = job["path"]
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(job["ranks"]))
    store = dist.FileStore(str(work / "store"), job["ranks"])
    dist.init_process_group(job["backend"], store=store, rank=rank, world_size=job["ranks"])
    function: Any = _load(job["module"], job["file"])
    *classes, last = job["name"].split(".")
    for name in classes:
        function = getattr(function, name)
    function = getattr(function() if classes else function, last)
    handle = enable(run_dir=work / "run") if job["session"] else None
    try:
        value = function(*job["args"])
    finally:
        if handle is not None:
            handle.close()
    (work / f"value{rank}.new").write_bytes(pickle.dumps(value))
    os.replace(work / f"value{rank}.new", work / f"value{rank}")
    if dist.is_initialized():
        dist.destroy_process_group()


def main() -> None:
    """One rank, from start to end of its process."""
    try:
        _rank(Path(sys.argv[1]), int(sys.argv[2]))
        code = 0
    except BaseException:
        traceback.print_exc()
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
