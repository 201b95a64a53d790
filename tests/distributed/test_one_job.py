"""One torchrun job with producer, policy, bucketing and diagnostics, then in lite mode: one report covers all."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from collective_identity import cli
from tests.distributed.launch import REPOSITORY, run_script


@pytest.mark.long
def test_one_report_covers_all(tmp_path: Path) -> None:
    script = REPOSITORY / "tests" / "distributed" / "one_job.py"
    env = {"TORCH_LOGS": "+collective_identity", "TORCH_TRACE": str(tmp_path / "trace")}
    ended = run_script(script, 2, [str(tmp_path / "run")], timeout=380, env=env)
    (losses,) = (json.loads(line) for line in ended.stdout.splitlines() if line.startswith("{"))
    assert losses["policy"] == pytest.approx(losses["lite"], rel=1e-6)
    assert losses["policy"][0] > losses["policy"][1]

    found = CliRunner().invoke(cli.app, ["report", str(tmp_path / "run"), "--json"])
    report = json.loads(found.stdout)
    assert report["ok"], report["failures"]
    assert report["ranks"] == len(report["by_rank"]) == 2 and report["differences"] == []
    lite = {graph["lite"] for graph in report["graphs"] if graph["state"] == "compiled"}
    assert lite == {"off", "full"}, "both compiles are in the one report"
    assert all(c["captured"] == c["explicit"] > 0 for c in report["coverage"])
    assert all(c["expected"] in (None, c["captured"]) for c in report["coverage"]), "re-gathers may be unknown"
    merged = [g for g in report["graphs"] if g["lite"] == "off" and any(p["name"] == "bucket" for p in g["passes"])]
    assert merged and all(sum(g["after"].values()) < sum(g["captured"].values()) for g in merged)
    assert "CI042" in {warned["code"] for warned in report["warnings"]}, "lite mode is said"
    assert CliRunner().invoke(cli.app, ["check", str(tmp_path / "run")]).exit_code == 0

    for log in ended.logs:
        for package in ("collective_identity", "fsdp_hooks", "inductor_passes"):
            assert f"{package}/" in log, f"TORCH_LOGS=+collective_identity shows {package}"
        assert "captured" in log and "pass bucket changed the graph" in log
    traces = "".join(path.read_text(errors="replace") for path in (tmp_path / "trace").iterdir())
    assert '"name": "collective_identity_backward"' in traces, "what tlparse shows"
