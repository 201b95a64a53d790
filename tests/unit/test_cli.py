"""Do the commands answer with the right text, JSON and exit code?"""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from collective_identity import cli, codes, compat
from tests.unit.rows import add_step, expectation, gathers, ledger

RUNNER = CliRunner()


def call(*arguments: object) -> Result:
    return RUNNER.invoke(cli.app, [str(a) for a in arguments])


@pytest.fixture
def good(tmp_path: Path) -> Path:
    book = ledger(str(tmp_path / "good"))
    book.declare(expectation())
    add_step(book)
    book.close()
    return tmp_path / "good"


@pytest.fixture
def bad(tmp_path: Path) -> Path:
    """A run without a declaration that lost one identity, doubted one and refuted one."""
    book = ledger(str(tmp_path / "bad"))
    log = book.begin_graph("forward", "0/0", "inductor")
    log.captured(gathers())
    log.event(codes.DROPPED_UNKNOWN, node="n1", pass_name="someone's")
    log.event(codes.STRUCTURE_MISMATCH, node="n2")
    log.event(codes.GROUP_MISMATCH, node="n3")
    log.finish(gathers())
    book.close()
    return tmp_path / "bad"


def test_report_shows_tables_or_json(good: Path) -> None:
    shown = call("report", good)
    assert shown.exit_code == 0 and "Coverage of one step" in shown.output and "\x1b[" not in shown.output
    data = json.loads(call("report", good, "--json").output)
    assert data["ok"] and data["schema"] == 1 and data["counts"]["explicit"] == 18


def test_report_of_a_bad_run_is_no_error(bad: Path) -> None:
    assert call("report", bad).exit_code == 0


def test_check_passes_a_good_run(good: Path) -> None:
    found = call("check", good)
    assert (found.exit_code, found.output) == (0, "ok\n")
    assert json.loads(call("check", good, "--json").output)["ok"] is True


@pytest.mark.parametrize(
    ("kinds", "reasons"),
    [
        ("lost", ["lost: CI033 unknown: node n1 of forward graph 0/0"]),
        ("conflict", ["conflict: CI020 structure_mismatch: node n2 of forward graph 0/0"]),
        ("malformed", ["malformed: CI007 group_mismatch: node n3 of forward graph 0/0"]),
        ("not_captured", []),
        ("", []),
    ],
)
def test_check_fails_on_the_kinds_asked_for(bad: Path, kinds: str, reasons: list[str]) -> None:
    found = call("check", bad, "--fail-on", kinds, "--json")
    assert json.loads(found.output)["reasons"] == reasons
    assert found.exit_code == (1 if reasons else 0)


def test_check_fails_on_everything_by_default_and_on_what_was_not_declared(bad: Path, tmp_path: Path) -> None:
    found = call("check", bad)
    assert found.exit_code == 1 and "3 reasons to fail" in found.output
    book = ledger(str(tmp_path / "short"))
    book.declare(expectation())
    add_step(book, forward=gathers()[1:])
    book.close()
    found = call("check", tmp_path / "short", "--fail-on", "lost")
    assert found.exit_code == 1 and "failure: CI052" in found.output
    found = call("check", tmp_path / "short", "--fail-on", "not_captured")
    assert "not_captured: fsdp.param_unshard, forward: 1 of 6 not captured" in found.output


@pytest.mark.parametrize("command", ["report", "check"])
def test_a_folder_that_is_no_run_is_an_error(command: str, tmp_path: Path) -> None:
    (tmp_path / "rank0.jsonl").write_text("not json\n")
    for folder, text in (
        (tmp_path / "none", "not a folder"),
        (tmp_path.parent / "..", "no rank<N>.jsonl"),
        (tmp_path, "no readable line"),
    ):
        found = call(command, folder)
        assert found.exit_code == 2 and text in found.stderr, (found.output, found.stderr)
        assert found.stdout == ""


