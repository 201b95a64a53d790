"""Is there one session, explicitly closed, and does the report find it?"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from collective_identity import session
from collective_identity.reporting import RunFolderError, read_run
from collective_identity.reporting.jsonl import read_rank
from collective_identity.reporting.records import ExpectedRecord
from collective_identity.session import SessionError, current, enable, ensure, report
from tests.unit.rows import expectation


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
    line = json.loads((tmp_path / "new" / "run" / "rank3.jsonl").read_text())
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
    assert again.sections == 2 and len(again.records) == 3
    assert "line 3 is unreadable" in again.damaged[0]
    assert [graph["phase"] for graph in report(tmp_path).to_dict()["graphs"]] == ["inference"]
