"""A pass of the user's that loses identities: recorded on the graph under its name, and in the report."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import fx, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import collective_identity as ci
import fsdp_hooks
from collective_identity import PARAM_UNSHARD, absence_of, codes, identity_of
from inductor_passes.backend import collective_identity
from inductor_passes.manager import run_user_passes
from tests.graphs import Builder


def forgetful(gm: fx.GraphModule) -> None:
    """Replaces every gather by an equal one and forgets its metadata."""
    for node in ci.start_nodes(gm):
        if "all_gather" in str(node.target):
            with gm.graph.inserting_before(node):
                new = gm.graph.call_function(node.target, node.args, node.kwargs)
            new.meta["val"] = node.meta["val"]
            node.replace_all_uses_with(new)
            gm.graph.erase_node(node)


def careful(gm: fx.GraphModule) -> None:
    """Changes nothing."""


def test_on_the_graph() -> None:
    b = Builder()
    made = [b.all_gather(b.placeholder(f"w{i}"), role=PARAM_UNSHARD) for i in range(2)]
    b.output(*(one.wait for one in made))
    gm = b.module()
    run_user_passes(gm, [careful])
    assert all(identity_of(node) for node in ci.start_nodes(gm))
    run_user_passes(gm, [careful, forgetful, careful])
    absences = [absence_of(node) for node in ci.start_nodes(gm)]
    assert [a and (a.kind, a.code, a.pass_name) for a in absences] == [
        ("dropped", codes.DROPPED_UNKNOWN, "forgetful")
    ] * 2


def shares(gm: fx.GraphModule) -> None:
    """Gives the second collective all that the first has, by reference."""
    first, second = ci.start_nodes(gm)
    second.meta["custom"] = first.meta["custom"]


def swaps(gm: fx.GraphModule) -> None:
    """Gives each collective what the other has."""
    first, second = ci.start_nodes(gm)
    first.meta["custom"], second.meta["custom"] = second.meta["custom"], first.meta["custom"]


@pytest.mark.parametrize(("one", "left"), [(shares, 1), (swaps, 0)], ids=["shares", "swaps"])
@pytest.mark.parametrize("role", [PARAM_UNSHARD, "tp.weight_gather", None])
def test_the_identity_of_another_is_no_identity(one: Any, left: int, role: str | None) -> None:
    b = Builder()
    roles = (PARAM_UNSHARD, role)
    made = [b.all_gather(b.placeholder(f"w{i}"), role=r, params=(f"w{i}",)) for i, r in enumerate(roles)]
    b.output(*(c.wait for c in made))
    gm = b.module()
    if role is None:
        made[1].start.meta["custom"] = {}
    before = [identity_of(node) for node in ci.start_nodes(gm)]
    run_user_passes(gm, [one])
    after = [identity_of(node) for node in ci.start_nodes(gm)]
    assert after == [*before[:left], *[None] * (2 - left)]
    dropped = [absence_of(node) for node in ci.start_nodes(gm)]
    known = [a.code for a in dropped if a is not None and a.code is not None]
    assert known == [codes.DROPPED_UNKNOWN] * (2 - left)


@pytest.mark.usefixtures("fake_world")
def test_in_the_report() -> None:
    torch._dynamo.reset()
    model = nn.Sequential(nn.Linear(8, 8))
    fully_shard(model, mesh=init_device_mesh("cpu", (4,)))
    options: dict[str, Any] = {"inner": "aot_eager", "pre_passes": [forgetful], "bucketing": False}
    with ci.enable(agreement_timeout=0) as handle:
        fsdp_hooks.install(model)
        run = torch.compile(model, backend=collective_identity, fullgraph=True, options=options)
        run(torch.ones(3, 8, requires_grad=True)).sum().backward()
        report = handle.report().to_dict()
    (lost,) = [one for one in report["warnings"] if one["code"] == codes.DROPPED_UNKNOWN.id]
    assert {example["pass"] for example in lost["examples"]} == {"forgetful"}
    assert report["counts"]["dropped"] == lost["count"] >= 2
