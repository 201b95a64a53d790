"""`launch(fn, 2, *args, timeout=60)` runs the module-level `fn(rank, ranks, *args)` on real processes
(gloo, file store) and returns one value per rank; `run_script(path, 2, [...], timeout=120)` runs a script
under torchrun; `from tests.distributed.launch import launch`.

Every process of a launch carries a unique mark in its environment, so that nothing outlives the launch: at
the deadline, and at the end, whatever still carries the mark is killed (inductor's compile workers too). A
failure raises `LaunchError` with the tail of each rank's log. No port is chosen in advance, no name is
shared: launches may run side by side under pytest-xdist.
"""

from __future__ import annotations

import multiprocessing
import os
import pickle
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing import forkserver
from pathlib import Path
from typing import Any, TypeAlias

from tests.distributed import rank as one_rank
from tests.distributed.rank import REPOSITORY

_MARK = "COLLECTIVE_IDENTITY_TEST_LAUNCH"
_TAIL_LINES = 60
# With the agents' store, which outlives a restart, gloo reads the addresses of the ranks that have died (torch 2.13).
_HOSTS_ENVIRONMENT = {"GLOO_SOCKET_IFNAME": "lo", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}


class LaunchError(AssertionError):
    """A rank failed or the deadline passed; the text holds the tail of every rank's log."""


@dataclass(frozen=True, slots=True)
class RankOutcome:
    """What became of one rank: `value` is what the function returned (None if it failed), `log` stdout and
    stderr."""

    rank: int
    value: Any
    exit_code: int | None
    log: str

    @property
    def ok(self) -> bool:
        return self.exit_code == 0


@dataclass(frozen=True, slots=True)
class ScriptOutcome:
    """A torchrun run: `stdout` of rank 0 alone, `logs[rank]` stdout and stderr of each, `exit_code` of
    torchrun."""

    exit_code: int
    stdout: str
    logs: tuple[str, ...]
    launcher_log: str


class _Fork:
    """A process that forks off the server, which starts with the first one; what `Popen` is for a fresh one."""

    def __init__(self, work: Path, rank: int, environment: Mapping[str, str]) -> None:
        context = multiprocessing.get_context("forkserver")
        before = dict(os.environ)
        os.environ.clear()
        # The server's: torch reads the number of threads when imported. It outlives the launch, so it has no mark.
        os.environ.update({name: value for name, value in environment.items() if name != _MARK})
        try:
            context.set_forkserver_preload(["tests.distributed.imported"])
            forkserver.ensure_running()
        finally:
            os.environ.clear()
            os.environ.update(before)
        self._process = context.Process(target=one_rank.forked, args=(work, rank, dict(environment)))
        self._process.start()

    @property
    def pid(self) -> int:
        assert self._process.pid is not None
        return self._process.pid

    @property
    def returncode(self) -> int | None:
        return self._process.exitcode

    def poll(self) -> int | None:
        return self._process.exitcode

    def wait(self) -> None:
        self._process.kill()  # before it had a session of its own no signal to its group reaches it
        self._process.join()


Started: TypeAlias = "subprocess.Popen[bytes] | _Fork"


