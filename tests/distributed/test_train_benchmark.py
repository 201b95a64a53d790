"""``torchrun -m benchmarks train`` in its smoke size: every layout on the ranks that it can have, both models."""

from __future__ import annotations

import io
import json
import os
import sys
from contextlib import redirect_stdout
from typing import Any

import pytest
import torch

from benchmarks import train
from benchmarks.train_layouts import layout_of
from tests.distributed.launch import launch, run_script

SMOKE = "train --json --inner aot_eager --warmup 2 --steps 1"


def read(said: str, ranks: int) -> tuple[dict[str, dict[str, Any]], dict[str, Any]]:
    """Rank 0's rows by variant, and the last line."""
    *rows, last = (json.loads(line) for line in said.splitlines() if line.startswith("{"))
    assert last["failed"] == last["failed_upstream"] == [] and last["ranks"] == ranks
    return {row["variant"]: row for row in rows}, last


def run(ranks: int, text: str) -> tuple[dict[str, dict[str, Any]], dict[str, Any]]:
    """The command itself, under torchrun."""
    return read(run_script("-m", ranks, ["benchmarks", *SMOKE.split(), *text.split()], timeout=300).stdout, ranks)


def measured(rank: int, ranks: int, text: str) -> tuple[int, str]:
    """The same in a process that is there already: exit status, and what it prints."""
    sys.argv = [*SMOKE.split(), *text.split()]
    os.environ["TORCHELASTIC_RUN_ID"] = "as under torchrun"
    args = train.arguments()
    with redirect_stdout(io.StringIO()) as said:
        status = train.run(args, layout_of(args, torch.device("cpu")))
    return status, said.getvalue()


@pytest.mark.distributed
def test_a_mixture_of_experts() -> None:
    found = launch(measured, 2, "--model moe --precision fp32 --variants eager bucketed")
    assert [status for status, _ in found] == [0, 0] and found[1][1] == "", "rank 0 alone prints"
    rows, last = read(found[0][1], 2)
    assert list(rows) == ["eager", "bucketed"] and last["ratio"]["eager"] == 1.0 and last["mesh"] == [2]
    bucketed = rows["bucketed"]
    assert bucketed["losses"] == rows["eager"]["losses"], "one order of adding up on two ranks"
    assert bucketed["report_ok"] and bucketed["explicit_share"] == 1.0 and bucketed["tp_collectives"] == 0
    assert (bucketed["gathers"], bucketed["reductions"]) == (5, 3), "two blocks and the rest, the blocks' twice"
    assert rows["eager"]["explicit_share"] is None


LAYOUTS = {
    "experts are units": (2, "--model moe --expert-units", [2], (9, 5, None), 0),
    "HSDP, 2 by 2": (4, "--layout hsdp --precision fp32", [2, 2], (5, 3, 3), 0),
    "HSDP of experts, 2 by 2": (4, "--layout hsdp --model moe", [2, 2], (5, 3, 3), 0),
    "HSDP of one replica": (2, "--layout hsdp --replicas 1", [1, 2], (5, 3, 3), 0),
    "HSDP of whole replicas": (2, "--layout hsdp", [2, 1], (None, None, 3), 0),
    "tensor parallel, 2 by 2": (4, "--layout fsdp_tp --precision fp32", [2, 2], (5, 3, None), 26),
    "tensor parallel alone": (2, "--layout fsdp_tp --precision fp32", [1, 2], (None, None, None), 26),
    "tensor parallel of one": (2, "--layout fsdp_tp --tp 1", [2, 1], (5, 3, None), 0),
}


@pytest.mark.distributed
@pytest.mark.long
@pytest.mark.parametrize("name", list(LAYOUTS))
def test_layouts(name: str) -> None:
    ranks, text, mesh, counts, tensor = LAYOUTS[name]
    last_variant = "fused" if "fsdp_tp" in text else "overlapped"
    rows, last = run(ranks, f"{text} --variants eager per_block bucketed {last_variant}")
    assert last["mesh"] == mesh
    near = 1e-6 if "fp32" in text else 2e-3
    assert rows["per_block"]["losses"] == pytest.approx(rows["eager"]["losses"], rel=near), "each parameter learns"
    for row in (rows["bucketed"], rows[last_variant]):
        assert row["losses"] == pytest.approx(rows["eager"]["losses"], rel=near) and row["report_ok"]
        assert tuple(row[key] for key in ("gathers", "reductions", "replica_reductions")) == counts
        assert row["explicit_share"] == (None if counts == (None, None, None) else 1.0)
        assert (row["tp_collectives"], row["merged_with_others"]) == (tensor, 0)
    if last_variant == "fused":
        fused = rows["fused"]
        assert fused["fused"] == 0 and fused["fused_roles"] == {}, "no symmetric memory on CPUs"
        assert fused["not_fused"] == ({"not_enabled": 21, "other_transport": 5} if tensor else {})
