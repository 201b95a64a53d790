"""Can a user's suite run its tests on several ranks, under pytest-xdist too, and see what each rank said?"""

from __future__ import annotations

import time

import pytest

from collective_identity import codes
from collective_identity.reporting import Report, build_report
from collective_identity.testing import RanksFailed, assert_nothing_lost, assert_roles, run_on_ranks
from tests.unit.rows import add_step, expectation, gathers, ledger

pytest_plugins = "pytester"

SUITE = '''
import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as collectives

import collective_identity as ci
import inductor_passes


def step(x):
    with ci.role_scope("tp.sum", producer="suite", group=dist.group.WORLD.group_name):
        return collectives.all_reduce(x, "sum", dist.group.WORLD) * 2


def compiled(scale):
    print("hello from rank", dist.get_rank())
    found = torch.compile(step, backend="collective_identity", options={"inner": "aot_eager"})(torch.ones(2) * scale)
    return found.tolist()


def test_fixture(run_on_ranks):
    run = run_on_ranks(compiled, 2, 3.0, timeout=100)
    assert run.values == [[12.0, 12.0]] * 2
    run.assert_nothing_lost()
    run.assert_roles({"tp.sum": 1})
    with pytest.raises(AssertionError, match="tp.sum: expected 2, found 1 .all_reduce"):
        run.assert_roles({"tp.sum": 2})


class TestMarked:
    @pytest.mark.on_ranks(2, timeout=100, roles={"tp.sum": 2})
    @pytest.mark.parametrize("scale", [1.0])
    def test_marker(self, scale):
        print("marked", dist.get_rank())
        assert compiled(scale) == [4.0, 4.0]
        assert dist.get_rank() == 0, "only rank 1 fails"
'''


@pytest.fixture
def good() -> Report:
    book = ledger()
    book.declare(expectation())
    add_step(book)
    return build_report((book.rank_log(),))


@pytest.mark.long
def test_a_suite_runs_on_ranks_under_xdist(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(test_suite=SUITE)
    options = ("-p", "no:cacheprovider", "-n", "2", "--strict-markers", "-p", "collective_identity.pytest_plugin")
    from importlib.metadata import entry_points

    if any(e.value == "collective_identity.pytest_plugin" for e in entry_points(group="pytest11")):
        options = options[:-2]  # installed: pytest has found it
    found = pytester.runpytest_subprocess(*options, "-rA", timeout=280)
    found.assert_outcomes(passed=1, failed=1)
    text = found.stdout.str()
    assert "rank 1 ended with exit code 1" in text and "AssertionError: only rank 1 fails" in text
    assert "RuntimeWarning" not in text and "def run_on_ranks" not in text, "no noise, and not the plugin's own source"
    assert "marked 1" in text, "the log of the rank that failed"
    assert "hello from rank 0" in text and "hello from rank 1" in text, "the logs of a test that passed, by -rA"


def test_a_deadline_ends_every_rank() -> None:
    start = time.monotonic()
    with pytest.raises(RanksFailed, match=r"sleeps: no end after 2.0 s; rank 0 was killed"):
        run_on_ranks(sleeps, 1, timeout=2.0, session=False)
    assert time.monotonic() - start < 30


def sleeps() -> None:
    time.sleep(600)


@pytest.mark.long
def test_a_deadline_shows_where_each_rank_stands() -> None:
    """Rank 1 sleeps, rank 0 waits for it in a barrier."""
    with pytest.raises(RanksFailed) as failed:
        run_on_ranks(waits_for_one_that_sleeps, 2, timeout=25.0)
    head, *text = str(failed.value).splitlines()
    assert head == "waits_for_one_that_sleeps: no end after 25.0 s; rank 0 was killed; rank 1 was killed"
    told = "\n".join(text)
    before, first, second = told.split(", last lines -----")
    assert "rank 1 has not issued what rank 0 waits for" in before and "time.sleep(600)" in before
    assert "in waits_for_one_that_sleeps" in first and "in barrier" in first, "rank 0's stack"
    assert "in waits_for_one_that_sleeps" in second and "in barrier" not in second
    assert "RuntimeWarning" not in told


def waits_for_one_that_sleeps() -> None:
    import torch
    import torch.distributed as dist

    import inductor_passes  # noqa: F401

    torch.compile(lambda x: x + 1, backend="collective_identity", options={"inner": "aot_eager"})(torch.ones(2))
    if dist.get_rank() == 1:
        time.sleep(600)
    dist.barrier()


def test_a_function_of_another_function_is_refused() -> None:
    with pytest.raises(ValueError, match="expected a function at the top of a module or class, found .*<lambda>"):
        run_on_ranks(lambda: None, 2)


def test_a_good_run_passes_and_counts_exactly(good: Report) -> None:
    assert_nothing_lost(good)
    roles = {"fsdp.param_unshard": 12, "fsdp.grad_reduce_shard": 6}
    assert_roles(good, roles)
    assert_roles(good, {"fsdp.param_unshard": 6, "fsdp.grad_reduce_shard": 3}, stage="after")
    with pytest.raises(AssertionError, match="fsdp.grad_reduce_shard: expected 0, found 6"):
        assert_roles(good, {"fsdp.param_unshard": 12})
    with pytest.raises(ValueError, match="stage: expected 'captured' or 'after'"):
        assert_roles(good, roles, stage="later")  # type: ignore[arg-type]


def test_losses_and_empty_runs_fail_with_their_place() -> None:
    book = ledger()
    with pytest.raises(AssertionError, match="compiled nothing"):
        assert_nothing_lost(build_report((book.rank_log(),)))
    log = book.begin_graph("forward", "0/0", "x")
    log.captured(gathers())
    log.event(codes.DROPPED_MIXED, node="n", pass_name="p")
    log.finish(gathers())
    with pytest.raises(AssertionError, match="lost: CI030 mixed: node n of forward graph 0/0"):
        assert_nothing_lost(build_report((book.rank_log(),)))


def test_a_graph_from_a_cache_is_unknown_not_empty() -> None:
    book = ledger()
    book.begin_graph("forward", "0/0", "x").finish((), cached=True)
    with pytest.raises(AssertionError, match="forward graph 0/0 is compiled: its roles are unknown"):
        assert_roles(build_report((book.rank_log(),)), {})
