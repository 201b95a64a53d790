"""What a collective costs: the fit finds what was planted, the cap is the size the costs ask for, JSON keeps both."""

from __future__ import annotations

import dataclasses
import json
import math
import types
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from inductor_passes import CommCosts, KindCosts, comm_timing, measure_comm_costs
from inductor_passes.comm_costs import fit_costs
from inductor_passes.options import KINDS, parse_options

SIZES = comm_timing.SIZES
positive = st.floats(1e-9, 1e9)
kind_costs = st.builds(KindCosts, latency_us=positive, bandwidth=st.floats(1.0, 1e14))
all_costs = st.builds(
    CommCosts, all_gather=kind_costs, reduce_scatter=kind_costs, all_reduce=kind_costs,
    group_size=st.integers(2, 10_000), device=st.sampled_from(["cpu", "cuda"]),
)
bandwidths = st.floats(1e8, 1e12)
knees = st.floats(2.0**18, 2.0**26)
"""Bytes that take as long as the latency: well within the sizes that are measured, so that both costs are seen."""
noises = st.lists(st.floats(-0.05, 0.05), min_size=len(SIZES), max_size=len(SIZES))


def costs(**kinds: KindCosts) -> CommCosts:
    other = KindCosts(1.0, 1.0)
    return CommCosts(**{**dict.fromkeys(KINDS, other), **kinds}, group_size=2, device="cpu")


def within(found: float, planted: float, factor: float) -> bool:
    return planted / factor <= found <= planted * factor


# ---- the fit ----


@given(bandwidths, knees)
def test_the_fit_finds_what_was_planted(bandwidth: float, knee: float) -> None:
    found = fit_costs([(n, (knee + n) / bandwidth) for n in SIZES])
    assert within(found.latency_us, 1e6 * knee / bandwidth, 1.0001) and within(found.bandwidth, bandwidth, 1.0001)


@given(bandwidths, knees, noises)
def test_the_fit_finds_it_under_noise(bandwidth: float, knee: float, noise: list[float]) -> None:
    found = fit_costs([(n, (1 + e) * (knee + n) / bandwidth) for n, e in zip(SIZES, noise, strict=True)])
    assert within(found.latency_us, 1e6 * knee / bandwidth, 1.3) and within(found.bandwidth, bandwidth, 1.3)


@given(bandwidths, knees, noises, st.integers(0, len(SIZES) - 1), st.floats(2, 1000))
def test_one_size_that_was_disturbed_hardly_moves_it(
    bandwidth: float, knee: float, noise: list[float], which: int, slower: float
) -> None:
    points = [(n, (1 + e) * (knee + n) / bandwidth) for n, e in zip(SIZES, noise, strict=True)]
    points[which] = (points[which][0], slower * points[which][1])
    found = fit_costs(points)
    assert within(found.latency_us, 1e6 * knee / bandwidth, 1.7) and within(found.bandwidth, bandwidth, 1.7)


@given(st.lists(st.tuples(st.integers(1, 2**40), positive), min_size=2, max_size=8, unique_by=lambda p: p[0]))
def test_both_costs_are_positive_and_finite_and_no_line_nearby_fits_better(
    points: list[tuple[int, float]],
) -> None:
    found = fit_costs(points)
    assert 0 < found.latency_us < math.inf and 0 < found.bandwidth < math.inf

    def misfit(latency_us: float, bandwidth: float) -> float:
        return sum(abs(seconds - 1e-6 * latency_us - nbytes / bandwidth) / seconds for nbytes, seconds in points)

    least = 0.01 * min(seconds for _, seconds in points)
    floor, ceiling = 1e6 * least, max(nbytes for nbytes, _ in points) / least
    best = misfit(found.latency_us, found.bandwidth)
    for a in (0.5, 0.99, 1.0, 1.01, 2.0):
        for b in (0.5, 0.99, 1.0, 1.01, 2.0):
            near = misfit(max(a * found.latency_us, floor), min(b * found.bandwidth, ceiling))
            assert best <= near * (1 + 1e-6) + 1e-9, (a, b)


@pytest.mark.parametrize("seconds", [[1e-3, 1e-3, 1e-3], [3e-3, 2e-3, 1e-3]], ids=["equal", "falling"])
def test_times_that_do_not_grow_give_a_bandwidth_that_is_only_high(seconds: list[float]) -> None:
    found = fit_costs(list(zip(SIZES[:3], seconds, strict=True)))
    assert SIZES[2] / 1e-3 < found.bandwidth < 1e3 * SIZES[2] / 1e-3
    assert within(found.latency_us, 1e3, 1.02)


def test_times_in_proportion_to_the_size_give_a_latency_that_is_only_low() -> None:
    found = fit_costs([(n, n / 1e9) for n in SIZES])
    assert within(found.bandwidth, 1e9, 1.02) and 0 < found.latency_us <= 0.011 * 1e6 * SIZES[0] / 1e9


