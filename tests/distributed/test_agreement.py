"""Do ranks that disagree stop in bounded time, each saying why, and do the others go on? Real gloo
processes."""

from __future__ import annotations

import dataclasses
import os
import threading
import time
from typing import Any

import pytest
import torch.distributed as dist

from collective_identity import agreement, session
from collective_identity.agreement import AgreementState, RanksDisagree, agree
from collective_identity.digest import CollectiveRow
from tests.distributed.launch import launch

GATHER = CollectiveRow(
    index=0,
    node="all_gather_into_tensor",
    transport="all_gather",
    form="default",
    role="fsdp.param_unshard",
    source="explicit",
    producer="fsdp2",
    group="0",
    group_size=2,
    reduce_op=None,
    dtype="float32",
    numel=64,
    nbytes=256,
    params=("layers.0.weight",),
    param_group="layers.0",
    absence=None,
    code=None,
    backward=False,
)


SAID = ("rank", "peer", "group", "position", "field", "mine", "theirs", "fault", "relayed_to")


def row(**changes: Any) -> CollectiveRow:
    return dataclasses.replace(GATHER, **changes)


REDUCE = row(
    node="reduce_scatter_tensor",
    transport="reduce_scatter",
    role="fsdp.grad_reduce_shard",
    reduce_op="avg",
    backward=True,
)
ROWS = (row(), row(params=("layers.1.weight",), param_group="layers.1"), REDUCE)


def attempt(rows: tuple[CollectiveRow, ...], timeout: float = 20.0, **options: Any) -> dict[str, Any]:
    """What `agree` does here: its result or its error, and how long it took."""
    began = time.monotonic()
    arguments: dict[str, Any] = {"kind": "forward", "cached": False, "tag": "t0", **options}
    try:
        result = agree(rows, timeout=timeout, **arguments)
        outcome: dict[str, Any] = {"status": result.status, "detail": result.detail}
    except RanksDisagree as error:
        outcome = {"status": "raised", "detail": str(error)}
        outcome |= {name: getattr(error, name) for name in SAID}
    return outcome | {"seconds": time.monotonic() - began}


# Each: rows and options of the rank that is off (the others have ROWS, tag t0), then position, field, and the
# two values as the ranks that are right see them.
FAULTS: dict[str, tuple[tuple[CollectiveRow, ...], dict[str, Any], int | None, str, Any, Any]] = {
    "other role": (
        (ROWS[0], row(params=("layers.1.weight",), param_group="layers.1", role="tp.gather"), REDUCE),
        {},
        1,
        "role",
        "fsdp.param_unshard",
        "tp.gather",
    ),
    "other source": ((row(source="inferred"), *ROWS[1:]), {}, 0, "source", "explicit", "inferred"),
    "other order": (
        (ROWS[1], ROWS[0], REDUCE),
        {},
        0,
        "params",
        ["layers.0.weight"],
        ["layers.1.weight"],
    ),
    "other reduce op": (
        (*ROWS[:2], dataclasses.replace(REDUCE, reduce_op="sum")),
        {},
        2,
        "reduce_op",
        "avg",
        "sum",
    ),
    "other dtype": ((row(dtype="bfloat16"), *ROWS[1:]), {}, 0, "dtype", "float32", "bfloat16"),
    "other size": ((row(numel=32), *ROWS[1:]), {}, 0, "numel", 64, 32),
    "missing collective": (ROWS[:2], {}, 2, "collective", None, None),
    "missing in the middle": (
        (ROWS[0], REDUCE),
        {},
        1,
        "transport",
        "all_gather",
        "reduce_scatter",
    ),
    "other options": (ROWS, {"tag": "t1"}, None, "tag (captured graph and options)", "t0", "t1"),
    "other kind": (ROWS, {"kind": "inference"}, None, "kind", "forward", "inference"),
}


KINDS = {
    "other role": "other_role",
    "other order": "other_order",
    "other reduce op": "other_reduce_op",
    "missing collective": "missing_collective",
    "missing in the middle": "missing_collective",
    "other options": "other_graph",
    "other kind": "other_graph",
}


