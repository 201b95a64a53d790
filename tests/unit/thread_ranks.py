"""Ranks of one job as threads of one process, on one `HashStore`: everything but the process group is real."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch.distributed import HashStore, PrefixStore

from collective_identity import compat, service, sharing


class Ranks:
    """`run(fn)` calls `fn(rank)` in a thread per rank; what each returned or raised, in rank order."""

    def __init__(self, ranks: int, patch: pytest.MonkeyPatch) -> None:
        self.ranks = ranks
        self.root = HashStore()
        self.groups = {"0": tuple(range(ranks))}
        self.counts: dict[tuple[int, str], int] = {}
        self._here = threading.local()
        store = PrefixStore("default_pg", self.root)
        patch.setattr(compat, "default_store", lambda: store)
        patch.setattr(compat, "group_ranks", self.groups.get)
        patch.setattr(torch.distributed, "get_rank", lambda: self._here.rank)
        patch.setattr(service, "rank_and_ranks", lambda: (self._here.rank, ranks))
        patch.setattr(service, "no_real_group", lambda: None)
        patch.setattr(sharing, "no_real_group", lambda: None)
        patch.setattr(compat, "group_names", list)

    def run(self, fn: Callable[[int], Any], *ranks: int) -> list[Any]:
        def one(rank: int) -> Any:
            self._here.rank = rank
            try:
                return fn(rank)
            except RuntimeError as error:
                return error

        with ThreadPoolExecutor(self.ranks) as pool:
            return list(pool.map(one, ranks or range(self.ranks)))


@pytest.fixture
def ranks(monkeypatch: pytest.MonkeyPatch) -> Iterator[Ranks]:
    yield Ranks(4, monkeypatch)
