"""Fixtures for every test: a fake process group that lives as long as one module."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
import torch.distributed as dist


@pytest.fixture(scope="module")
def fake_world() -> Iterator[int]:
    """A process group of 4 ranks that sends nothing; this process is rank 0. Yields the world size."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    assert not dist.is_initialized(), "another test left a process group behind"
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=4)
    yield 4
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def one_rank() -> Iterator[None]:
    """A real group of one rank: every value is real."""
    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    yield
    dist.destroy_process_group()


@pytest.fixture
def new_group(fake_world: int) -> Callable[[list[int]], str]:
    """Make a group of the fake world and return its name."""
    return lambda ranks: dist.new_group(ranks).group_name


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)