def run_faults(rank: int, ranks: int, off: int) -> dict[str, dict[str, Any]]:
    results = {}
    for name, (rows, options, *_) in FAULTS.items():
        state = AgreementState()
        use = {"state": state, "run": name, **(options if rank == off else {})}
        results[name] = attempt(rows if rank == off else ROWS, **use)
        dist.barrier()
    results["no fault"] = attempt(ROWS, state=AgreementState(), run="no fault")
    return results


@pytest.mark.distributed
@pytest.mark.parametrize(("ranks", "store"), [(2, "file"), (4, "tcp")])
def test_planted_faults_raise_on_every_rank(ranks: int, store: str) -> None:
    off = ranks - 1
    by_rank = launch(run_faults, ranks, off, timeout=120, store=store)
    for name, (_, _, position, field, right, wrong) in FAULTS.items():
        for rank, results in enumerate(by_rank):
            found = results[name]
            assert found["status"] == "raised", (name, rank, found)
            assert found["seconds"] < 10, (name, rank, found)
            assert (found["field"], found["position"]) == (field, position), (name, rank, found)
            assert found["fault"] == KINDS.get(name, "other_field") and found["fault"] in found["detail"], found
            assert found["group"] == "0"
            assert found["peer"] in (set(range(off)) if rank == off else {off}), (name, rank)
            if name != "missing collective":
                expected = (wrong, right) if rank == off else (right, wrong)
                assert (found["mine"], found["theirs"]) == expected, (name, rank, found)
            for text in (f"on rank {rank}", f"on rank {found['peer']}", field, "CI050", "Give both ranks"):
                assert text in found["detail"], (name, rank, found["detail"])
        missing = by_rank[0]["missing collective"]
        assert missing["mine"]["transport"] == "reduce_scatter" and missing["theirs"] is None
    assert [results["no fault"]["status"] for results in by_rank] == ["agreed"] * ranks


