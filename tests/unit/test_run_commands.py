"""`report --html`, `diff` and `explain`: does each say what the run folder holds, as text and as JSON?"""

from __future__ import annotations

import dataclasses
import importlib
import json
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from collective_identity import cli, codes
from collective_identity.reporting import build_report
from collective_identity.reporting.jsonl import write_run
from collective_identity.reporting.records import RunRecord
from collective_identity.reporting.terminal import render_text
from tests.unit.rows import add_step, backward_rows, expectation, gathers, ledger, row

RUNNER = CliRunner()
HOSTILE = "</script><img src=x onerror=alert(1)>&amp;\u2028"


def call(*arguments: object) -> Result:
    return RUNNER.invoke(cli.app, [str(a) for a in arguments])


def write(folder: Path, *, rank: int = 0, ranks: int = 1, short: bool = False, name: str = "bucket_0") -> Path:
    """A step in which a pass merged two gathers and another dropped one role."""
    book = ledger()
    book.declare(expectation())
    rows = gathers()[:-1] if short else gathers()
    lost = row(9, node="all_reduce_9", transport="all_reduce", role=None, source=None, absence="dropped", code="CI030")
    log = book.begin_graph("forward", "0/0", "inductor")
    log.captured((*rows, lost))
    log.event(codes.DROPPED_MIXED, node="all_reduce_9", pass_name="upstream", detail=HOSTILE)
    members = (rows[0].node, rows[1].node)
    merged = dataclasses.replace(rows[0], node=name, nbytes=512, params=("w", "v"), members=members)
    log.pass_ran("bucket", 0.1, True, {}, {}, {})
    log.finish((merged, *rows[2:], lost), compile_seconds=1.0)
    log = book.begin_graph("backward", "0/0", "inductor")
    log.captured(backward_rows())
    log.finish(backward_rows(1))
    run = [dataclasses.replace(r, rank=rank, ranks=ranks) if isinstance(r, RunRecord) else r for r in book.records()]
    write_run(folder, rank, run)
    return folder


