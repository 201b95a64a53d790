"""Does the verdict name who is waited for, and stay silent where nobody is? Values in, values out."""

from __future__ import annotations

import json
from typing import Any

import pytest
from torch.distributed import HashStore

from collective_identity.board import NEWEST, Board, spell, unspell
from collective_identity.reporting.watch_command import lines
from collective_identity.standstill import Graph, Seen, judge
from collective_identity.watch import Watcher

GATHER = {
    "transport": "all_gather",
    "group": "a",
    "role": "fsdp.param_unshard",
    "params": ["layers.0.weight"],
    "param_group": "layers.0",
}
REDUCE = {**GATHER, "transport": "reduce_scatter", "role": "fsdp.grad_reduce_shard"}
GRAPHS = {0: Graph("forward", "0/0", (GATHER, REDUCE, GATHER))}


def seen(rank: int, *, graphs: dict[int, Graph] | None = None, operations: Any = None, **changes: Any) -> Seen:
    """A rank of two that has stood for 9 s outside every graph, one collective issued on group "a"."""
    silent = changes.pop("silent", False)
    record = {
        "doing": [],
        "calls": [],
        "groups": {"a": [1, "0,1"]},
        "beat": 1,
        "every": 2.0,
        "still": 9.0,
        "ended": False,
        "frames": [],
        "host": "h",
        "pid": 7,
        **changes,
    }
    return Seen(rank, record, GRAPHS if graphs is None else graphs, operations or {}, silent)


def call(at: int, out: int | None, n: int = 0) -> dict[str, Any]:
    return {"graph": 0, "call": n, "at": {"a": at}, "out": None if out is None else {"a": out}}


def issued(count: int, members: str = "0,1", group: str = "a") -> dict[str, list[Any]]:
    return {group: [count, members]}


def test_who_has_issued_fewer_is_named_with_the_collective_that_is_missing() -> None:
    ahead = seen(0, groups=issued(5), calls=[call(0, 3), call(3, None, 1)])
    verdict = judge([ahead, seen(1, groups=issued(4), calls=[call(0, 3)])], 2, 4.0)
    assert verdict.stands and verdict.still == 9.0
    (found,) = verdict.findings
    assert (found.kind, found.ranks, found.waiting) == ("behind", (1,), (0,))
    at = found.collective
    assert (at.number, at.graph, at.call, at.position, at.of) == (5, "forward graph 0/0", 1, 1, 3)
    assert str(found) == (
        "rank 1 has not issued what rank 0 waits for on group 'a' (ranks 0,1): reduce_scatter fsdp.grad_reduce_shard "
        "of layers.0, collective 2 of 3 in forward graph 0/0, call 1"
    )


def test_a_rank_that_left_a_graph_early_comes_first() -> None:
    whole = seen(0, groups=issued(6), calls=[call(0, 3), call(3, None, 1)])
    short = seen(1, groups=issued(5), calls=[call(0, 3), call(3, 5, 1)])
    first, second = judge([whole, short], 2, 4.0).findings
    assert (first.kind, first.ranks) == ("skipped", (1,)) and "2 of 3 issued" in str(first)
    assert (second.kind, second.ranks, second.collective.position) == ("behind", (1,), 2)


def test_the_rank_that_waits_for_nobody_is_named_before_those_that_wait_for_it() -> None:
    """0 waits for 1 on "a", 1 waits for 2 on "b": 2 is the cause."""
    records = [
        seen(0, groups={**issued(2), **issued(1, "1,2", "c")}),
        seen(1, groups={**issued(1), **issued(3, "1,2", "b")}),
        seen(2, groups=issued(2, "1,2", "b")),
    ]
    assert [found.ranks for found in judge(records, 3, 4.0).findings if found.group != "c"] == [(2,), (1,)]


