"""Is a graph entered and left where it runs, forward and backward, and is a rank said to stand only when it does?"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from collective_identity import compat
from collective_identity import service as service_module
from collective_identity.board import BoardState
from collective_identity.service import Service, _Beats
from collective_identity.standing import Place, Standing


@pytest.fixture
def counts(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """One process group, "a", whose sequence number the test moves."""
    counted = {"a": 0}
    monkeypatch.setattr(compat, "issued", lambda name, devices: counted.get(name))
    monkeypatch.setattr(compat, "group_names", lambda: list(counted))
    monkeypatch.setattr(compat, "group_ranks", lambda name: (0, 1))
    return counted


def test_forward_and_backward_calls_are_told_apart(counts: dict[str, int]) -> None:
    standing = Standing()
    x = torch.ones(3, requires_grad=True)
    compiled = torch.compile(lambda t: (t.sin().view(-1), t.cos()), backend="aot_eager")
    compiled(x)

    def issuing(*args: Any) -> Any:
        counts["a"] += 2
        assert standing.look()["calls"][-1]["out"] is None
        return compiled(*args)

    backward = Place(1, ("a",))
    out = standing.call(issuing, (x,), Place(0, ("a",)), lambda: backward)
    counts["a"] += 1  # an eager collective
    inside: list[Any] = []
    x.register_hook(lambda grad: inside.append(standing.look()["calls"][-1]))
    torch.autograd.backward([one.sum() for one in out])
    first, second = standing.look()["calls"]
    assert first == {"graph": 0, "call": 0, "at": {"a": 0}, "out": {"a": 2}}
    assert second == {"graph": 1, "call": 0, "at": {"a": 3}, "out": {"a": 3}}
    assert inside and inside[0]["graph"] == 1
    assert standing.look()["groups"] == {"a": [3, "0,1"]}
    with torch.no_grad():
        standing.call(compiled, (x,), Place(0, ("a",)), lambda: backward)
    assert [call["call"] for call in standing.look()["calls"]] == [0, 0, 1]


def test_a_call_that_raises_is_left(counts: dict[str, int]) -> None:
    standing = Standing()

    def fails(*_: Any) -> Any:
        raise ValueError("no")

    with pytest.raises(ValueError):
        standing.call(fails, (), Place(0, ("a",)), lambda: None)
    assert standing.look()["calls"][-1]["out"] == {"a": 0}


def test_a_rank_says_that_it_stands_once_and_where(counts: dict[str, int], monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [0.0]
    monkeypatch.setattr(service_module.time, "monotonic", lambda: clock[0])
    monkeypatch.setattr(compat, "recent_operations", lambda: {"a": []})
    standing = Standing()
    beats = _Beats(standing, every=5.0)
    said: list[tuple[float, float, bool, bool]] = []
    for second in range(20):
        clock[0] = float(second)
        if second < 6 or second == 14:
            counts["a"] += 1
        record, operations = beats.next(ended=second == 19)
        if record is not None:
            said.append((clock[0], record["still"], bool(record["frames"]), operations is not None))
            assert record["ended"] == (second == 19)
    # The start, five seconds later, standing, still standing, moving again, standing again, the end.
    assert said == [
        (0.0, 0.0, False, False),
        (5.0, 0.0, False, False),
        (7.0, 2.0, True, True),
        (12.0, 7.0, True, False),
        (14.0, 0.0, False, False),
        (16.0, 2.0, True, True),
        (19.0, 5.0, True, False),
    ]


def test_a_rank_in_torch_compile_says_so_until_it_is_through(
    counts: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = [0.0]
    monkeypatch.setattr(service_module.time, "monotonic", lambda: clock[0])
    beats = _Beats(Standing(), every=2.0)
    said: list[list[str]] = []

    def look(second: float) -> None:
        clock[0] = second
        record, _ = beats.next(ended=False)
        said.append(record["doing"] if record is not None else ["nothing new"])

    def backend(gm: torch.fx.GraphModule, _: Any) -> Any:
        look(0.0)
        look(3.0)
        return gm

    torch.compile(lambda t: t + 1, backend=backend)(torch.ones(2))
    look(5.0)
    assert said == [[], ["compiles, in torch.compile"], []]


def test_the_lines_that_tell_where_are_the_users_own() -> None:
    frames = Standing().frames()
    assert "test_standing.py" in frames[0] and "Standing().frames()" in frames[0] and len(frames) > 1, frames


def test_without_other_ranks_no_thread_is_started() -> None:
    service = Service(BoardState())
    assert not service.start()
    service.close()
    service.close()