@pytest.mark.parametrize(
    ("points", "said"),
    [
        ([], "at two different sizes or more, found []"),
        ([(8, 1.0), (8, 2.0)], "at two different sizes or more"),
        ([(8, 1.0), (0, 2.0)], "found 0 bytes in 2.0 s"),
        ([(8, 1.0), (9, 0.0)], "found 9 bytes in 0.0 s"),
        ([(8, 1.0), (9, math.nan)], "found 9 bytes in nan s"),
        ([(8, math.inf), (9, 1.0)], "found 8 bytes in inf s"),
    ],
    ids=["none", "one size", "no bytes", "no time", "nan", "inf"],
)
def test_no_fit_of_what_is_no_measurement(points: list[tuple[int, float]], said: str) -> None:
    with pytest.raises(ValueError) as caught:
        fit_costs(points)
    assert said in str(caught.value)


def test_of_each_repeat_the_slowest_rank_counts_and_of_the_repeats_the_quickest() -> None:
    one = {kind: [[1.0, 5.0, 3.0], [7.0, 7.0, 7.0]] for kind in KINDS}
    two = {**one, "all_gather": [[4.0, 1.0, 2.0], [1.0, 9.0, 8.0]]}
    expected = {"all_gather": [3.0, 7.0], "reduce_scatter": [1.0, 7.0], "all_reduce": [1.0, 7.0]}
    assert comm_timing.shortest([one, two]) == comm_timing.shortest([two, one]) == expected


def test_an_accelerator_is_asked_for_its_own_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """The device is idle before the first event, and the second is waited for before it is read."""
    done: list[str] = []

    class Event:
        def __init__(self, enable_timing: bool) -> None:
            assert enable_timing

        def record(self) -> None:
            done.append("record")

        def synchronize(self) -> None:
            done.append("wait")

        def elapsed_time(self, other: Event) -> float:
            done.append("read")
            return 250.0

    module = types.SimpleNamespace(Event=Event, synchronize=lambda device: done.append(f"idle {device}"))
    monkeypatch.setattr(torch, "get_device_module", lambda device: module)
    calls = [lambda: done.append("a"), lambda: done.append("b")]
    found = comm_timing._seconds(calls, lambda: done.append("meet"), torch.device("cuda", 1), 2)
    timed = [["meet", "idle cuda:1", "record", name, "record", "wait", "read"] for name in "abab"]
    assert found == [[0.25, 0.25], [0.25, 0.25]]
    assert done == ["a", "b"] * comm_timing.WARM_UP + sum(timed, [])


# ---- the cap ----


def test_the_cap_is_the_size_at_which_the_share_is_reached_rounded_up() -> None:
    nvlink = costs(all_gather=KindCosts(30.0, 300e9))  # 9 MB pass within the latency
    assert [nvlink.cap_mb(e) for e in (0.5, 0.8, 0.9, 0.95)] == [16.0, 64.0, 128.0, 256.0]
    assert nvlink.cap_mb() == 128.0


@given(all_costs, st.floats(0.01, 0.99))
def test_a_bucket_of_the_cap_reaches_the_share_and_one_of_half_does_not(costs: CommCosts, efficiency: float) -> None:
    kinds = ("all_gather", "reduce_scatter")
    nbytes = costs.cap_mb(efficiency) * 2**20
    shares = [nbytes / costs.of(kind).bandwidth / costs.seconds(kind, nbytes) for kind in kinds]
    assert min(shares) >= efficiency * (1 - 1e-9)
    half = min(nbytes / 2 / costs.of(kind).bandwidth / costs.seconds(kind, nbytes / 2) for kind in kinds)
    assert half <= efficiency * (1 + 1e-9) or nbytes == 1
    assert costs.cap_mb(efficiency) == 2.0 ** round(math.log2(costs.cap_mb(efficiency))), "a power of two"


@given(all_costs, st.floats(0.01, 0.99))
def test_the_backend_takes_the_cap_as_it_is(costs: CommCosts, efficiency: float) -> None:
    cap = costs.cap_mb(efficiency)
    given = parse_options({"order": "graph", "cap_mb": cap}, None)
    assert given.cap_mb == cap and json.loads(given.fingerprint())["cap_mb"] == cap


def test_only_the_kinds_that_are_bucketed_count() -> None:
    mixed = costs(all_gather=KindCosts(1.0, 2**20 * 1e6), all_reduce=KindCosts(8.0, 2**20 * 1e6))
    assert mixed.cap_mb(0.5) == mixed.cap_mb(0.5, kinds=["all_gather"]) == 1.0
    assert mixed.cap_mb(0.5, kinds=("all_reduce",)) == mixed.cap_mb(0.5, kinds=KINDS) == 8.0