def test_other_operations_under_one_number() -> None:
    second = ("all_reduce [[8]]", "all_gather [[8]]")
    operations = [{"a": [[1, "all_gather [[4]]", True], [2, text, False]]} for text in second]
    records = [seen(rank, groups=issued(2), operations=operations[rank], calls=[call(0, None)]) for rank in (0, 1)]
    kinds = [(found.kind, found.ranks, found.collective.position) for found in judge(records, 2, 4.0).findings]
    assert kinds == [("other_operation", (1,), 1), ("unfinished", (0, 1), 1)]
    assert "all_reduce [[8]] on ranks 0; all_gather [[8]] on ranks 1" in str(judge(records, 2, 4.0).findings[0])
    uneven = [{"a": [[1, f"alltoall_base [[{size}]]", True]]} for size in (3, 4)]
    assert not judge([seen(rank, operations=uneven[rank]) for rank in (0, 1)], 2, 4.0).findings


def test_a_collective_that_all_have_issued_and_none_has_left() -> None:
    records = [seen(rank, groups=issued(4), calls=[call(3, None)]) for rank in (0, 1)]
    (found,) = judge(records, 2, 4.0).findings
    assert (found.kind, found.collective.position) == ("unfinished", 0)
    ended = {"a": [[4, "all_gather [[4]]", True]]}
    records = [seen(rank, groups=issued(4), calls=[call(3, None)], operations=ended) for rank in (0, 1)]
    assert not judge(records, 2, 4.0).findings  # it has ended: they stand somewhere else in the graph


def test_one_rank_that_moves_is_enough_and_one_that_is_gone_is_not_asked() -> None:
    behind = {"groups": issued(0)}
    assert not judge([seen(0), seen(1, still=1.0, **behind)], 2, 4.0).stands
    dead = judge([seen(0), seen(1, still=1.0, silent=True, **behind)], 2, 4.0)
    assert dead.stands and dead.findings[0].ranks == (1,)
    left = judge([seen(0), seen(1, still=1.0, ended=True, **behind)], 2, 4.0)
    assert left.stands and left.findings[0].ranks == (1,)
    assert not judge([seen(0, ended=True), seen(1, ended=True)], 2, 4.0).stands
    assert judge([seen(0)], 2, 4.0).unheard == (1,)


def test_a_rank_without_a_sign_of_life_is_named_with_what_the_others_are_in_now() -> None:
    """It spoke last before its first call; the others are through that and wait in the next."""
    ahead = seen(0, groups=issued(4), calls=[call(0, 3), call(3, None, 1)])
    dead = seen(1, groups=issued(0), still=0.0, silent=True)
    (found,) = judge([ahead, dead], 2, 4.0).findings
    at = found.collective
    assert (found.kind, found.ranks, found.waiting) == ("silent", (1,), (0,))
    assert (at.number, at.call, at.position) == (4, 1, 0)
    assert str(found).startswith("rank 1 gives no sign of life, and rank 0 waits on group 'a' (ranks 0,1): all_gather ")
    ended = {"a": [[n, "all_gather [[4]]", n < 6] for n in range(1, 7)]}
    ahead = seen(0, groups=issued(6), calls=[call(0, 3), call(3, None, 1)], operations=ended)
    (found,) = judge([ahead, dead], 2, 4.0).findings
    assert (found.collective.number, found.collective.position) == (6, 2)
    alive = seen(1, groups=issued(0))
    (found,) = judge([ahead, alive], 2, 4.0).findings
    assert (found.kind, found.collective.number) == ("behind", 1)


def test_a_rank_that_fell_silent_in_a_collective_of_all_is_the_cause() -> None:
    """Its process is stopped while all are in the same collective; on another group a rank is late because of it."""
    both = {**issued(2, "0,1,2"), **issued(3, "0,2", "b")}
    late = {**issued(2, "0,1,2"), **issued(2, "0,2", "b")}
    verdict = judge(
        [
            seen(0, groups=both, calls=[call(1, None)]),
            seen(1, groups=issued(2, "0,1,2"), silent=True),
            seen(2, groups=late, calls=[call(1, None)]),
        ],
        3,
        4.0,
    )
    found = [(f.kind, f.ranks, f.waiting) for f in verdict.findings]
    assert found == [("silent", (1,), (0, 2)), ("behind", (2,), (0,))]
    records = [seen(rank, still=1.0, silent=True) for rank in (0, 1)]
    verdict = judge([*records, seen(2, ended=True)], 3, 4.0)
    assert verdict.stands and not verdict.findings
    said = list(lines(records, verdict, None, 3))
    assert said[0] == "3 ranks, none gives a sign of life" and "rank 1" in said[-1] and len(said) == 3


