"""Does `watch` end soon and with a sentence on what is no store, and leave a store as it was?"""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from typer.testing import CliRunner, Result

from collective_identity import cli
from collective_identity.board import NEWEST, ROOT, Board, BoardState
from collective_identity.file_store import StoreFile
from collective_identity.reporting.jsonl import write_run
from collective_identity.reporting.records import EndRecord, RunRecord
from collective_identity.reporting.watch_command import last_words
from collective_identity.service import Service
from collective_identity.watch import StoreError, Watcher, bounded, open_store
from tests.unit.test_standstill import seen

RUNNER = CliRunner()


def watch(where: object, *more: str) -> tuple[Result, float]:
    began = time.monotonic()
    found = RUNNER.invoke(cli.app, ["watch", str(where), "--once", "--wait", "1", *more])
    return found, time.monotonic() - began


@pytest.fixture
def silent() -> Iterator[int]:
    """The port of a server that accepts and never answers."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        held: list[socket.socket] = []

        def serve() -> None:
            try:
                while True:
                    held.append(server.accept()[0])
            except OSError:
                pass

        threading.Thread(target=serve, daemon=True).start()
        yield server.getsockname()[1]
        for one in held:
            one.close()


def test_a_server_that_does_not_answer_is_given_up(silent: int) -> None:
    found, seconds = watch(f"tcp://127.0.0.1:{silent}")
    assert found.exit_code == 2 and seconds < 5
    said = f"error: expected the store of a running job at tcp://127.0.0.1:{silent}, found no answer within 1 s: it is "
    assert found.stderr.startswith(said) and found.stdout == ""


def test_a_call_that_takes_too_long_is_left_behind_and_an_error_is_passed_on() -> None:
    with pytest.raises(StoreError, match="no answer within 0 s"):
        bounded(lambda: time.sleep(2), 0.05)
    with pytest.raises(KeyError, match="k"):
        bounded(lambda: {}["k"], 5)
    assert bounded(lambda: 3, 5) == 3


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "no rank has published anything"),
        (b"\x01", "no rank has published anything"),
        (b"The quick brown fox jumps over the lazy dog\n", "is no file of a torch FileStore"),
        (b"\xff" * 64, "is no file of a torch FileStore"),
        (bytes(64), "no rank has published anything"),
    ],
    ids=["empty", "one byte", "text", "ones", "zeros"],
)
def test_a_file_that_is_no_store_ends_the_command_and_stays(tmp_path: Path, content: bytes, said: str) -> None:
    path = tmp_path / "file"
    path.write_bytes(content)
    path.chmod(0o400)
    found, seconds = watch(f"file:{path}")
    assert found.exit_code == 2 and said in found.stderr and seconds < 5, (found.output, found.stderr)
    assert path.read_bytes() == content
    folder, _ = watch(f"file:{tmp_path}")
    assert folder.exit_code == 2 and f"expected the file of a store, found none at {tmp_path}" in folder.stderr


@pytest.mark.parametrize("text", ["", "{", "{}", "[]", "3", '{"store"', "\udcff"])
def test_a_half_written_address_is_an_error_and_no_traceback(tmp_path: Path, text: str) -> None:
    (tmp_path / "store.json").write_bytes(text.encode("utf-8", "surrogateescape"))
    found, _ = watch(tmp_path)
    assert found.exit_code == 2 and "store.json, found " in found.stderr, found.stderr


def test_the_address_is_written_whole_or_not_at_all(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "store.json").write_text("old")
    Service(BoardState(), run_dir=str(tmp_path))._say_where("tcp://h:1")
    assert [p.name for p in tmp_path.iterdir()] == ["store.json"]
    assert json.loads((tmp_path / "store.json").read_text()) == {"store": "tcp://h:1"}
    Service(BoardState(), run_dir=str(tmp_path / "none"))._say_where("tcp://h:1")
    assert "store.json not written" in caplog.text


def test_a_published_value_that_is_no_start_is_an_error(tmp_path: Path) -> None:
    for value in ("", "{}", "[1]"):
        path = tmp_path / f"store{len(value)}"
        dist.FileStore(str(path), 2).set(NEWEST, value)
        found, _ = watch(f"file:{path}")
        assert found.exit_code == 2 and "the store cannot be read" in found.stderr, (value, found.stderr)


def test_a_file_store_is_read_as_torch_reads_it(tmp_path: Path) -> None:
    """Set, set again, added, compared, deleted, under prefixes, while it grows, and cut within a record."""
    path = tmp_path / "store"
    theirs = dist.FileStore(str(path), 2)
    ours = StoreFile(str(path), ROOT)
    assert not ours.check([NEWEST])
    board = Board(theirs, f"{ROOT}/p")
    board.set("a", 1)
    board.set("a", {"b": "\u00fc" * 300})
    board.set_first("c", "first")
    board.set_first("c", "second")
    board.set("gone", 1)
    theirs.delete_key(f"{ROOT}/p/gone")
    theirs.add(f"{ROOT}/n", 3)
    theirs.set("other", "x" * 1000)
    same = Board(ours, f"{ROOT}/p")
    assert [same.get(key) for key in ("a", "c", "gone")] == [board.get(key) for key in ("a", "c", "gone")]
    assert same.get("a") == {"b": "\u00fc" * 300} and same.get("c") == "first" and same.get("gone") is None
    assert ours.check([f"{ROOT}/n"]) and ours.get(f"{ROOT}/n") == b"3"
    board.set("a", 5)
    assert same.get("a") == 5
    whole = path.read_bytes()
    for cut in range(0, len(whole) - 1, 61):
        path.write_bytes(whole[:cut])
        half = StoreFile(str(path), ROOT)
        half.check([NEWEST])
        path.write_bytes(whole)
        assert Board(half, f"{ROOT}/p").get("a") == 5, cut
    assert path.read_bytes() == whole


def test_the_watcher_reads_a_file_store(tmp_path: Path) -> None:
    store = dist.FileStore(str(tmp_path / "store"), 2)
    start = {"prefix": f"{ROOT}/p", "run": "r", "restart": 0, "ranks": 2, "every": 2.0}
    store.set(NEWEST, json.dumps(start))
    watcher = Watcher(open_store(f"file:{tmp_path}/store"))
    ranks, verdict, _ = watcher.look(4.0) or pytest.fail("nothing seen")
    assert (ranks, verdict.unheard) == ([], (0, 1))


def test_a_job_that_dies_is_told_from_one_that_ends(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Rank 1 was heard last 4 s before rank 0; the run folder, which the job names, says that it never closed."""
    for folder, killed in (("killed", 1), ("ended", 2)):
        for rank in range(2):
            records = [RunRecord(rank, 2, "observe", "r", 0, "h", 1, 1.0, "t", "p")]
            write_run(tmp_path / folder, rank, [*records, *([EndRecord(2.0)] if rank != killed else [])])
    heard = [seen(0, time=109.0, still=0.0), seen(1, time=105.0, still=0.0)]
    server = [dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)]
    begun = {"prefix": "p", "run": "r", "restart": 0, "ranks": 2, "every": 2.0, "folder": str(tmp_path / "killed")}
    server[0].set(NEWEST, json.dumps(begun))
    for one in heard:
        Board(server[0], "p").set(f"at/{one.rank}", dict(one.record))
    address = f"tcp://127.0.0.1:{server[0].port}"
    threading.Timer(1.0, server.clear).start()
    found = RUNNER.invoke(cli.app, ["watch", address, "--every", "0.2"])
    assert found.exit_code == 1
    gone, failed, reason, silent = found.stderr.splitlines()
    assert gone.startswith("the store is gone") and failed == "  it failed, or was killed:"
    assert reason.startswith("  unfinished: rank 1: the session was never closed")
    assert silent.startswith("  rank 1 (h, process 7) fell silent first, 4.0 s before rank 0 (each speaks every 2 s); ")
    assert "TCPStore.cpp" not in capfd.readouterr().err, "torch's C++ has its say on file descriptor 2"
    assert last_words(heard, str(tmp_path / "ended")) == (0, ["  every rank had ended its session"])
    assert last_words([seen(0, ended=True), seen(1, ended=True)], None)[0] == 0
    code, text = last_words(heard, None)
    assert code == 2 and text[-1].startswith("  how it ended is not known: no run folder")


def test_an_address_that_leads_nowhere_says_what_was_expected(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MASTER_ADDR", raising=False)
    for where, said in (
        (None, "expected an address, a run folder or MASTER_ADDR and MASTER_PORT"),
        ("tcp://127.0.0.1:1", "expected the store of a running job at tcp://127.0.0.1:1, found ConnectionRefusedError"),
        ("tcp://nonsense", "expected the store of a running job at tcp://nonsense"),
        (f"file:{tmp_path}/none", "expected the file of a store"),
        (str(tmp_path), "expected store.json in the run folder"),
    ):
        with pytest.raises(StoreError, match=said):
            open_store(where)
