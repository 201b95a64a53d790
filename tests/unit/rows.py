"""Rows of an imagined FSDP2 training step for the tests of ledger, report and command."""

from __future__ import annotations

import dataclasses
from typing import Any

from collective_identity import GRAD_REDUCE_SHARD, PARAM_UNSHARD
from collective_identity.digest import CollectiveRow
from collective_identity.ledger import Expectation, ExpectedRow, Ledger

GROUPS = ("", "layers.0", "layers.1")
PER_GROUP = 2
"""Parameters in each group, so collectives of each kind."""


def row(index: int, **changes: Any) -> CollectiveRow:
    base = CollectiveRow(
        index=index,
        node=f"all_gather_into_tensor_{index}",
        transport="all_gather",
        form="default",
        role=PARAM_UNSHARD,
        source="explicit",
        producer="fsdp2",
        group="0",
        group_size=2,
        reduce_op=None,
        dtype="float32",
        numel=64,
        nbytes=256,
        params=("w",),
        param_group="",
        absence=None,
        code=None,
        backward=False,
    )
    return dataclasses.replace(base, **changes)


def gathers(per_group: int = PER_GROUP, **changes: Any) -> tuple[CollectiveRow, ...]:
    names = [name for name in GROUPS for _ in range(per_group)]
    return tuple(row(i, param_group=name, **changes) for i, name in enumerate(names))


def reduces(per_group: int = PER_GROUP, start: int = 0) -> tuple[CollectiveRow, ...]:
    names = [name for name in GROUPS for _ in range(per_group)]
    return tuple(
        row(
            start + i,
            node=f"reduce_scatter_tensor_{i}",
            transport="reduce_scatter",
            role=GRAD_REDUCE_SHARD,
            reduce_op="avg",
            param_group=name,
            backward=True,
        )
        for i, name in enumerate(names)
    )


def backward_rows(per_group: int = PER_GROUP) -> tuple[CollectiveRow, ...]:
    again = gathers(per_group, backward=True)
    return (*again, *reduces(per_group, len(again)))


def expectation(model: str = "Net") -> Expectation:
    phases = ((PARAM_UNSHARD, "forward"), (PARAM_UNSHARD, "regather"), (GRAD_REDUCE_SHARD, "backward"))
    return Expectation(
        model=model,
        world={"mesh": [2]},
        rows=tuple(
            ExpectedRow(role, phase, name, "float32", PER_GROUP, 1)
            for role, phase in phases
            for name in GROUPS
        ),
    )


def add_step(
    ledger: Ledger,
    name: str = "0/0",
    *,
    forward: tuple[CollectiveRow, ...] | None = None,
    backward: tuple[CollectiveRow, ...] | None = None,
) -> None:
    """One training step, bucketed to one collective per parameter group and role."""
    log = ledger.begin_graph("forward", name, "inductor")
    log.captured(gathers() if forward is None else forward)
    log.pass_ran("bucket", 0.25, True, {PARAM_UNSHARD: 6}, {PARAM_UNSHARD: 3}, {"buckets": 3})
    log.finish(gathers(1), compile_seconds=2.0)
    log = ledger.begin_graph("backward", name, "inductor")
    log.captured(backward_rows() if backward is None else backward)
    log.finish(backward_rows(1), compile_seconds=3.0)


def ledger(run_dir: str | None = None) -> Ledger:
    return Ledger(mode="optimize", run_dir=run_dir, agreement_timeout=0.0)
