"""Is each planted fault found, named by its code and its place, and does `check` then fail on it?"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import fx, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from typer.testing import CliRunner

import collective_identity as ci
import fsdp_hooks
from collective_identity import GRAD_REDUCE_SHARD, PARAM_UNSHARD, cli
from collective_identity.transports import WAIT, Transport, default_overload
from inductor_passes.backend import collective_identity

OTHER_RANKS = "left no readable file"  # of a pretended world only rank 0 exists
GATHER = default_overload(Transport.ALL_GATHER)

pytestmark = pytest.mark.usefixtures("fake_world")


def world() -> str:
    return dist.group.WORLD.group_name  # type: ignore[union-attr, no-any-return]


def gather(w: torch.Tensor) -> torch.Tensor:
    return GATHER(w, 4, world())  # type: ignore[no-any-return]


def role_against_transport(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    with ci.role_scope(GRAD_REDUCE_SHARD, producer="one", group=world(), params=["a.w"]):
        return WAIT(gather(w)) + x


def two_producers(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    started = gather(w)
    with ci.role_scope(PARAM_UNSHARD, producer="one", group=world(), params=["a.w"]):
        full = WAIT(started)
    with ci.role_scope("tp.gather", producer="two", group=world()):
        part = full[:4]
    return part.sum() + x


def two_gathers(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    with ci.role_scope(PARAM_UNSHARD, producer="one", group=world(), params=["a.w"]):
        first = WAIT(gather(w))
    with ci.role_scope("tp.gather", producer="two", group=world()):
        second = WAIT(gather(w * 2))
    return first + second + x


def drops(gm: fx.GraphModule) -> None:
    """Forgets the metadata of every collective."""
    for node in ci.start_nodes(gm):
        node.meta.pop("custom", None)


def copies_the_first(gm: fx.GraphModule) -> None:
    """Merges two gathers and gives the new one all that the first had, as torch's own bucketing does."""
    first, second = ci.start_nodes(gm)
    ((wait_a,), (wait_b,)) = first.users, second.users
    with gm.graph.inserting_before(second):
        both = gm.graph.call_function(torch.ops.aten.cat.default, ([first.args[0], second.args[0]],))
        new = gm.graph.call_function(first.target, (both, *first.args[1:]))  # type: ignore[arg-type]
        wait = gm.graph.call_function(WAIT, (new,))
        parts = gm.graph.call_function(torch.ops.aten.split.Tensor, (wait, 8))
        pieces = [gm.graph.call_function(torch.ops.aten.slice.Tensor, (wait, 0, 0, 8)) for _ in range(2)]
    gm.graph.erase_node(parts)
    new.meta = first.meta
    for old, piece in zip((wait_a, wait_b), pieces, strict=True):
        old.replace_all_uses_with(piece)
        gm.graph.erase_node(old)
    for old in (first, second):
        gm.graph.erase_node(old)
    from torch._inductor.pattern_matcher import stable_topological_sort

    stable_topological_sort(gm.graph)


def shares_the_first(gm: fx.GraphModule) -> None:
    """Leaves both collectives and gives the second the dict of the first."""
    first, second = ci.start_nodes(gm)
    second.meta["custom"] = first.meta["custom"]


def raises(gm: fx.GraphModule) -> None:
    raise RuntimeError("planted")


PLANTS: dict[str, tuple[Callable[..., torch.Tensor], list[Any], str, str, str]] = {
    "role against transport": (role_against_transport, [], "malformed", "CI006", "all_gather"),
    "two producers": (two_producers, [], "conflict", "CI013", "all_gather"),
    "a pass that drops": (two_gathers, [drops], "lost", "CI033", "all_gather"),
    "a pass that copies the first": (two_gathers, [copies_the_first], "lost", "CI033", "all_gather_into_tensor_1"),
    "a pass that shares the first": (two_gathers, [shares_the_first], "lost", "CI033", "all_gather_into_tensor_1"),
}