def test_wrong_usage_is_an_error(good: Path) -> None:
    found = call("check", good, "--fail-on", "lost,everything")
    assert found.exit_code == 2 and "'everything'" in found.stderr and "lost, conflict" in found.stderr
    assert call("nothing").exit_code == 2
    assert call("report").exit_code == 2


def test_help_says_what_the_exit_codes_mean() -> None:
    for arguments in (["report", "--help"], ["check", "--help"], ["doctor", "--help"]):
        found = call(*arguments)
        assert found.exit_code == 0 and "Exit code" in found.output


def test_without_the_report_extra_the_command_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "typer", None)
    spec = importlib.util.spec_from_file_location("collective_identity.cli_alone", cli.__file__)
    assert spec is not None and spec.loader is not None
    with pytest.raises(SystemExit, match=r"needs typer, .* pip install 'collective-identity\[report\]'"):
        spec.loader.exec_module(importlib.util.module_from_spec(spec))


def test_doctor_finds_what_is_needed_in_this_torch() -> None:
    found = json.loads(call("doctor", "--json").output)
    checks: dict[str, Any] = {entry["check"]: entry for entry in found["checks"]}
    for name in ("torch version", "annotate", "FSDP2 state with forward hook handles", "Inductor pass slots"):
        assert checks[name]["ok"], checks[name]
    entry = checks["backend entry point"]
    assert entry["ok"] or "from a checkout" in entry["found"]
    shown = call("doctor")
    assert "torch version" in shown.output
    assert shown.exit_code == (0 if found["ok"] else 1)


def test_doctor_names_an_unsupported_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compat, "torch_version", lambda: (2, 10))
    found = call("doctor")
    assert found.exit_code == 1 and "expected 2.11 <= version < 2.16" in found.output


def test_doctor_says_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch.fx.traceback

    monkeypatch.delattr(torch.fx.traceback, "annotate")
    found = json.loads(call("doctor", "--json").output)
    (entry,) = [e for e in found["checks"] if e["check"] == "annotate"]
    assert (entry["ok"], entry["found"], found["ok"]) == (False, "missing", False)


def test_the_entry_function_exits_with_the_code_whatever_the_folder_is_called(good: Path, tmp_path: Path) -> None:
    code = "import sys; from collective_identity.cli import main; main()"
    root = Path(cli.__file__).parents[1]
    odd = good.rename(tmp_path / "no utf-8: \udcff")
    for folder, expected in ((odd, 0), (tmp_path / "none", 2)):
        ended = subprocess.run(
            [sys.executable, "-c", code, "report", str(folder), "--html"],
            cwd=root,
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        assert ended.returncode == expected, ended.stderr
        if expected == 0:
            assert ended.stdout.endswith("no utf-8: \\udcff/report.html\n")
            assert "no utf-8: \\udcff</title>" in (odd / "report.html").read_text()


def test_doctor_names_what_was_wrapped_and_what_does_not_work(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch._inductor.config
    import torch._inductor.fx_passes.fsdp as passes

    before = json.loads(call("doctor", "--json").output)
    (entry,) = [e for e in before["checks"] if e["check"] == "attributes of torch that were wrapped"]
    assert (entry["ok"], entry["found"]) == (True, "none")
    monkeypatch.setattr(passes, "is_fsdp_all_gather_wait", lambda node: False)
    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv("CXX", raising=False)
    with torch._inductor.config.patch(cpp_wrapper=True):  # monkeypatch would leave it deleted
        after = json.loads(call("doctor", "--json").output)
        assert "unsupported here: roles in profiles" in call("doctor").output
    (entry,) = [e for e in after["checks"] if e["check"] == "attributes of torch that were wrapped"]
    assert "torch._inductor.fx_passes.fsdp.is_fsdp_all_gather_wait (from" in entry["found"]
    assert "test_cli" in entry["found"]
    new = set(after["unsupported"]) - set(before["unsupported"])
    assert any("cpp_wrapper" in text for text in new) and any("C++ compiler" in text for text in after["unsupported"])