def launch(
    fn: Callable[..., Any],
    ranks: int,
    *args: Any,
    timeout: float = 60.0,
    backend: str | None = "gloo",
    store: str = "file",
    env: Mapping[str, str] | None = None,
    check: bool = True,
    grace: float = 5.0,
) -> list[Any]:
    """Run `fn(rank, ranks, *args)` on `ranks` processes; return the values in rank order.

    `backend=None` starts no process group. `store` is "file" or "tcp" (rank 0 serves on a port the system
    picks). Each has one thread, one compile thread and a fresh inductor cache. `env` adds to the environment, in
    processes that start Python anew; without it they are forks of a server that has imported torch once.
    `check=False` returns a `RankOutcome` per rank and raises only at the deadline. After the first failure the other
    ranks get `grace` seconds to end by themselves. `timeout` is in seconds and covers start-up.
    """
    if store not in ("file", "tcp"):
        raise ValueError(f"store must be 'file' or 'tcp', not {store!r}")
    mark = uuid.uuid4().hex
    work = Path(tempfile.mkdtemp(prefix="launch-"))
    processes: list[Started] = []
    try:
        job = {
            "path": sys.path,
            "module": fn.__module__,
            "file": sys.modules[fn.__module__].__file__,
            "function": fn.__qualname__,
            "args": pickle.dumps(args),
            "ranks": ranks,
            "backend": backend,
            "store": store,
            "dump_after": max(timeout - 3.0, timeout * 0.7),
        }
        (work / "job").write_bytes(pickle.dumps(job))
        for rank in range(ranks):
            environment = _environment(mark, work / f"inductor{rank}", env)
            if env is None:
                processes.append(_Fork(work, rank, environment))
            else:
                command = [sys.executable, "-u", os.path.abspath(one_rank.__file__), str(work), str(rank)]
                processes.append(_start(command, work / f"log{rank}", environment))
        expired = not _wait(processes, timeout, grace if check else None)
        outcomes = [_outcome(work, rank, process) for rank, process in enumerate(processes)]
    finally:
        _kill(mark, processes)
        shutil.rmtree(work, ignore_errors=True)
    if expired:
        running = [o.rank for o in outcomes if o.exit_code is None]
        raise LaunchError(
            _tails(f"{fn.__qualname__}: no end after {timeout} s, ranks {running} killed", outcomes)
        )
    if not check:
        return list(outcomes)
    if not all(o.ok for o in outcomes):
        bad = {o.rank: o.exit_code for o in outcomes if not o.ok}
        raise LaunchError(
            _tails(f"{fn.__qualname__}: rank: exit code {bad} (None: killed after another's)", outcomes)
        )
    return [o.value for o in outcomes]


def run_script(
    script: str | Path,
    ranks: int,
    argv: Sequence[str] = (),
    *,
    timeout: float = 120.0,
    env: Mapping[str, str] | None = None,
    check: bool = True,
    cwd: str | Path = REPOSITORY,
) -> ScriptOutcome:
    """Run `script argv` under torchrun on `ranks` processes of this host, on a port that torchrun finds
    itself.

    Raises `LaunchError` at the deadline, and unless `check=False` on an exit code other than 0.
    """
    mark = uuid.uuid4().hex
    work = Path(tempfile.mkdtemp(prefix="launch-"))
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    command += ["--redirects=3", f"--log-dir={work / 'logs'}", str(script), *argv]
    process: subprocess.Popen[bytes] | None = None
    try:
        process = _start(command, work / "launcher", _environment(mark, work / "inductor", env), cwd)
        expired = not _wait([process], timeout, None)
        streams = [_torchrun_streams(work / "logs", rank) for rank in range(ranks)]
        launcher_log = (work / "launcher").read_text(errors="replace")
    finally:
        _kill(mark, [] if process is None else [process])
        shutil.rmtree(work, ignore_errors=True)
    exit_code = process.returncode
    outcomes = [RankOutcome(rank, None, exit_code, out + err) for rank, (out, err) in enumerate(streams)]
    if expired or (check and exit_code != 0):
        what = f"no end after {timeout} s" if expired else f"exit code {exit_code}"
        raise LaunchError(_tails(f"{script}: {what}\n{_tail(launcher_log)}", outcomes))
    return ScriptOutcome(exit_code, streams[0][0], tuple(o.log for o in outcomes), launcher_log)


def run_hosts(
    script: str | Path, hosts: Sequence[str], ranks: int, argv: Sequence[str] = (), *, timeout: float, restarts: int = 0
) -> list[str]:
    """Run `script argv` under one torchrun per loopback address in `hosts`, `ranks` processes each, as on so many
    hosts that find each other by address; what each torchrun and its ranks said.

    Raises `LaunchError` at the deadline, and on an exit code other than 0.
    """
    mark = uuid.uuid4().hex
    work = Path(tempfile.mkdtemp(prefix="launch-"))
    with socket.socket() as probe:
        probe.bind((hosts[0], 0))
        endpoint = f"{hosts[0]}:{probe.getsockname()[1]}"
    processes: list[Started] = []
    try:
        for number, host in enumerate(hosts):
            command = [sys.executable, "-m", "torch.distributed.run", f"--nnodes={len(hosts)}"]
            command += [f"--nproc-per-node={ranks}", f"--max-restarts={restarts}", "--monitor-interval=0.2"]
            command += ["--rdzv-backend=c10d", f"--rdzv-endpoint={endpoint}", f"--rdzv-id={mark}"]
            command += [f"--rdzv-conf=is_host={number == 0}", f"--local-addr={host}", str(script), *argv]
            environment = _environment(mark, work / "inductor", _HOSTS_ENVIRONMENT)
            processes.append(_start(command, work / f"log{number}", environment, REPOSITORY))
        expired = not _wait(processes, timeout, 20.0)
        codes = [process.poll() for process in processes]
        logs = [(work / f"log{number}").read_text(errors="replace") for number in range(len(hosts))]
    finally:
        _kill(mark, processes)
        shutil.rmtree(work, ignore_errors=True)
    if expired or any(codes):
        what = f"no end after {timeout} s" if expired else f"exit codes {codes}"
        raise LaunchError("\n".join([f"{script}: {what}", *map(_tail, logs)]))
    return logs


