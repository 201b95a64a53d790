"""Is there one session, explicitly closed, and does the report find it?"""

from __future__ import annotations

import gc
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

import fsdp_hooks
from collective_identity import compat, session
from collective_identity.cli import app
from collective_identity.reporting import RunFolderError, read_run
from collective_identity.reporting.jsonl import read_rank, write_run
from collective_identity.reporting.records import EndRecord, ExpectedRecord, RunRecord
from collective_identity.reporting.report import FAULTS
from collective_identity.reporting.terminal import render_text
from collective_identity.session import SessionError, current, enable, ensure, report
from collective_identity.testing.asserts import assert_nothing_lost
from inductor_passes.backend import collective_identity as backend
from tests.unit.rows import expectation
from tests.unit.sharded import sharded


@pytest.fixture(autouse=True)
def closed() -> Iterator[None]:
    assert current() is None, "an earlier test left a session open"
    yield
    left = current()
    if left is not None:
        left.close()


def test_enable_opens_and_the_handle_closes() -> None:
    with enable(mode="observe", agreement_timeout=7) as handle:
        opened = current()
        assert opened is handle.session
        assert (opened.mode, opened.agreement_timeout, opened.run_dir) == ("observe", 7.0, None)
        assert ensure() is opened
    assert current() is None
    handle.close()  # twice does no harm
    assert handle.report().ok


def test_a_second_enable_names_the_place_of_the_first() -> None:
    with enable() as handle:
        with pytest.raises(SessionError, match=r"test_session\.py:\d+.*close its handle first"):
            enable(mode="observe")
        assert current() is handle.session


def test_enable_replaces_what_the_backend_opened_by_itself() -> None:
    implicit = ensure()
    assert implicit.implicit and implicit.mode == "optimize" and ensure() is implicit
    with enable(mode="observe") as handle:
        assert current() is handle.session
        implicit.close()  # no longer the open one: must not close the other
        assert current() is handle.session


def test_what_was_declared_before_enable_is_not_lost(tmp_path: Path) -> None:
    ensure().declare(expectation("A"))
    ensure(tmp_path / "one").declare(expectation("B"))  # as fsdp_hooks.install(model, run_dir=...) does
    assert ensure() is ensure(tmp_path / "one") and ensure().run_dir == str(tmp_path / "one")
    with enable(run_dir=tmp_path / "two") as handle:
        with pytest.raises(SessionError, match=r"expected run_dir .*two.* found .*three"):
            ensure(tmp_path / "three")
        assert ensure(tmp_path / "two") is handle.session
    for folder, models in (("one", ["A", "B"]), ("two", ["A", "B"])):
        records = read_run(tmp_path / folder)[0].records
        assert [record.model for record in records if isinstance(record, ExpectedRecord)] == models


def test_ensure_gives_every_thread_the_same_session() -> None:
    found: list[session.Session] = []
    threads = [threading.Thread(target=lambda: found.append(ensure())) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len({id(one) for one in found}) == 1


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"mode": "fast"}, "expected one of optimize, observe, found 'fast'"),
        ({"agreement_timeout": -1.0}, "expected seconds >= 0"),
        ({"agreement_timeout": float("nan")}, "expected seconds >= 0"),
    ],
)
def test_wrong_arguments_are_refused_and_open_nothing(options: dict[str, object], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        enable(**options)  # type: ignore[arg-type]
    assert current() is None


def test_a_run_dir_that_cannot_be_made_is_an_error_at_once(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match="file"):
        enable(run_dir=tmp_path / "file" / "run")
    assert current() is None


def test_report_without_a_session_says_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(SessionError, match="neither"):
        report()
    with pytest.raises(RunFolderError, match="not a folder"):
        report(tmp_path / "none")
    with pytest.raises(RunFolderError, match="no rank<N>.jsonl"):
        report(tmp_path)


def test_an_empty_session_still_leaves_its_run_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "3")
    monkeypatch.setenv("WORLD_SIZE", "4")
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "r1")
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "2")
    with enable(run_dir=tmp_path / "new" / "run"):
        pass
    text = (tmp_path / "new" / "run" / "rank3.jsonl").read_text()
    line, *_, end = map(json.loads, text.splitlines())
    assert (end["kind"], end["error"]) == ("end", None) and end["ended"] >= line["started"]
    assert (line["schema"], line["kind"], line["rank"], line["ranks"]) == (1, "run", 3, 4)
    assert (line["run_id"], line["restart"], line["mode"]) == ("r1", 2, "optimize")
    assert report(tmp_path / "new" / "run").to_dict()["rank"] == 3