def test_a_rank_that_compiles_is_no_hang_unless_another_is_the_cause() -> None:
    waits = seen(0, groups=issued(2), calls=[call(1, None)])
    compiles = seen(1, doing=["compiles forward graph 0/1"])
    verdict = judge([waits, compiles], 2, 4.0)
    assert (verdict.stands, verdict.compiling, verdict.findings[0].ranks) == (False, (1,), (1,))
    alone = judge([seen(0), compiles], 2, 4.0)
    assert (alone.stands, alone.compiling, alone.findings) == (False, (1,), ())
    dead = judge([waits, seen(1, doing=["compiles forward graph 0/1"], silent=True)], 2, 4.0)
    assert (dead.stands, dead.compiling, dead.findings[0].kind) == (True, (), "silent")
    # 2 compiles, but 1 is late for 0 on their own group: that does not end with the compile.
    records = [
        seen(0, groups=issued(2), calls=[call(1, None)]),
        seen(1),
        seen(2, groups={}, doing=["compiles forward graph 0/1"]),
    ]
    verdict = judge(records, 3, 4.0)
    assert (verdict.stands, verdict.compiling, verdict.findings[0].ranks) == (True, (2,), (1,))
    said = list(lines([waits, compiles], judge([waits, compiles], 2, 4.0), None, 2))
    assert said[0] == "2 ranks, not moved for 9 s while a compile goes on (ranks 1): no hang"
    assert any("rank 1 (h, process 7) compiles forward graph 0/1" in line for line in said)


def test_ranks_that_wait_for_each_other_are_said_to_and_the_fewer_come_first() -> None:
    """Rank 1 of 3 is in an eager collective of group "0", the others in a graph's on group "a"."""
    more = {**issued(2, "0-2", "0"), **issued(3, "0-2")}
    others = {**issued(1, "0-2", "0"), **issued(4, "0-2")}
    records = [seen(rank, groups=more if rank == 1 else others) for rank in range(3)]
    first, second = judge(records, 3, 4.0).findings
    assert (first.ranks, first.waiting, first.group) == ((1,), (0, 2), "a")
    assert str(first).endswith("; they wait for each other: rank 1 waits for ranks 0,2 on group '0'")
    assert (second.ranks, second.waiting, second.group) == ((0, 2), (1,), "0")
    assert str(second).endswith("; they wait for each other: ranks 0,2 wait for rank 1 on group 'a'")


def test_a_member_that_never_spoke_is_waited_for() -> None:
    (found,) = judge([seen(0, calls=[call(0, None)])], 2, 4.0).findings
    assert (found.kind, found.ranks, found.waiting) == ("behind", (1,), (0,))


def test_no_position_is_made_up_where_a_row_counts_as_several_or_no_table_is_known() -> None:
    several = seen(0, groups=issued(8), calls=[call(0, 5), call(5, None, 1)])
    at = judge([several, seen(1, groups=issued(7))], 2, 4.0).findings[0].collective
    assert (at.graph, at.call, at.position, at.row) == ("forward graph 0/0", 1, None, None)
    unknown = {0: Graph("forward", "0/0", ())}
    one = seen(0, groups=issued(2), calls=[call(0, None)], graphs=unknown)
    assert judge([one, seen(1, graphs=unknown)], 2, 4.0).findings[0].collective.position is None
    eager = judge([seen(0, groups=issued(2)), seen(1)], 2, 4.0).findings[0]
    assert "collective 2, outside every graph" in str(eager)


