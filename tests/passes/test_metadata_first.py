"""Torch's own classifiers, asked inside `metadata_first`: identity decides, shape where nobody said."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
from torch import fx
from torch._inductor.fx_passes import bucketing, fsdp

from collective_identity import PARAM_UNSHARD, compat
from inductor_passes import metadata_first as module
from inductor_passes.metadata_first import ForeignWrapper, metadata_first
from inductor_passes.upstream import UnsupportedTorch
from tests.graphs import Builder, aten


def graph() -> tuple[fx.Node, fx.Node, fx.Node]:
    """Waits of a gather that says FSDP after computation, of one that says context-parallel, of a silent one."""
    b = Builder()
    deep = b.call(aten.mul.Tensor, b.placeholder("a"), b.placeholder("b"))
    waits = (
        b.all_gather(deep, role=PARAM_UNSHARD).wait,
        b.all_gather(b.placeholder("k"), role="cp.kv_gather", group="cp").wait,
        b.all_gather(b.placeholder("p"), group="other").wait,
    )
    b.output(*waits)
    b.module()
    return waits


def verdicts(waits: tuple[fx.Node, ...]) -> list[bool]:
    return [bool(fsdp.is_fsdp_all_gather_wait(wait)) for wait in waits]


def test_identity_decides_and_undo_is_clean() -> None:
    waits = graph()
    before = vars(fsdp).copy(), vars(bucketing).copy()
    assert verdicts(waits) == [False, True, True]
    with metadata_first(), metadata_first():
        assert verdicts(waits) == [True, False, True]
    assert verdicts(waits) == [False, True, True]
    with pytest.raises(ZeroDivisionError), metadata_first():
        raise ZeroDivisionError
    assert (vars(fsdp), vars(bucketing)) == before


def test_groups() -> None:
    if not hasattr(fsdp, "identify_fsdp_groups"):
        assert compat.torch_version() < (2, 13)
        return
    gm = graph()[0].graph.owning_module
    assert set(fsdp.identify_fsdp_groups(gm)[0]) == {"cp", "other"}
    with metadata_first():
        assert set(fsdp.identify_fsdp_groups(gm)[0]) == {"dp", "other"}


def test_several_threads_the_last_to_leave_puts_back() -> None:
    waits = graph()
    original = fsdp.is_fsdp_all_gather_wait
    entered, first_left = threading.Barrier(2, timeout=30), threading.Event()
    seen: dict[str, list[bool]] = {}

    def first() -> None:
        with metadata_first():
            entered.wait()
            seen["first"] = verdicts(waits)
        first_left.set()

    def last() -> None:
        with metadata_first():
            entered.wait()
            assert first_left.wait(30)
            seen["last"] = verdicts(waits)  # somebody else's leaving took nothing away

    with ThreadPoolExecutor(2) as pool:
        for job in [pool.submit(first), pool.submit(last)]:
            job.result(timeout=60)
    assert seen == {"first": [True, False, True], "last": [True, False, True]}
    assert fsdp.is_fsdp_all_gather_wait is original and verdicts(waits) == [False, True, True]


def test_many_threads_in_and_out() -> None:
    """Whoever is inside sees identities decide; when all have left, torch's own functions are back."""
    waits = graph()
    before = vars(fsdp).copy(), vars(bucketing).copy()

    def often(_: int) -> bool:
        ok = True
        for _ in range(200):
            with metadata_first():
                ok &= verdicts(waits) == [True, False, True]
        return ok

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(often, range(8)))
    assert (vars(fsdp), vars(bucketing)) == before


def test_a_foreign_wrapper_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def foreign(wait: fx.Node) -> bool:
        return True

    monkeypatch.setattr(fsdp, "is_fsdp_reduce_scatter_wait", foreign)
    before = fsdp.is_fsdp_all_gather_wait
    with pytest.raises(ForeignWrapper, match="test_metadata_first"), metadata_first():
        pass
    assert fsdp.is_fsdp_all_gather_wait is before


def test_an_unknown_signature_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def changed(wait: fx.Node, strict: bool) -> bool:
        return strict

    changed.__module__ = fsdp.__name__
    monkeypatch.setattr(fsdp, "is_fsdp_all_gather_wait", changed)
    with pytest.raises(UnsupportedTorch, match=r"wait\), found \(wait, strict\)"), metadata_first():
        pass


def test_a_missing_name_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(fsdp, "is_fsdp_all_gather_wait")
    with pytest.raises(UnsupportedTorch, match="not found in torch"), metadata_first():
        pass


def test_theirs_stays_when_left_out_of_order() -> None:
    def theirs(wait: fx.Node) -> bool:
        return False

    original: Callable[..., bool] = fsdp.is_fsdp_all_gather_wait
    try:
        with pytest.raises(RuntimeError, match="reverse order"), metadata_first():
            fsdp.is_fsdp_all_gather_wait = theirs
        assert fsdp.is_fsdp_all_gather_wait is theirs
    finally:
        fsdp.is_fsdp_all_gather_wait = original
    assert module._SWITCH._bindings == ()