class Page(HTMLParser):
    """Tags, text by section id, and the data the script is given."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text: dict[str, str] = {}
        self.scripts: list[str] = []
        self.section = ""
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        self.section = dict(attrs).get("id") or self.section
        if tag == "script":
            self.scripts.append("")

    def handle_data(self, data: str) -> None:
        if self.lasttag == "script":
            self.scripts[-1] += data
        self.text[self.section] = self.text.get(self.section, "") + data


def test_the_page_is_self_contained_and_holds_every_collective(tmp_path: Path) -> None:
    for rank in range(2):
        write(tmp_path, rank=rank, ranks=2, short=rank == 1)
    found = call("report", tmp_path, "--html")
    assert (found.exit_code, found.stdout) == (0, f"{tmp_path / 'report.html'}\n")
    text = (tmp_path / "report.html").read_text()
    page = Page(text)
    assert not [attrs for _, attrs in page.tags if {"src", "href"} & set(attrs)], "nothing is fetched"
    assert "http://" not in text and "https://" not in text
    assert ("img", {}) not in [(tag, {}) for tag, _ in page.tags], "no text of the run becomes a tag"
    data = json.loads(page.scripts[0])
    assert [g["name"] for g in data["graphs"]] == ["forward 0/0", "backward 0/0"]
    forward = data["graphs"][0]
    names = [data["texts"][n] for n in forward["captured"]["node"]]
    assert names == [*(r.node for r in gathers()), "all_reduce_9"]
    assert [data["texts"][n] for n in forward["after"]["members"][0]] == [gathers()[0].node, gathers()[1].node]
    assert data["kinds"][forward["captured"]["kind"][0]]["role"] == "fsdp.param_unshard"
    assert forward["events"][0][4] == HOSTILE
    assert "layers.1: 2 expected, 1 captured" in page.text["failures"]
    assert "CI030 mixed" in page.text["warnings"] and "upstream" in page.text["warnings"]
    said = "7 and 6 collectives; first at 5: transport is all_gather on rank 0 and all_reduce on rank 1"
    assert said in page.text["differences"]


def test_the_page_can_be_written_elsewhere_and_says_when_it_cannot(tmp_path: Path) -> None:
    run = write(tmp_path / "run")
    found = call("report", run, "--out", tmp_path / "page.html", "--json")
    assert json.loads(found.stdout) == {"page": str(tmp_path / "page.html"), "ok": True}
    assert (tmp_path / "page.html").exists() and not (run / "report.html").exists()
    found = call("report", run, "--out", tmp_path / "none" / "page.html")
    assert found.exit_code == 2 and "cannot be written" in found.stderr


def test_the_report_shows_bytes_by_role_and_losses_by_pass(tmp_path: Path) -> None:
    data = json.loads(call("report", write(tmp_path), "--json").stdout)
    sent = {(r["role"], r["transport"]): r for r in data["roles"]}
    unshard = sent["fsdp.param_unshard", "all_gather"]
    assert (unshard["captured"], unshard["captured_bytes"], unshard["after"]) == (12, 12 * 256, 8)
    assert sent[None, "all_reduce"]["captured"] == 1
    assert data["losses"] == [{"pass": "upstream", "code": "CI030", "count": 1}]
    shown = call("report", tmp_path).stdout
    assert "3.00 KiB" in shown and "Identities lost, by pass" in shown and "\x1b[" not in shown


@pytest.mark.parametrize("width", [80, 100, 140, 200])
def test_no_header_of_the_coverage_is_cut(tmp_path: Path, width: int) -> None:
    book = ledger()
    book.declare(expectation())
    add_step(book)
    text = render_text(build_report((book.rank_log(),)), width=width)
    table = text[text.index("Coverage") : text.index("Sent by this rank")]
    assert "…" not in table
    for header in ("expected", "captured", "explicit", "passes", "buckets"):
        assert header in table
    assert ("none: inferred, malformed, unlabelled, dropped, not captured" in table) is (width < 145)


def test_diff_of_a_run_with_itself_is_empty(tmp_path: Path) -> None:
    a, b = write(tmp_path / "a"), write(tmp_path / "b", name="another_name")
    found = call("diff", a, b)
    assert (found.exit_code, found.stdout) == (0, "the runs are the same\n")
    assert json.loads(call("diff", a, a, "--json").stdout)["same"] is True


def test_diff_names_what_is_missing_and_where_it_begins(tmp_path: Path) -> None:
    a, b = write(tmp_path / "a"), write(tmp_path / "b", short=True)
    found = call("diff", a, b, "--json")
    data: dict[str, Any] = json.loads(found.stdout)
    assert found.exit_code == 1 and data["same"] is False
    captured, after = data["graphs"]
    assert (captured["graph"], captured["stage"], captured["count"]) == ("forward 0/0", "captured", [7, 6])
    assert (captured["only_a"], captured["only_b"], after["stage"]) == (1, 0, "after")
    assert captured["first"]["position"] == 5 and captured["examples"][0]["param_group"] == "layers.1"
    (coverage,) = data["coverage"]
    assert coverage["captured"] == [6, 5] and coverage["phase"] == "forward"
    assert len(data["failures"]["only_b"]) == 1 and not data["failures"]["only_a"]
    shown = call("diff", a, b).stdout
    assert "forward 0/0, captured: 7 -> 6 collectives" in shown
    assert "- 1 x fsdp.param_unshard (all_gather) of w" in shown


def test_diff_names_graphs_and_codes_of_one_run_alone(tmp_path: Path) -> None:
    book = ledger(str(tmp_path / "b"))
    book.declare(expectation())
    add_step(book)
    add_step(book, "1/0")
    book.close()
    data = json.loads(call("diff", write(tmp_path / "a"), tmp_path / "b", "--json").stdout)
    assert data["codes"] == {"CI030": [1, 0]}
    assert [g["graph"] for g in data["graphs"] if g["in"] == "b"] == ["forward 1/0", "backward 1/0"]
    assert "forward 1/0: only in run B" in call("diff", tmp_path / "a", tmp_path / "b").stdout


@pytest.mark.parametrize("what", [gathers()[1].node, "layers.0", "w"])
def test_explain_finds_nodes_units_and_parameters(tmp_path: Path, what: str) -> None:
    found = json.loads(call("explain", write(tmp_path), what, "--json").stdout)["found"]
    named = [(one["graph"], one["node"]) for one in found]
    assert named, what
    rows = [*((f"forward {n}", r) for n, r in [("0/0", r) for r in gathers()])]
    wanted = [r.node for _, r in rows if what in (r.node, r.param_group, *(r.params or ()))]
    assert [node for graph, node in named if graph.startswith("forward")][: len(wanted)] == wanted


def test_explain_tells_of_a_merge_and_of_a_loss(tmp_path: Path) -> None:
    write(tmp_path)
    (one, *_) = json.loads(call("explain", tmp_path, gathers()[1].node, "--json").stdout)["found"]
    assert (one["merged_into"], one["passes"]) == ("bucket_0", ["bucket"])
    assert one["verdict"] == "one of 2 members of bucket_0, which is fsdp.param_unshard"
    (bucket,) = json.loads(call("explain", tmp_path, "bucket_0", "--json").stdout)["found"]
    assert bucket["members"] == [gathers()[0].node, gathers()[1].node] and bucket["captured"] is None
    shown = call("explain", tmp_path, "all_reduce_9").stdout
    assert "in the compiled graph as a collective without a role; CI030 mixed" in shown
    assert "CI030 mixed by pass upstream" in shown and codes.DROPPED_MIXED.remedy in shown


def test_explain_says_when_nothing_has_the_name(tmp_path: Path) -> None:
    found = call("explain", write(tmp_path), "nothing")
    assert found.exit_code == 2 and "none named 'nothing'" in found.stderr
    assert call("explain", tmp_path, "bucket_0", "--rank", 3).exit_code == 2


def test_explain_names_what_there_is_instead(tmp_path: Path) -> None:
    write(tmp_path)
    guessed = call("explain", tmp_path, "blocks.1").stderr
    assert guessed.endswith("none named 'blocks.1'; parameter groups: layers.0, layers.1\n")
    close = call("explain", tmp_path, "layer.1").stderr
    assert "none named 'layer.1'; close to it: layers.1, layers.0; parameter" in close


def bucketed(folder: Path, *, cached: bool = False) -> Path:
    """A unit of nine parameters, gathered in one bucket."""
    book = ledger(str(folder))
    rows = gathers(9)
    bucket = dataclasses.replace(rows[0], node="bucket_0", members=tuple(one.node for one in rows[9:18]))
    log = book.begin_graph("forward", "0/0", "inductor")
    log.captured(rows)
    if not cached:
        log.pass_ran("bucket", 0.1, True, {}, {}, {})
    log.finish((bucket,), cached=cached, compile_seconds=93.0)
    book.close()
    return folder


def test_explain_says_one_bucket_once_and_breaks_no_sentence_in_a_pipe(tmp_path: Path) -> None:
    shown = call("explain", bucketed(tmp_path), "layers.0").stdout.splitlines()
    title, *rest = shown
    assert title == "bucket_0, rank 0, forward 0/0 graph: 9 of its 9 members, which is fsdp.param_unshard"
    captured = [line for line in rest if line.startswith("  captured all_gather_into_tensor_")]
    assert len(captured) == 9 and all(line.endswith("unit layers.0; parameters w") for line in captured)
    assert [line.split()[0] for line in rest[9:]] == ["after:", "merged,", "passes"]
    assert len(json.loads(call("explain", tmp_path, "layers.0", "--json").stdout)["found"]) == 9


def test_a_graph_from_a_cache_is_said_to_be_one(tmp_path: Path) -> None:
    shown = call("explain", bucketed(tmp_path, cached=True), "layers.0").stdout
    assert "from a compile cache: no pass ran" in shown and "passes that changed" not in shown
    (note,) = [text for text in call("report", tmp_path).stdout.splitlines() if "its compile seconds" in text]
    assert note.startswith("  forward graph 0/0: from a compile cache, no pass ran in this process; its compile")
    assert note.endswith("are what finding and loading it took")


def test_the_report_ends_with_what_to_run_next(tmp_path: Path) -> None:
    shown = call("report", write(tmp_path)).stdout.splitlines()[-1]
    assert shown.startswith("next: ") and f"collective-identity check {tmp_path}; " in shown
    assert f"report {tmp_path} --html; " in shown and f"explain {tmp_path} NAME" in shown


def test_the_demo_ends_so_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "examples"))
    importlib.import_module("_verdict").show(write(tmp_path))
    *_, following, folder = capsys.readouterr().err.splitlines()
    assert following.startswith("next: ") and f"collective-identity check {tmp_path}; " in following
    assert folder == f"run folder: {tmp_path}"


def test_help_names_every_command_and_exit_code() -> None:
    shown = call("--help").stdout
    for command in ("report", "check", "diff", "explain", "dump", "debugify", "doctor"):
        assert command in shown
        text = call(command, "--help").stdout
        assert "Exit code" in text and "--json" in text
