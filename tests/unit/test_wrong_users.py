"""Mistakes in the order of fully_shard, install, torch.compile and the optimizer: each says what to do, or is harmless.

Twice, on a sub-module, after compile, before ``fully_shard``: test_install.py. Ranks that differ: test_capture.py.
"""

from __future__ import annotations

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import collective_identity as ci
import fsdp_hooks
import inductor_passes  # noqa: F401  (makes the backend known)
from tests.unit.sharded import Model, sharded

pytestmark = pytest.mark.usefixtures("fake_world")


def test_installed_before_fully_shard() -> None:
    with pytest.raises(fsdp_hooks.InstallError, match="call torch.distributed.fsdp.fully_shard on its blocks"):
        fsdp_hooks.install(Model())


def test_install_without_the_backend_trains_eagerly() -> None:
    """Gradients arrive as FSDP2's shards, without any compile."""
    model = fsdp_hooks.install(sharded())
    model(torch.ones(2, 8)).sum().backward()
    assert all(isinstance(parameter.grad, DTensor) for parameter in model.parameters())


def test_the_backend_without_install_says_so() -> None:
    with ci.enable():
        model = sharded()
        torch.compile(model, backend="collective_identity", options={"inner": "aot_eager"})(torch.ones(2, 8))
        report = ci.report().to_dict()
    assert any("fsdp_hooks.install(model) before torch.compile" in note for note in report["notes"]), report["notes"]


def test_an_optimizer_built_before_install_is_not_stale() -> None:
    model = sharded()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    fsdp_hooks.install(model)
    before = model.head.weight.to_local().clone()
    model(torch.ones(2, 8)).sum().backward()
    optimizer.step()
    assert not torch.equal(before, model.head.weight.to_local())


def test_fully_shard_after_install_needs_another_install() -> None:
    """FSDP2 applies itself to the new root; install names the part that was there before."""
    model = Model()
    mesh = init_device_mesh("cpu", (4,))
    fully_shard(model.blocks[1], mesh=mesh)
    fsdp_hooks.install(model.blocks[1])
    fully_shard(model, mesh=mesh)
    with pytest.raises(fsdp_hooks.InstallError, match="'blocks.1' is installed already: .*after the last fully_shard"):
        fsdp_hooks.install(model)
