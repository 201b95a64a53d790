"""Do ranks that share a store find out what they compiled, whenever each does, and stop together?"""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest

from collective_identity import compat
from collective_identity.agreement import AgreementState, RanksDisagree
from collective_identity.digest import CollectiveRow
from collective_identity.exchange import Exchange
from collective_identity.service import Service
from collective_identity.sharing import Shared
from collective_identity.watch import Watcher
from tests.unit.rows import row as any_row
from tests.unit.thread_ranks import Ranks, ranks

__all__ = ["ranks"]  # a fixture


def row(**changes: Any) -> CollectiveRow:
    return any_row(0, **{"group": "0", "group_size": 4, **changes})


def graph(rows: list[CollectiveRow], *, timeout: float = 5.0, state: AgreementState | None = None, **more: Any) -> Any:
    shared = Shared(state or AgreementState(), None, 0, "forward", "0/0")
    shared.publish(rows, **{"tag": "t", **more})
    return shared.agree(timeout)


def test_equal_graphs_agree_and_lie_on_the_store_once(ranks: Ranks) -> None:
    found = ranks.run(lambda rank: graph([row(), row(numel=8)]).status)
    assert found == ["agreed"] * 4
    prefixes = {key.split("/")[3] for key in keys(ranks) if "/rows/" in key}
    assert prefixes == {"1"} and sum("/rows/" in key for key in keys(ranks)) == 1


def keys(ranks: Ranks) -> list[str]:
    return [str(key) for key in ranks.root.list_keys()]


@pytest.mark.parametrize(
    ("fault", "field", "rows"),
    [
        ("other_role", "role", [row(), row(numel=8, role="tp.gather")]),
        ("other_order", "numel", [row(numel=8), row()]),
        ("missing_collective", "collective", [row()]),
        ("missing_collective", "collective", [row(), row(numel=8), row(numel=9)]),
        ("other_reduce_op", "reduce_op", [row(), row(numel=8, reduce_op="max")]),
        ("other_field", "dtype", [row(), row(numel=8, dtype="int8")]),
        ("other_graph", "transport", [row(transport="broadcast")]),
    ],
)
def test_a_difference_has_a_kind_on_every_rank(
    ranks: Ranks, fault: str, field: str, rows: list[CollectiveRow]
) -> None:
    found = ranks.run(lambda rank: graph(rows if rank == 2 else [row(), row(numel=8)]))
    assert all(isinstance(one, RanksDisagree) for one in found), found
    assert {(one.fault, one.field) for one in found} == {(fault, field)}
    assert all(2 in (one.rank, one.peer) and f"({fault})" in str(one) for one in found)


def test_swapped_groups_are_told_from_another_order(ranks: Ranks) -> None:
    ranks.groups["1"] = ranks.groups["0"]
    swapped = [row(group="1"), row()]
    found = ranks.run(lambda rank: graph(swapped if rank == 0 else swapped[::-1]))
    assert {one.fault for one in found} == {"swapped_groups"}


def test_swapped_groups_are_told_where_structure_infers_other_roles_for_them(ranks: Ranks) -> None:
    ranks.groups["1"] = ranks.groups["0"]
    bare: dict[str, Any] = {"source": None, "params": None, "param_group": None}
    first = row(source="inferred")
    right = [first, row(group="1", transport="all_reduce", role=None, **bare)]
    guessed = row(transport="all_reduce", role="fsdp.x", **bare | {"source": "inferred"})
    wrong = [row(group="1", source="inferred"), guessed]
    found = ranks.run(lambda rank: graph(wrong if rank == 1 else right))
    assert {(one.fault, one.field) for one in found} == {("swapped_groups", "group")}
    explicit = [row(group="1"), row(transport="all_reduce", role="tp.reduce")]
    found = ranks.run(lambda rank: graph(explicit if rank == 1 else right, tag="u"))
    assert {(one.fault, one.field) for one in found} == {("other_field", "group")}


@pytest.mark.parametrize(("others", "fault"), [(2, "missing_collective"), (3, "other_graph")])
def test_an_extra_graph_that_begins_like_the_others_next_one_is_another_graph(
    ranks: Ranks, others: int, fault: str
) -> None:
    rows = [row(numel=n) for n in range(1, others + 1)]
    found = ranks.run(lambda rank: graph(rows[:1] if rank == 2 else rows, tag=f"t{rank == 2}"))
    assert {one.fault for one in found} == {fault}


def test_a_rank_that_heard_of_a_difference_keeps_nobody_waiting(ranks: Ranks) -> None:
    """Two groups, and only 0 and 1 share the one that differs: the others hear of it, and all stop at once."""
    ranks.groups["1"] = (0, 1)

    def one(rank: int) -> Any:
        if rank < 2:
            return graph([row(), row(group="1", numel=rank)])
        time.sleep(0.5)
        return graph([row()])

    began = time.monotonic()
    found = ranks.run(one)
    assert all(isinstance(one, RanksDisagree) for one in found), found
    assert {one.relayed_to for one in found[2:]} == {2, 3} and time.monotonic() - began < 4


def test_a_rank_sees_what_it_lacks_on_a_group_that_its_graph_does_not_use(ranks: Ranks) -> None:
    ranks.groups |= {"1": ranks.groups["0"], "2": (0, 1)}
    whole = [row(), row(group="1", numel=8), row(group="2")]
    found = ranks.run(lambda rank: graph([row()] if rank == 3 else whole[: 3 if rank < 2 else 2]))
    assert [(one.fault, one.position, one.relayed_to) for one in found] == [("missing_collective", 1, None)] * 4