def test_memory_and_folder_give_the_same_report(tmp_path: Path) -> None:
    with enable(run_dir=tmp_path) as handle:
        handle.session.begin_graph("forward", "0/0", "inductor").finish((), compile_seconds=1.5)
        here = report().to_dict()
    assert here == handle.report().to_dict() == report(tmp_path).to_dict()
    assert here["graphs"][0]["compile_seconds"] == 1.5


CRASH = """
import os, sys
from collective_identity.session import enable
log = enable(run_dir=sys.argv[1]).session.begin_graph("forward", "0/0", "inductor")
log.pass_ran("bucket", 0.25, True, {"fsdp.param_unshard": 4}, {"fsdp.param_unshard": 2}, {})
os.kill(os.getpid(), 9)
"""


def test_a_crash_leaves_whole_lines_and_a_later_start_reads_on(tmp_path: Path) -> None:
    root = str(Path(session.__file__).parents[1])
    environment = {**os.environ, "PYTHONPATH": root}
    killed = subprocess.run(
        [sys.executable, "-c", CRASH, str(tmp_path)], env=environment, timeout=120, check=False
    )
    assert killed.returncode == -9
    (log,) = read_run(tmp_path)
    assert not log.damaged and len(log.records) == 3
    assert report(tmp_path).to_dict()["graphs"][0]["state"] == "unfinished"

    path = tmp_path / "rank0.jsonl"
    whole = path.read_bytes()
    path.write_bytes(whole[:-20])  # the machine died in the middle of a line
    cut = read_rank(path, 0)
    assert len(cut.records) == 2 and "line 3 is cut off" in cut.damaged[0]
    assert any("cut off" in note for note in report(tmp_path).notes)

    with enable(run_dir=tmp_path) as handle:
        handle.session.begin_graph("inference", "1/0", "inductor").finish(())
    again = read_rank(path, 0)
    assert again.sections == 2 and len(again.records) == 4
    assert "line 3 is unreadable" in again.damaged[0]
    assert [graph["phase"] for graph in report(tmp_path).to_dict()["graphs"]] == ["inference"]


def run_line(rank: int) -> RunRecord:
    return RunRecord(rank, 2, "optimize", "", 0, "here", 1, 1.0, "2.13.0", "0.1.0", 1)


def checked(folder: Path) -> tuple[int, list[str]]:
    found = CliRunner().invoke(app, ["check", str(folder), "--json"])
    return found.exit_code, json.loads(found.stdout)["reasons"]


def test_a_rank_whose_session_was_never_closed_is_named(tmp_path: Path) -> None:
    """Killed, as torchrun does to the others when one rank fails: whole lines and no last one."""
    for rank in range(2):
        write_run(tmp_path, rank, [run_line(rank), *([EndRecord(2.0)] if rank == 0 else [])])
    never = "the session was never closed: its process was killed, or still runs"
    assert report(tmp_path).ok and f"rank 1: {never}" in report(tmp_path).notes
    assert checked(tmp_path) == (1, [f"unfinished: rank 1: {never}"])
    others = CliRunner().invoke(app, ["check", str(tmp_path), "--fail-on", "lost,conflict,malformed,not_captured"])
    assert others.exit_code == 0


def test_a_session_that_an_exception_ends_says_so_and_advises_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(KeyError), caplog.at_level("INFO", "collective_identity"), enable(run_dir=tmp_path) as handle:
        handle.session.declare(expectation("Net"))
        raise KeyError("overlapp")
    assert [record.getMessage() for record in caplog.records if record.levelname != "DEBUG"] == [
        "end of session: by KeyError: 'overlapp'"
    ]
    assert report(tmp_path).notes == ("an exception ended the session: KeyError: 'overlapp'",)
    code, reasons = checked(tmp_path)
    assert code == 1 and reasons[-1] == "unfinished: an exception ended the session: KeyError: 'overlapp'"
    assert "install" not in str(reasons)
    with pytest.raises(SystemExit), enable(run_dir=tmp_path / "left"):
        raise SystemExit(0)
    assert not any("exception" in note for note in report(tmp_path / "left").notes)


