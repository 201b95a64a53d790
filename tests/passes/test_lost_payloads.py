"""A payload that counts for nothing is said, in every mode: no collective whose word was refused looks unlabelled."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import fx

import collective_identity as ci
import inductor_passes  # noqa: F401  (makes the backend known)
from collective_identity import codes, store
from collective_identity.transports import WAIT, Transport, launch_of
from tests.graphs import annotate, payload

C = torch.ops._c10d_functional


def program(w: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    group = dist.group.WORLD.group_name  # type: ignore[union-attr]
    size = dist.get_world_size()
    w = w.relu()
    first = C.wait_tensor(C.all_gather_into_tensor(w + x, size, group))
    second = C.wait_tensor(C.all_gather_into_tensor(x * w, size, group))
    return first.sin().sum() + second.cos().sum()


def misfitting(gm: fx.GraphModule) -> None:
    for node in gm.graph.nodes:
        if node.target is WAIT:
            annotate(node, payload("fsdp.grad_reduce_shard"))


def between_two(gm: fx.GraphModule) -> None:
    """On a view of an input that both collectives send."""
    for node in list(gm.graph.nodes):
        launch = launch_of(node)
        if launch is not None and launch.transport is Transport.ALL_GATHER:
            (sent,) = launch.inputs
            shared = next(n for n in gm.graph.nodes if n.op == "placeholder")
            with gm.graph.inserting_before(node):
                view = gm.graph.call_function(torch.ops.aten.view.default, (shared, list(sent.meta["val"].shape)))
                view.meta["val"] = sent.meta["val"]
            node.args = (view, *node.args[1:])
    annotate(next(n for n in gm.graph.nodes if n.op == "placeholder"), payload("user.weights"))


@pytest.mark.parametrize("mode", ["optimize", "observe"])
@pytest.mark.parametrize(
    ("careless", "code", "events"), [(misfitting, codes.ROLE_TRANSPORT, 2), (between_two, codes.AMBIGUOUS_PAYLOAD, 1)]
)
def test_refused_payloads_are_in_the_report(
    fake_world: int, careless: Any, code: codes.Code, events: int, mode: Any, caplog: pytest.LogCaptureFixture
) -> None:
    torch._dynamo.reset()
    with ci.enable(mode=mode, agreement_timeout=0) as session:
        call = torch.compile(
            program,
            backend="collective_identity",
            fullgraph=True,
            options={"inner": "aot_eager", "pre_passes": [careless]},
        )
        call(torch.ones(4, 8), torch.ones(4, 8))
        report = session.report().to_dict()
    (found,) = [event for event in report["warnings"] if event["code"] == code.id]
    assert found["count"] == events
    assert sum(code.id in record.message for record in caplog.records) == events
    if careless is misfitting:
        assert report["counts"]["malformed"] == 2, "not counted among what never had any"


def test_what_was_moved_is_counted(fake_world: int) -> None:
    def on_the_waits(gm: fx.GraphModule) -> None:
        for node in gm.graph.nodes:
            if node.target is WAIT:
                annotate(node, payload("user.weights"))

    torch._dynamo.reset()
    with ci.enable(agreement_timeout=0) as session:
        options = {"inner": "aot_eager", "pre_passes": [on_the_waits]}
        torch.compile(program, backend="collective_identity", options=options)(torch.ones(4, 8), torch.ones(4, 8))
        (graph,) = session.report().to_dict()["graphs"]
    summary = next(p["summary"] for p in graph["passes"] if p["name"] == "normalize")
    assert summary == {"moved_payload": 2}
    assert store.KEY not in str(summary)
