"""Two ranks that captured other graphs: the error says in which collective they differ, where it is in one."""

from __future__ import annotations

import dataclasses
import threading
import time

import pytest
import torch.distributed as dist

from collective_identity.agreement import RanksDisagree
from collective_identity.board import Board, BoardState
from collective_identity.digest import CollectiveRow
from collective_identity.exchange import Exchange
from tests.distributed.test_agreement import GATHER

pytestmark = pytest.mark.usefixtures("fake_world")

WIDER = dataclasses.replace(GATHER, numel=128)
MORE = dataclasses.replace(GATHER, params=("layers.1.weight",))


def exchanged(*ranks: tuple[CollectiveRow, ...]) -> list[str]:
    """What each of two ranks says; every rank has a tag of its own, as ranks that captured other graphs have."""
    store, said = dist.HashStore(), ["", ""]

    def run(rank: int) -> None:
        state, board = BoardState(), Board(store, "p")
        exchange = Exchange(ranks[rank], kind="forward", cached=False, tag=f"t{rank}", state=state, run="run", name="g")
        exchange.rank, exchange.members, exchange._order = rank, {"0": (0, 1)}, {"0": 0}
        exchange.publish(board)
        try:
            exchange._meet(board, [1 - rank], time.monotonic() + 10)
        except RanksDisagree as error:
            said[rank] = str(error)

    threads = [threading.Thread(target=run, args=(rank,)) for rank in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return said


@pytest.mark.parametrize(
    ("theirs", "zero", "one"),
    [
        ((WIDER,), "numel is 64 on rank 0 and 128 on rank 1", "numel is 128 on rank 1 and 64 on rank 0"),
        ((GATHER, MORE), "collective is None on rank 0 and {", "'params': ['layers.1.weight']"),
        ((GATHER,), "tag (captured graph and options) is 't0' on rank 0 and 't1' on rank 1", "is 't1' on rank 1"),
        ((), "tag (captured graph and options) is 't0' on rank 0", "tag (captured graph and options) is 't1'"),
    ],
    ids=["another size", "one more", "other options", "from cache"],
)
def test_other_graphs(theirs: tuple[CollectiveRow, ...], zero: str, one: str) -> None:
    said = exchanged((GATHER,), theirs)
    assert zero in said[0] and one in said[1], said
