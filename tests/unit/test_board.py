"""Do all ranks count the starts of a job alike, whatever each did in the earlier ones?"""

from __future__ import annotations

import pytest
from torch.distributed import HashStore

from collective_identity.board import start_number, this_process


class Job:
    """Ranks that open sessions on one store; torchrun's restart count is each host's own."""

    def __init__(self) -> None:
        self.store = HashStore()

    def opens(self, rank: int, process: str, restart: int = 0) -> int:
        return start_number(self.store, "base", rank, restart, process)


@pytest.fixture
def job() -> Job:
    return Job()


def test_sessions_of_one_process_are_one_start(job: Job) -> None:
    assert [job.opens(0, "p"), job.opens(1, "q"), job.opens(0, "p"), job.opens(1, "q")] == [1, 1, 1, 1]
    assert this_process() == this_process()


def test_torchrun_counts_on_every_host(job: Job) -> None:
    for restart in range(3):
        assert {job.opens(rank, f"{rank}.{restart}", restart) for rank in range(4)} == {restart + 1}


def test_torchrun_counts_on_the_host_that_failed_alone(job: Job) -> None:
    assert {job.opens(0, "a"), job.opens(1, "b")} == {1}
    assert {job.opens(0, "a2"), job.opens(1, "b2", 1)} == {2}
    assert {job.opens(1, "b3", 1), job.opens(0, "a3", 1)} == {3}


def test_a_membership_change_counts_nowhere(job: Job) -> None:
    assert {job.opens(rank, f"{rank}") for rank in range(4)} == {1}
    assert {job.opens(rank, f"new {rank}") for rank in range(3)} == {2}


@pytest.mark.parametrize("first", [0, 1])
def test_a_rank_that_died_before_it_opened_a_session_follows(job: Job, first: int) -> None:
    assert job.opens(0, "a") == 1
    second = [lambda: job.opens(0, "a2"), lambda: job.opens(1, "b2", 1)]
    assert {second[first](), second[1 - first]()} == {2}


def test_a_store_that_is_new_begins_where_torchrun_counts(job: Job) -> None:
    assert {job.opens(rank, str(rank), 4) for rank in range(2)} == {5}