def test_a_session_without_a_graph_is_a_note_and_fails_the_check(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compat, "eager_fsdp_modules", lambda **_: ())  # other tests' models may be alive
    with enable(run_dir=tmp_path) as handle:
        pass
    assert handle.report().ok
    (note,) = report(tmp_path).notes
    assert note.startswith("CI043 nothing_compiled: the session ended without a compiled graph; nothing was declared. ")
    assert "fsdp_hooks.install(model)" in note
    assert "collective identity: as declared, but `check` finds 1 fault  " in render_text(report(tmp_path))
    text = "not_captured: CI043 nothing_compiled: the session ended without a compiled graph"
    assert checked(tmp_path) == (1, [text])


@pytest.mark.usefixtures("fake_world")
def test_a_model_that_was_compiled_without_install_is_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Dynamo's own error, about FSDP2's hooks, names nothing that the user wrote. Models of other tests that are alive
    are named beside this one's, up to twelve modules."""
    gc.collect()
    model = sharded()
    compiled = torch.compile(model, backend=backend, fullgraph=True)
    with pytest.raises(torch._dynamo.exc.Unsupported), enable(run_dir=tmp_path):
        compiled(torch.ones(2, 8))
    ended, note = report(tmp_path).notes
    assert ended.startswith("an exception ended the session: Unsupported: ")
    assert note.startswith("CI043 nothing_compiled: ")
    assert "not installed: eager FSDP2 modules (root), " in note and "eager FSDP2 modules (root), " in caplog.text
    assert "call fsdp_hooks.install(model) after fully_shard" in note
    assert {"(root)", "blocks.0", "blocks.1"} <= set(compat.eager_fsdp_modules(running=False))
    with pytest.raises(AssertionError, match=r"compiled nothing: .* CI043 nothing_compiled: .*\(root\), "):
        assert_nothing_lost(report(tmp_path))
    code, reasons = checked(tmp_path)
    assert code == 1 and any(reason.startswith("not_captured: CI043 nothing_compiled: ") for reason in reasons)


@pytest.mark.usefixtures("fake_world")
@pytest.mark.parametrize("order", ["session first", "comms first", "restored"])
def test_eager_fsdp2_that_says_its_roles_has_nothing_to_compile(order: str, tmp_path: Path) -> None:
    gc.collect()  # models of other tests
    model = sharded()
    if order == "comms first":
        fsdp_hooks.use_functional_comms(model)
    with enable(run_dir=tmp_path) as handle:
        if order != "comms first":
            fsdp_hooks.use_functional_comms(model)
        model(torch.ones(2, 8)).sum().backward()
        if order == "restored":
            fsdp_hooks.restore_comms(model)
    found = handle.report()
    assert found.ok and found.faults(FAULTS) == []
    assert all(note.startswith("CI044 eager_roles: ") for note in found.notes)
    assert order == "comms first" or "eager FSDP2 modules (root), blocks.0, blocks.1. " in found.notes[0]
    assert "eager FSDP2 modules (root), " in found.notes[0]
    if order != "restored":
        fsdp_hooks.restore_comms(model)


OPEN = """
import sys
from collective_identity.session import enable
handle = enable(run_dir=sys.argv[1])
handle.session.begin_graph("forward", "0/0", "inductor").finish(())
raise ValueError("a bad batch\\nin two lines")
"""


def test_a_session_that_is_open_when_python_ends_is_closed_then(tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": str(Path(session.__file__).parents[1])}
    ended = subprocess.run([sys.executable, "-c", OPEN, str(tmp_path)], env=environment, timeout=120, check=False)
    assert ended.returncode == 1
    assert report(tmp_path).notes[0] == "an exception ended the session: ValueError: a bad batch"
