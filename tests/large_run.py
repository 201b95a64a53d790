"""A run folder as a model with very many collectives would leave it, for what has to stay fast."""

from __future__ import annotations

import dataclasses
import os

from collective_identity import GRAD_REDUCE_SHARD
from collective_identity.ledger import Ledger
from tests.unit.rows import row


def write(folder: str | os.PathLike[str], collectives: int, *, per_unit: int = 8) -> None:
    """One training step of so many collectives: gathers, gathers again, reductions, by units merged ones."""
    book = Ledger(mode="optimize", run_dir=os.fspath(folder), agreement_timeout=0.0)
    third = collectives // 3
    gathers = [
        row(
            i,
            node=f"all_gather_into_tensor_{i}",
            params=(f"layers.{i // per_unit}.weight_{i % per_unit}",),
            param_group=f"layers.{i // per_unit}",
            numel=4096 << i % 5,
            nbytes=16384 << i % 5,
        )
        for i in range(third)
    ]
    again = [dataclasses.replace(one, node=f"{one.node}_again", backward=True) for one in gathers]
    reduced = [
        dataclasses.replace(
            gathers[i % third],
            index=third + i,
            node=f"reduce_scatter_tensor_{i}",
            transport="reduce_scatter",
            role=GRAD_REDUCE_SHARD,
            reduce_op="avg",
            backward=True,
        )
        for i in range(collectives - 2 * third)
    ]
    for kind, rows, merged in (("forward", gathers, True), ("backward", [*again, *reduced], False)):
        log = book.begin_graph(kind, "0/0", "collective_identity")  # type: ignore[arg-type]
        log.captured(rows)
        parts = [rows[i : i + per_unit] for i in range(0, len(rows), per_unit)]
        log.finish(
            [
                dataclasses.replace(
                    part[0],
                    index=number,
                    node=f"bucket_{number}",
                    nbytes=sum(one.nbytes or 0 for one in part),
                    params=tuple(name for one in part for name in one.params or ()),
                    members=tuple(one.node for one in part),
                )
                for number, part in enumerate(parts)
            ]
            if merged
            else rows,
            compile_seconds=1.0,
        )
    book.close()