@pytest.mark.parametrize("name", PLANTS)
def test_found_by_code(name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    function, passes, kind, code, node = PLANTS[name]
    torch._dynamo.reset()
    options = {"inner": "aot_eager", "pre_passes": passes, "bucketing": False}
    with ci.enable(run_dir=tmp_path, agreement_timeout=0), caplog.at_level(logging.WARNING, "collective_identity"):
        torch.compile(function, backend=collective_identity, options=options)(torch.ones(8, 2), torch.ones(2, 2))
    warned = [r.getMessage() for r in caplog.records if r.name == "collective_identity.ledger"]
    said = [text for text in warned if text.startswith(code)]
    assert said and all(node in text and "test_planted_faults.py:" in text for text in said[:1]), warned
    found = CliRunner().invoke(cli.app, ["check", str(tmp_path), "--fail-on", kind, "--json"])
    reasons = [text for text in json.loads(found.output)["reasons"] if OTHER_RANKS not in text]
    assert found.exit_code == 1 and any(code in reason and node in reason for reason in reasons), reasons
    others = ",".join({"lost", "conflict", "malformed"} - {kind})
    again = CliRunner().invoke(cli.app, ["check", str(tmp_path), "--fail-on", others, "--json"])
    assert all(OTHER_RANKS in text for text in json.loads(again.output)["reasons"]), again.output


def test_a_pre_pass_that_raises_is_in_the_run(tmp_path: Path) -> None:
    torch._dynamo.reset()
    options = {"inner": "aot_eager", "pre_passes": [raises]}
    with ci.enable(run_dir=tmp_path, agreement_timeout=0), pytest.raises(Exception, match="planted"):
        torch.compile(two_gathers, backend=collective_identity, options=options)(torch.ones(8, 2), torch.ones(2, 2))
    found = CliRunner().invoke(cli.app, ["check", str(tmp_path), "--json"])
    reasons = [text for text in json.loads(found.output)["reasons"] if OTHER_RANKS not in text]
    assert found.exit_code == 1 and any("planted" in text and "'raises'" in text for text in reasons), reasons


def test_two_gathers_that_nobody_touches_are_healthy(tmp_path: Path) -> None:
    torch._dynamo.reset()
    with ci.enable(run_dir=tmp_path, agreement_timeout=0):
        options = {"inner": "aot_eager"}
        torch.compile(two_gathers, backend=collective_identity, options=options)(torch.ones(8, 2), torch.ones(2, 2))
    found = CliRunner().invoke(cli.app, ["check", str(tmp_path), "--json"])
    assert all(OTHER_RANKS in text for text in json.loads(found.output)["reasons"]), found.output


def test_a_module_that_was_not_compiled_is_named(tmp_path: Path) -> None:
    torch._dynamo.reset()
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    mesh = init_device_mesh("cpu", (4,))
    for part in (*model, model):
        fully_shard(part, mesh=mesh)
    with ci.enable(run_dir=tmp_path, agreement_timeout=0):
        fsdp_hooks.install(model)
        model[0].compile(backend=collective_identity, options={"inner": "aot_eager"})
        model(torch.ones(3, 8)).sum().backward()
    found = CliRunner().invoke(cli.app, ["check", str(tmp_path), "--fail-on", "not_captured", "--json"])
    reasons = json.loads(found.output)["reasons"]
    assert found.exit_code == 1
    named = [text for text in reasons if "CI052" in text and "1: 2 expected, 0 captured" in text]
    assert named and not any("0: 2 expected" in text for text in named), reasons
    assert any(text.startswith("not_captured: fsdp.param_unshard, forward: 2 of 4") for text in reasons), reasons


class Doubled(nn.Linear):
    """Of this file: after a graph break Dynamo goes into no forward of torch.nn."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * 2


def test_eager_fsdp2_around_a_compiled_block_is_named_and_a_model_at_rest_is_not(tmp_path: Path) -> None:
    torch._dynamo.reset()
    model, resting = (nn.Sequential(Doubled(8, 8), Doubled(8, 8)) for _ in range(2))
    mesh = init_device_mesh("cpu", (4,))
    for part in (*model, model, *resting, resting):
        fully_shard(part, mesh=mesh)
    with torch.no_grad():
        resting(torch.ones(3, 8))
    options = {"inner": "aot_eager"}
    with ci.enable(run_dir=tmp_path, agreement_timeout=0):
        model[0].compile(backend=collective_identity, options=options)
        model(torch.ones(3, 8)).sum().backward()
    found = CliRunner().invoke(cli.app, ["check", str(tmp_path), "--fail-on", "not_captured", "--json"])
    (said,) = [text for text in json.loads(found.output)["reasons"] if "CI040" in text]
    assert said == (
        "not_captured: CI040 not_captured: eager FSDP2 modules 0, 1: their collectives run in FSDP2's hooks"
    )
    torch._dynamo.reset()
    with ci.enable(run_dir=tmp_path / "loss", agreement_timeout=0):
        torch.compile(lambda x: x * 2, backend=collective_identity, options=options)(torch.ones(2))
    assert "CI040" not in (tmp_path / "loss" / "rank0.jsonl").read_text()