def test_kept_costs_of_a_group_of_another_size_are_refused() -> None:
    pair, everyone = (cast(dist.ProcessGroup, types.SimpleNamespace(size=lambda size=size: size)) for size in (2, 4))
    kept = costs(all_gather=KindCosts(30.0, 4e11))
    assert kept.cap_mb(group=pair) == kept.cap_mb()
    with pytest.raises(ValueError, match=r"expected costs of a group of 4 ranks, .* found those of 2: call measure"):
        kept.cap_mb(group=everyone)


def test_some_per_cent_do_not_change_the_cap() -> None:
    caps = {costs(all_gather=KindCosts(30.0 * (1 + i / 100), 300e9)).cap_mb() for i in range(-10, 11)}
    assert caps == {128.0}


def test_seconds() -> None:
    one = costs(all_reduce=KindCosts(50.0, 1e9))
    assert one.seconds("all_reduce", 0) == pytest.approx(50e-6)
    assert one.seconds("all_reduce", 10**6) == pytest.approx(1050e-6)


WRONG: list[tuple[Any, str]] = [
    (lambda c: c.cap_mb(0), "expected an efficiency between 0 and 1, both excluded, found 0"),
    (lambda c: c.cap_mb(1), "found 1"),
    (lambda c: c.cap_mb(1.5), "found 1.5"),
    (lambda c: c.cap_mb(-0.1), "found -0.1"),
    (lambda c: c.cap_mb(math.nan), "found nan"),
    (lambda c: c.cap_mb(True), "found True"),
    (lambda c: c.cap_mb("0.9"), "found '0.9'"),
    (lambda c: c.cap_mb(kinds=("broadcast",)), "expected a kind out of all_gather, reduce_scatter, all_reduce, found"),
    (lambda c: c.cap_mb(kinds=()), "expected kinds to be a tuple or list out of"),
    (lambda c: c.cap_mb(kinds="all_gather"), "expected kinds to be a tuple or list out of"),
    (lambda c: c.seconds("group_size", 1), "found 'group_size'"),
    (lambda c: c.seconds("all_gather", -1), "expected a size in bytes, 0 or more, found -1"),
    (lambda c: c.seconds("all_gather", math.inf), "found inf"),
    (lambda c: KindCosts(0.0, 1.0), "expected latency_us to be a positive number, found 0.0"),
    (lambda c: KindCosts(1.0, math.inf), "expected bandwidth to be a positive number, found inf"),
    (lambda c: KindCosts(1.0, True), "found True"),
    (lambda c: dataclasses.replace(c, group_size=1), "expected group_size to be two ranks or more, found 1"),
    (lambda c: dataclasses.replace(c, device=""), "expected device to be a device type"),
    (lambda c: dataclasses.replace(c, all_gather=1.0), "expected all_gather to be KindCosts, found 1.0"),
]


@pytest.mark.parametrize("number", range(len(WRONG)))
def test_what_is_refused(number: int) -> None:
    call, said = WRONG[number]
    with pytest.raises(ValueError) as caught:
        call(costs())
    assert said in str(caught.value)


# ---- JSON ----


@given(all_costs)
def test_json_keeps_every_bit(costs: CommCosts) -> None:
    again = CommCosts.from_json(costs.to_json())
    assert again == costs and hash(again) == hash(costs) and "\n" not in costs.to_json()


def changed(**fields: Any) -> str:
    kept = {**json.loads(costs().to_json()), **fields}
    return json.dumps({key: value for key, value in kept.items() if value is not None})


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "found ''"),
        ("[1]", "expected an object with all_gather, reduce_scatter, all_reduce, group_size, device, found"),
        ("3", "expected an object with all_gather"),
        (changed(all_reduce=None), "expected an object with all_gather"),
        (changed(more=1), "'more': 1"),
        (changed(all_gather={"latency_us": 1.0}), "expected an object with latency_us, bandwidth, found"),
        (changed(all_gather={"latency_us": -1.0, "bandwidth": 1.0}), "expected latency_us to be a positive number"),
        (changed(all_gather={"latency_us": 1.0, "bandwidth": float("inf")}), "expected bandwidth to be a positive"),
        (changed(group_size="2"), "expected group_size to be two ranks or more, found '2'"),
    ],
    ids=["empty", "list", "number", "no kind", "unknown", "no bandwidth", "negative", "infinite", "text"],
)
def test_json_of_something_else_is_refused_by_name(text: str, said: str) -> None:
    with pytest.raises(ValueError, match=r"expected the text of CommCosts\.to_json") as caught:
        CommCosts.from_json(text)
    assert said in str(caught.value)


def test_without_a_process_group_nothing_is_measured() -> None:
    with pytest.raises(RuntimeError, match=r"expects a process group, found none: call torch\.distributed\.init"):
        measure_comm_costs()
