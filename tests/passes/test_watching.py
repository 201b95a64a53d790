"""Does a compiled step say which call of which graph it is in, by collectives really issued? One gloo rank."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol

import collective_identity as ci
from collective_identity import compat, service, sharing
from collective_identity.watch import Watcher
from inductor_passes.backend import collective_identity


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> Iterator[dist.Store]:
    """A gloo world of one, which counts as one of several."""
    monkeypatch.setattr(service, "no_real_group", lambda: None)
    monkeypatch.setattr(sharing, "no_real_group", lambda: None)
    root = dist.HashStore()
    dist.init_process_group("gloo", store=root, rank=0, world_size=1)
    try:
        yield root
    finally:
        dist.destroy_process_group()


class Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return funcol.all_reduce(x * 2, "sum", dist.group.WORLD)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        first = funcol.all_reduce(grad, "sum", dist.group.WORLD)
        return funcol.all_reduce(first * 2, "sum", dist.group.WORLD)


def test_calls_are_counted_forward_and_backward(store: dist.Store) -> None:
    torch._dynamo.reset()
    seen: list[dict[str, Any]] = []
    with ci.enable(agreement_timeout=0) as handle:
        keeper = handle.session.ledger.service
        assert keeper is not None
        step = torch.compile(
            lambda x: Sum.apply(x).sin(), backend=collective_identity, fullgraph=True, options={"inner": "aot_eager"}
        )
        for _ in range(2):
            x = torch.ones(4, requires_grad=True)
            loss = step(x).sum()
            dist.barrier()
            seen.append(keeper.standing.look())
            loss.backward()
            seen.append(keeper.standing.look())
        watcher = Watcher(store)
        deadline = time.monotonic() + 10
        found = None
        while time.monotonic() < deadline:
            found = watcher.look(1.0)
            if found is not None and found[0] and len(found[0][0].graphs) == 2:
                break
            time.sleep(0.05)
        assert found is not None
        tables = {number: (graph.kind, len(graph.rows)) for number, graph in found[0][0].graphs.items()}
    kinds = {kind: number for number, (kind, _) in tables.items()}
    assert sorted(tables.values()) == [("backward", 2), ("forward", 1)]
    forward, backward = kinds["forward"], kinds["backward"]
    calls = [(c["graph"], c["call"], c["at"]["0"], c["out"]["0"]) for c in seen[-1]["calls"]]
    # Four collectives a step: the forward's, a barrier outside every graph, the backward's two.
    assert calls == [(forward, 0, 0, 1), (backward, 0, 2, 4), (forward, 1, 4, 5), (backward, 1, 6, 8)]
    assert [len(look["calls"]) for look in seen] == [1, 2, 3, 4]
    assert seen[-1]["groups"] == {"0": [8, "0"]} and seen[-1]["doing"] == []


def test_torch_records_which_operations_have_ended(store: dist.Store) -> None:
    dist.all_reduce(torch.ones(3))
    dist.barrier()
    until = time.monotonic() + 10  # gloo's thread records an end a little after its caller goes on
    while not (operations := compat.recent_operations()["0"])[-1][2] and time.monotonic() < until:
        time.sleep(0.01)
    assert [(number, ended) for number, _, ended in operations[-2:]] == [(1, True), (2, True)]
    assert operations[-2][1] == "all_reduce [[3]]"
