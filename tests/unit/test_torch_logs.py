"""Do torch's own switches show what this project says? ``TORCH_LOGS``, counters, timings, ``TORCH_TRACE``."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from collective_identity import codes
from tests.unit.rows import gathers, ledger, row

ROOT = Path(__file__).resolve().parents[2]
PROGRAM = """
import json
import logging
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=4)
import collective_identity as ci
import inductor_passes.backend
from collective_identity.transports import Transport, WAIT, default_overload

GATHER = default_overload(Transport.ALL_GATHER)
GROUP = dist.group.WORLD.group_name


def step(w):
    with ci.role_scope(ci.PARAM_UNSHARD, producer="test", group=GROUP, params=["a.w"]):
        return WAIT(GATHER(w, 4, GROUP)) * 2


torch.compile(step, backend=inductor_passes.backend.collective_identity, options={"inner": "aot_eager"})(torch.ones(2))
logging.getLogger("collective_identity.fsdp_hooks").debug("producers speak under the same name")
from torch._dynamo.utils import compilation_time_metrics, counters

ours = {k: v for k, v in counters["inductor"].items() if k.startswith("collective_identity_")}
times = [name for name in compilation_time_metrics if name.startswith("collective_identity.")]
print(json.dumps({"counters": ours, "times": sorted(times)}))
"""


def run(**env: str) -> subprocess.CompletedProcess[str]:
    kept = {k: v for k, v in os.environ.items() if k not in ("TORCH_LOGS", "TORCH_TRACE")}
    return subprocess.run(
        [sys.executable, "-W", "ignore", "-c", PROGRAM],
        cwd=ROOT,
        env={**kept, "PYTHONPATH": str(ROOT), **env},
        capture_output=True,
        text=True,
        timeout=200,
        check=True,
    )


def test_one_process_shows_it_all(tmp_path: Path) -> None:
    found = run(TORCH_LOGS="+collective_identity", TORCH_TRACE=str(tmp_path))
    lines = [line for line in found.stderr.splitlines() if "inference graph" in line]
    assert any("I" == line.split("]:")[-1][:1] and "captured 1 fsdp.param_unshard explicit" in line for line in lines)
    assert any("pass normalize changed" in line and "inductor_passes/manager.py" not in line for line in lines)
    assert "inductor_passes/manager.py" in found.stderr and "producers speak under the same name" in found.stderr
    said = json.loads(found.stdout)
    assert said["counters"]["collective_identity_explicit"] == said["counters"]["collective_identity_graphs"] == 1
    assert said["times"] == ["collective_identity.classify", "collective_identity.passes"]
    (trace,) = tmp_path.iterdir()
    text = trace.read_text()
    artifact = next(line for line in text.splitlines() if '"name": "collective_identity_inference"' in line)
    start = text.index(artifact) + len(artifact) + 1
    payload = []
    for line in text[start:].splitlines():
        if not line.startswith("\t"):
            break
        payload.append(line[1:])
    table = json.loads("\n".join(payload))
    assert [r["role"] for r in table["captured"]] == ["fsdp.param_unshard"] and table["error"] is None


def test_a_warning_names_code_node_parameters_and_line(caplog: pytest.LogCaptureFixture) -> None:
    from torch import fx

    graph = fx.Graph()
    node = graph.placeholder("x")
    frames = 'File "model.py", line 3, in outer\n  y = f(x)\n', 'File "layer.py", line 12, in forward\n  g(x)'
    node.meta["stack_trace"] = "".join(frames)
    node.meta["custom"] = {"distributed.comm_semantics": {"params": ["a.w"], "role": 3}}
    log = ledger().begin_graph("forward", "0/0", "x")
    log.captured(gathers())
    log.event(codes.WRONG_TYPE, node=node)
    (record,) = [r for r in caplog.records if r.name == "collective_identity.ledger" and r.levelname == "WARNING"]
    text = record.getMessage()
    for part in ("CI002 wrong_type", "node x of forward graph 0/0", "parameters a.w", "at layer.py:12 in forward"):
        assert part in text, text


def test_counters_tell_failed_and_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch._dynamo.utils import counters

    monkeypatch.setitem(counters, "inductor", type(counters["inductor"])())
    log = ledger().begin_graph("forward", "0/0", "x")
    log.captured(gathers())
    log.finish((row(0, role=None, source=None, absence="dropped", code="CI030"),))
    ledger().begin_graph("forward", "0/1", "x").failed("stopped")
    found = {k.removeprefix("collective_identity_"): v for k, v in counters["inductor"].items()}
    assert found == {"explicit": 6, "graphs": 2, "collectives_left": 1, "dropped": 1, "failed": 1}