@pytest.mark.parametrize("ranks", [(), (3,), (0, 1), (0, 1, 2, 3), (1, 5, 9, 13), (0, 3, 5), (3, 2, 1), (7, 0)])
def test_ranks_are_spelled_so_that_they_can_be_read_back(ranks: tuple[int, ...]) -> None:
    assert unspell(spell(ranks)) == ranks


def test_a_long_group_is_spelled_short() -> None:
    assert spell(range(0, 4096, 8)) == "0-4088/8"


def test_the_watcher_follows_the_newest_start_and_sees_who_falls_silent(monkeypatch: pytest.MonkeyPatch) -> None:
    store = HashStore()
    watcher = Watcher(store)
    assert watcher.look(4.0) is None
    clock = [100.0]
    monkeypatch.setattr("collective_identity.watch.time.monotonic", lambda: clock[0])

    def start(number: int) -> Board:
        begun = {"prefix": f"p{number}", "run": "r", "restart": number, "ranks": 2, "every": 2.0}
        store.set(NEWEST, json.dumps(begun))
        board = Board(store, f"p{number}")
        board.set("rows/d", list(GRAPHS[0].rows))
        for rank in (0, 1):
            board.set(f"graphs/{rank}", [[0, "forward", "0/0", "d", False]])
        return board

    def tell(board: Board, rank: int, beat: int, **changes: Any) -> None:
        board.set(f"at/{rank}", {**seen(rank, **changes).record, "beat": beat})

    first = start(0)
    tell(first, 0, 1, groups=issued(2), calls=[call(0, None)], frames=["train.py:1 in main: loss.item()"])
    first.set("operations/0", {"a": [[2, "reduce_scatter [[4]]", False]]})
    tell(first, 1, 1)
    ranks, verdict, difference = watcher.look(4.0) or pytest.fail("nothing seen")
    assert verdict.stands and difference is None and [one.silent for one in ranks] == [False, False]
    assert verdict.findings[0].collective.row == REDUCE
    assert ranks[0].operations and "train.py:1 in main" in ranks[0].where()
    clock[0] += 10  # rank 0 goes on giving signs of life, rank 1 does not
    tell(first, 0, 2, groups=issued(2), calls=[call(0, None)])
    ranks, verdict, _ = watcher.look(4.0) or pytest.fail("nothing seen")
    assert [one.silent for one in ranks] == [False, True] and "no sign of life" in ranks[1].where()
    assert not ranks[0].operations  # it moved in between
    second = start(1)
    tell(second, 0, 1, still=0.0)
    second.set("difference", {"rank": 0})
    ranks, verdict, difference = watcher.look(4.0) or pytest.fail("nothing seen")
    assert (watcher.start["restart"], [one.rank for one in ranks], verdict.unheard) == (1, [0], (1,))
    assert not verdict.stands and difference == {"rank": 0}


def test_the_watcher_doubts_who_last_spoke_before_the_others_and_counts_on_who_stands(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    store, clock = HashStore(), [100.0]
    monkeypatch.setattr("collective_identity.watch.time.monotonic", lambda: clock[0])
    store.set(NEWEST, json.dumps({"prefix": "p", "run": "r", "restart": 0, "ranks": 2, "every": 2.0}))
    board = Board(store, "p")
    board.set("at/0", {**seen(0, still=2.0, frames=["x.py:1 in main: y()"]).record, "time": 1000.0})
    board.set("at/1", {**seen(1, still=6.0).record, "time": 980.0})
    watcher = Watcher(store)
    ranks, verdict, _ = watcher.look(4.0) or pytest.fail("nothing seen")
    assert [one.old for one in ranks] == [0.0, 20.0] and not verdict.stands
    assert ranks[1].where().endswith("(its last sign of life is 20 s older than another rank's)")
    clock[0] += 4  # rank 0 would have said that it moves
    ranks, verdict, _ = watcher.look(4.0) or pytest.fail("nothing seen")
    assert verdict.stands and verdict.still == 4.5
    clock[0] += 4
    ranks, verdict, _ = watcher.look(4.0) or pytest.fail("nothing seen")
    assert [one.silent for one in ranks] == [True, True] and [one.old for one in ranks] == [0.0, 0.0]
