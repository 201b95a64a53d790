"""The example of docs/whole-step.md, compiled: nothing to mend, and the numbers of the graph that runs."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from typer.testing import CliRunner

import collective_identity as ci
import inductor_passes  # noqa: F401  (makes the backend known)
from collective_identity.cli import app

pytestmark = pytest.mark.usefixtures("fake_world")

PAGE = Path(__file__).parents[2] / "docs" / "whole-step.md"
COMPILED = 'step.compile(backend="collective_identity", options={"inner": "aot_eager"})\nfor tokens'


def model() -> nn.Module:
    made = nn.Sequential(nn.Embedding(16, 8), nn.Linear(8, 8), nn.Linear(8, 16, bias=False))
    mesh = init_device_mesh("cpu", (4,))
    fully_shard(made[1], mesh=mesh)
    return fully_shard(made, mesh=mesh)


def example(norm: float) -> str:
    code = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)[0]
    assert code.count("for tokens") == 1 and "clip_grad_norm_(model.parameters(), 1.0)" in code
    return code.replace("for tokens", COMPILED).replace("(), 1.0)", f"(), 1.0, norm_type={norm})")


@pytest.mark.parametrize("norm", [1.0, 2.0])
def test_the_documented_example(norm: float, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    tokens = torch.zeros(2, 3, dtype=torch.long)
    names: dict[str, Any] = {"torch": torch, "model": model(), "tokens": tokens, "targets": tokens}
    with ci.enable(run_dir=tmp_path) as handle:
        exec(example(norm), names | {"batches": [(tokens, tokens)]})
    report = handle.report()
    assert report.ok and not report.ranks[0].warnings and "CI0" not in caplog.text
    rows = {(row.role, row.phase): row for row in report.ranks[0].coverage.rows}
    found = {cell: (row.expected, row.captured, row.explicit, row.inferred, row.after) for cell, row in rows.items()}
    assert found == {
        (ci.PARAM_UNSHARD, "forward"): (4, 4, 4, 0, 2),
        (ci.PARAM_UNSHARD, "regather"): (None, 1, 1, 0, 1),
        (ci.GRAD_REDUCE_SHARD, "backward"): (2, 2, 2, 0, 2),
    }
    assert report.ranks[0].coverage.other == {"(all_reduce)": 1}, "the norm's, which is no gradient's"
    assert report.notes == ()
    assert [graph.phase for graph in report.ranks[0].graphs] == ["forward", "backward", "step"]
    mine = (tmp_path / "rank0.jsonl").read_text()
    for rank in range(1, 4):
        lines = [json.loads(line) for line in mine.splitlines()]
        (tmp_path / f"rank{rank}.jsonl").write_text(
            "".join(json.dumps(line | ({"rank": rank} if line["kind"] == "run" else {})) + "\n" for line in lines)
        )
    checked = CliRunner().invoke(app, ["check", str(tmp_path)])
    assert checked.exit_code == 0, checked.output