def test_a_late_rank_is_waited_for_and_one_that_never_comes_is_a_warning(ranks: Ranks) -> None:
    def one(rank: int) -> Any:
        if rank == 3:
            return None
        time.sleep(0.4 if rank == 1 else 0.0)
        return graph([row()], timeout=1.0)

    began = time.monotonic()
    found = ranks.run(one)
    assert time.monotonic() - began < 4
    assert {(f.status, f.detail) for f in found[:3]} == {("timeout", "ranks [3] did not publish this graph in time")}


def test_a_rank_stops_for_two_others_that_differ(ranks: Ranks) -> None:
    ranks.groups |= {"a": (0, 1), "b": (2, 3)}
    states = [AgreementState() for _ in range(4)]
    rows = [[row(group="a")], [row(group="a", numel=9)], [row(group="b")], [row(group="b")]]
    before = ranks.run(lambda rank: graph(rows[rank], state=states[rank]), 2, 3)
    assert [one.status for one in before] == ["agreed"] * 2
    pair = ranks.run(lambda rank: graph(rows[rank], state=states[rank]), 0, 1)
    assert [one.relayed_to for one in pair] == [None, None]
    after = ranks.run(lambda rank: graph(rows[rank], state=states[rank]), 2, 3)
    assert [(one.relayed_to, {one.rank, one.peer}) for one in after] == [(2, {0, 1}), (3, {0, 1})]


def published(rows: list[CollectiveRow]) -> Exchange:
    """A graph whose record the others can read, as a service has it a moment after the compile."""
    exchange = Exchange(rows, kind="forward", cached=False, tag="t", state=AgreementState())
    board = exchange.board()
    assert board is not None
    exchange.publish(board)
    return exchange


def test_a_rank_that_agrees_lets_its_peers_compare_among_themselves(ranks: Ranks) -> None:
    """Ranks 2 and 3 agree with everyone before 0 and 1, which differ on a group of their own, have compared."""
    ranks.groups["1"] = (0, 1)

    def one(rank: int) -> Any:
        exchange = published([row(), *([row(group="1", group_size=2, numel=8 + rank)] if rank < 2 else [])])
        time.sleep(0.5 if rank < 2 else 0.0)
        return exchange.agree(5.0)

    found = ranks.run(one)
    assert all(isinstance(one, RanksDisagree) for one in found), found
    assert [one.relayed_to for one in found] == [None, None, 2, 3]


def test_a_rank_that_compares_nothing_is_not_waited_for_long(ranks: Ranks) -> None:
    """Its record is there; that it has compared it is never said."""

    def one(rank: int) -> Any:
        exchange = published([row()])
        began = time.monotonic()
        return None if rank == 0 else (exchange.agree(20.0).status, time.monotonic() - began)

    _, *others = ranks.run(one)
    assert all(status == "agreed" and seconds < 8 for status, seconds in others), others


def test_the_next_start_reads_nothing_of_the_one_before(ranks: Ranks, monkeypatch: pytest.MonkeyPatch) -> None:
    ranks.run(lambda rank: graph([row(numel=1)], timeout=0.2), 0, 1)
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    assert [one.status for one in ranks.run(lambda rank: graph([row(numel=2)]))] == ["agreed"] * 4


class Hung:
    """A store whose server answers nothing until it is let go."""

    def __init__(self) -> None:
        self.let_go = threading.Event()

    def __getattr__(self, name: str) -> Any:
        if name == "underlying_store":  # it is no prefix store
            raise AttributeError(name)

        def call(*_: Any) -> Any:
            self.let_go.wait(20)
            raise RuntimeError("Connection reset by peer")

        return call


def test_a_store_that_hangs_or_fails_costs_the_bound_and_a_warning(
    ranks: Ranks, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = Hung()
    monkeypatch.setattr(compat, "default_store", lambda: store)

    def one(rank: int) -> tuple[Any, float]:
        service = Service(AgreementState())
        shared = Shared(AgreementState(), service, 0, "forward", "0/0")
        began = time.monotonic()
        shared.publish([row()], tag="t")
        assert time.monotonic() - began < 0.5
        return shared.agree(0.3), time.monotonic() - began

    hung, seconds = ranks.run(one, 0)[0]
    assert (hung.status, hung.detail) == ("timeout", "the store does not answer") and seconds < 3
    store.let_go.set()
    failed, seconds = ranks.run(one, 1)[0]
    assert failed.detail == "the store failed: RuntimeError: Connection reset by peer" and seconds < 3


def test_a_service_publishes_without_waiting_and_a_client_sees_it(ranks: Ranks) -> None:
    services: list[Service] = []

    def one(rank: int) -> Any:
        state = AgreementState()
        service = Service(state)
        services.append(service)
        shared = Shared(state, service, 7, "forward", "0/0")
        shared.publish([row(), row(numel=8)], tag="t")
        return shared.agree(5.0).status

    assert ranks.run(one) == ["agreed"] * 4
    watcher = Watcher(ranks.root)
    deadline = time.monotonic() + 10
    found = None
    while time.monotonic() < deadline:
        found = watcher.look(4.0)
        if found is not None and len(found[0]) == 4 and all(len(one.graphs) == 1 for one in found[0]):
            break
        time.sleep(0.05)
    seen, verdict, difference = found or pytest.fail("nothing seen")
    assert [len(one.graphs[7].rows) for one in seen] == [2] * 4 and difference is None
    assert all("forward graph 0/0" in text for one in seen for text in one.record["doing"])
    for service in services:
        service.close()
    seen, verdict, _ = watcher.look(4.0) or pytest.fail("nothing seen")
    assert [one.record["ended"] for one in seen] == [True] * 4 and not verdict.stands