def _start(
    command: Sequence[str], log: Path, env: Mapping[str, str], cwd: str | Path | None = None
) -> subprocess.Popen[bytes]:
    """A process in a session of its own that writes all it says to ``log``."""
    with open(log, "wb") as said:
        return subprocess.Popen(
            command,
            stdout=said,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            cwd=cwd,
            env=env,
            start_new_session=True,
        )


def _environment(mark: str, cache: Path, extra: Mapping[str, str] | None) -> dict[str, str]:
    env = {k: v for k, v in os.environ.items() if not k.startswith(("TORCHELASTIC_", "PYTEST_XDIST"))}
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
        env.pop(name, None)
    inherited = env.get("PYTHONPATH")
    env.update(
        PYTHONPATH=os.pathsep.join([str(REPOSITORY), *([inherited] if inherited else [])]),
        OMP_NUM_THREADS="1",
        TORCHINDUCTOR_COMPILE_THREADS="1",
        TORCHINDUCTOR_CACHE_DIR=str(cache),
    )
    env.update(extra or {})
    env[_MARK] = mark
    return env


def _wait(processes: Sequence[Started], timeout: float, grace: float | None) -> bool:
    """True when all ended (or, with `grace`, that long after the first failure); False at the deadline."""
    deadline = time.monotonic() + timeout
    failed_at: float | None = None
    while True:
        codes = [p.poll() for p in processes]
        if all(code is not None for code in codes):
            return True
        now = time.monotonic()
        if grace is not None and any(code not in (None, 0) for code in codes):
            failed_at = failed_at or now
            if now - failed_at > grace:
                return True
        if now > deadline:
            return False
        time.sleep(0.02)


def _kill(mark: str, processes: Sequence[Started]) -> None:
    for process in processes:
        if process.poll() is None:
            _signal(process.pid, group=True)
    for _ in range(50):
        alive = _marked(mark)
        for pid in alive:
            _signal(pid, group=False)
        if not alive:
            break
        time.sleep(0.02)
    for process in processes:
        process.wait()


def _signal(pid: int, *, group: bool) -> None:
    try:
        if group:
            os.killpg(pid, signal.SIGKILL)
        else:
            os.kill(pid, signal.SIGKILL)
    except (ProcessLookupError, PermissionError):
        pass  # it ended in the meantime


def _marked(mark: str) -> list[int]:
    """Processes that carry the mark and still run (Linux; elsewhere none, and the process groups must do)."""
    wanted = f"{_MARK}={mark}".encode()
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            if wanted in (entry / "environ").read_bytes().split(b"\0"):
                found.append(int(entry.name))
        except OSError:
            continue  # another user's, or gone
    return found


def _outcome(work: Path, rank: int, process: Started) -> RankOutcome:
    log = (work / f"log{rank}").read_text(errors="replace")
    value, written = None, work / f"value{rank}"
    if process.returncode == 0 and written.exists():
        value = pickle.loads(written.read_bytes())
    return RankOutcome(rank, value, process.returncode, log)


def _torchrun_streams(logs: Path, rank: int) -> tuple[str, str]:
    def read(name: str) -> str:
        return "".join(
            p.read_text(errors="replace") for p in sorted(logs.glob(f"*/attempt_*/{rank}/{name}.log"))
        )

    return read("stdout"), read("stderr")


def _tail(text: str) -> str:
    return "\n".join(text.splitlines()[-_TAIL_LINES:])


def _tails(head: str, outcomes: Sequence[RankOutcome]) -> str:
    parts = [
        f"----- rank {o.rank} (exit code {o.exit_code}), last lines -----\n{_tail(o.log)}" for o in outcomes
    ]
    return "\n".join([head, *parts])