def run_groups(rank: int, ranks: int) -> dict[str, dict[str, Any]]:
    """4 ranks, two pairs and two groups of everyone."""
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    everyone = [dist.new_group(), dist.new_group()]
    pair, (a, b) = pairs[rank // 2].group_name, (g.group_name for g in everyone)
    mine = row(group=pair)
    on_a, on_b = row(group=a), row(group=b)
    results = {}
    swapped = (on_b, on_a) if rank == 2 else (on_a, on_b)
    results["swapped"] = attempt(swapped, state=AgreementState(), run="swapped")
    dist.barrier()
    # The pairs compile different graphs, like pipeline stages, and meet on no group.
    stage = (mine, row(group=pair, numel=128)) if rank < 2 else (mine,)
    results["stages"] = attempt(stage, tag=f"stage{rank // 2}", state=AgreementState(), run="stages")
    dist.barrier()
    # Positions count what the two ranks share: rank 2 is in rank 3's pair, ranks 0 and 1 are not.
    mixed = (mine, row(group=a, numel=65 if rank == 3 else 64))
    results["mixed"] = attempt(mixed, state=AgreementState(), run="mixed")
    dist.barrier()
    # A difference within one pair stops the other at its next check, not before.
    within = (row(group=pair, numel=7 if rank == 0 else 8),)
    state = AgreementState()
    for name, pair_number in (("before", 1), ("one pair", 0), ("after", 1)):
        if rank // 2 == pair_number:
            results[name] = attempt(within, state=state, run="one pair", tag=name)
        dist.barrier()
    results["unequal all-to-all"] = attempt(
        (row(transport="all_to_all", role=None, numel=rank + 1, group=a),),
        state=AgreementState(),
        run="uneven",
    )
    return results


@pytest.mark.distributed
def test_groups_are_compared_among_their_members_in_program_order() -> None:
    by_rank = launch(run_groups, 4, timeout=120)
    for rank, results in enumerate(by_rank):
        swapped = results["swapped"]
        assert (swapped["status"], swapped["field"], swapped["position"]) == ("raised", "group", 0), swapped
        assert swapped["fault"] == "swapped_groups"
        assert swapped["peer"] in ({0, 1, 3} if rank == 2 else {2})
        assert repr(swapped["mine"]) in swapped["detail"] and repr(swapped["theirs"]) in swapped["detail"]
        mixed = results["mixed"]
        assert (mixed["status"], mixed["field"], {mixed["mine"], mixed["theirs"]}) == ("raised", "numel", {64, 65})
        assert mixed["position"] == (1 if {rank, mixed["peer"]} == {2, 3} else 0), mixed
        assert results["stages"]["status"] == "agreed", results
        if rank < 2:
            own = results["one pair"]
            assert (own["status"], own["rank"], own["peer"], own["relayed_to"]) == ("raised", rank, 1 - rank, None)
        else:
            assert results["before"]["status"] == "agreed"
            after = results["after"]
            assert (after["status"], after["relayed_to"], {after["rank"], after["peer"]}) == ("raised", rank, {0, 1})
            assert f"Rank {rank} stops because those two do" in after["detail"]
        assert results["unequal all-to-all"]["status"] == "agreed"
        assert all(found["seconds"] < 10 for found in results.values())


def run_absent(rank: int, ranks: int) -> dict[str, Any]:
    state = AgreementState()
    results: dict[str, Any] = {}
    if rank != 1:
        results["late"] = attempt(ROWS, timeout=2.0, state=state, tag="only here")
    else:
        time.sleep(4.0)
    # Rank 1's order of graphs differs from the others' by now, rightly: they said so, and nobody raises.
    results["after"] = attempt(ROWS, timeout=20.0, state=state)
    return results


@pytest.mark.distributed
@pytest.mark.parametrize("ranks", [2, 4])
def test_a_rank_that_never_arrives_costs_the_bound_and_a_warning(ranks: int) -> None:
    by_rank = launch(run_absent, ranks, timeout=60)
    for rank, results in enumerate(by_rank):
        if rank != 1:
            late = results["late"]
            assert late["status"] == "timeout" and "[1]" in late["detail"], late
            assert 2.0 <= late["seconds"] < 4.0
        assert results["after"]["status"] == "agreed", (rank, results)


def run_cached(rank: int, ranks: int) -> dict[str, dict[str, Any]]:
    results = {}
    for name, cached in (
        ("groups known", {"groups": ["0"], "rows": ()}),
        ("groups unknown", {"rows": ()}),
        ("other tag", {"groups": ["0"], "rows": (), "tag": "t9"}),
    ):
        state = AgreementState()
        options: dict[str, Any] = {"state": state, "run": name}
        if rank == 0:
            rows: Any = cached["rows"]
            extra: dict[str, Any] = {k: v for k, v in cached.items() if k != "rows"}
            results[name] = attempt(rows, cached=True, **options, **extra)
        else:
            results[name] = attempt(ROWS, **options)
        # The cache brings the backward with it, so rank 0 never announces one; nobody waits for it.
        if rank != 0 and name != "other tag":
            results[f"{name}, backward"] = attempt(ROWS, kind="backward", **options)
        dist.barrier()
        if name == "groups unknown":  # its own order counts differ now; still compared by tag
            results["next"] = attempt(ROWS, tag="t2", **options)
            dist.barrier()
    return results


@pytest.mark.distributed
def test_a_rank_that_hit_its_cache_has_no_rows_and_is_not_waited_for() -> None:
    cold = launch(run_cached, 2, timeout=60)
    assert cold[0]["groups known"]["status"] == "agreed"
    assert cold[0]["groups unknown"]["status"] == "skipped"
    for name in (
        "groups known",
        "groups unknown",
        "groups known, backward",
        "groups unknown, backward",
        "next",
    ):
        assert cold[1][name]["status"] == "agreed", (name, cold[1])
        assert cold[1][name]["seconds"] < 5
    for rank in (0, 1):
        assert cold[rank]["other tag"]["field"] == "tag (captured graph and options)", cold[rank]
        assert cold[rank]["next"]["status"] == "agreed"


def run_sessions(rank: int, ranks: int) -> list[Any]:
    """Twice a session in one process on one store: the second must not read the first's keys."""
    statuses: list[Any] = []
    for numel in (1, 2):
        with session.enable(agreement_timeout=20.0) as handle:
            rows = (row(numel=numel),)
            time.sleep(0.5 * rank)  # rank 0 looks for rank 1 before it is there, and must not find its past
            log = handle.session.begin_graph("forward", "0/0", "test")
            statuses.append(log.agree(rows, tag="t").status)
            # From another thread, as a lazy backward would.
            backward = handle.session.begin_graph("backward", "0/0", "test")
            other = threading.Thread(
                target=lambda: statuses.append(backward.agree(rows, tag="t").status)  # noqa: B023
            )
            other.start()
            other.join()
            log.finish(rows)
            statuses.append(handle.report().agreement)
    with session.enable(agreement_timeout=20.0) as handle:
        log = handle.session.begin_graph("forward", "0/0", "test")
        try:
            log.agree((row(numel=rank),), tag="t")
        except RanksDisagree:
            statuses.append(handle.report().agreement)
            statuses.append(handle.report().ok)
    return statuses


@pytest.mark.distributed
def test_state_lives_on_the_session_and_keys_on_run_and_restart() -> None:
    restart = {"TORCHELASTIC_RUN_ID": "run7", "TORCHELASTIC_RESTART_COUNT": "3"}
    expected = ["agreed", "agreed", "agreed"] * 2 + ["differs", False]
    assert launch(run_sessions, 2, timeout=60, env=restart) == [expected, expected]


def run_restarted(rank: int, ranks: int) -> list[str]:
    """The store of an elastic job outlives a restart. In the first start only rank 0 came as far as a graph;
    what it left must neither be read nor put the ranks out of step in the second."""
    statuses = []
    if rank == 0:
        statuses.append(attempt((row(numel=10),), timeout=0.3, state=AgreementState())["status"])
    dist.barrier()
    os.environ.update(TORCHELASTIC_RESTART_COUNT="1", TORCHELASTIC_USE_AGENT_STORE="True")
    statuses.append(attempt((row(numel=11),), state=AgreementState())["status"])
    return statuses


@pytest.mark.distributed
def test_a_restart_does_not_meet_its_past() -> None:
    assert launch(run_restarted, 2, timeout=60, store="tcp") == [["timeout", "agreed"], ["agreed"]]


def run_killed(rank: int, ranks: int) -> Any:
    """Rank 0 serves the store, comes late, sees the difference at once and dies on it; rank 1, which looks only
    now and then, must still have read why."""
    if rank == 0:
        time.sleep(1.0)
        attempt((row(numel=1),))
        os._exit(0)
    first = attempt((row(numel=2),))
    time.sleep(1.0)
    return first, attempt((row(numel=3),), tag="t1", timeout=3.0)


@pytest.mark.distributed
def test_the_rank_that_serves_the_store_waits_for_its_readers_before_it_raises() -> None:
    outcome = launch(run_killed, 2, timeout=60, store="tcp", check=False)[1]
    assert outcome.ok, outcome.log
    first, after = outcome.value
    assert (first["status"], first["theirs"]) == ("raised", 1)
    assert after["status"] == "timeout" and "the store" in after["detail"], after
    assert after["seconds"] < 6


def run_trivial(rank: int, ranks: int) -> list[str]:
    alone = dist.new_group([rank], use_local_synchronization=True)
    return [
        attempt(ROWS, timeout=0.0)["status"],
        attempt((row(group=alone.group_name),))["status"],
        attempt(())["status"],
        agreement.agree(ROWS, kind="forward", cached=False, tag="d", timeout=5.0).status,
    ]


@pytest.mark.distributed
def test_off_alone_and_the_implicit_session() -> None:
    assert launch(run_trivial, 2, timeout=60) == [["off", "alone", "alone", "agreed"]] * 2
