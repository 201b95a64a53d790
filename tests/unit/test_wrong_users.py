"""Mistakes in the order of fully_shard, install, torch.compile and the optimizer: each says what to do, or is harmless.

Twice, on a sub-module, after compile, before ``fully_shard``: test_install.py. Ranks that install different models:
tests/distributed/test_wrong_ranks.py.
"""

from __future__ import annotations

import io
import warnings

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import collective_identity as ci
import fsdp_hooks
import inductor_passes  # noqa: F401  (makes the backend known)
from tests.unit.sharded import Model, sharded

pytestmark = pytest.mark.usefixtures("fake_world")


@pytest.mark.parametrize("backend", [None, "aot_eager"])
def test_the_report_of_a_step_without_the_backend_names_it(backend: str | None) -> None:
    with ci.enable():
        model = fsdp_hooks.install(sharded())
        run = model if backend is None else torch.compile(model, backend=backend)
        run(torch.ones(2, 8)).sum().backward()
        failures = ci.report().to_dict()["failures"]
    assert "torch.compile the whole model with backend='collective_identity'" in failures[0]


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
    model.head.weight.grad.to_local().fill_(1.0)  # a fake world's collectives leave what was there
    optimizer.step()
    assert not torch.equal(before, model.head.weight.to_local())


@pytest.mark.parametrize("captured", ["install", "data_parallel"])
def test_an_optimizer_built_before_the_parameters_were_replaced_is_named(captured: str) -> None:
    """Its steps change nothing, and nobody else would say so."""
    model = Model()
    stale = torch.optim.AdamW(model.parameters(), lr=0.1)
    mesh = init_device_mesh("cpu", (4,))
    with pytest.warns(UserWarning, match="AdamW holds parameters that .*Model had before .* sharded.* build the op"):
        if captured == "install":
            fully_shard(model, mesh=mesh)
            fsdp_hooks.install(model)
        else:
            fsdp_hooks.data_parallel(model, mesh)
    before = [parameter.to_local().clone() for parameter in model.parameters()]
    model(torch.ones(2, 8)).sum().backward()
    stale.step()
    after = [parameter.to_local() for parameter in model.parameters()]
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True)), "as the warning says"


def test_an_optimizer_built_between_two_calls_of_fully_shard_is_named() -> None:
    """It holds some of the model's parameters, and for the others what they were before."""
    model = Model()
    mesh = init_device_mesh("cpu", (4,))
    fully_shard(model.blocks[0], mesh=mesh)
    between = torch.optim.SGD(model.parameters(), lr=0.1)
    fully_shard(model, mesh=mesh)
    later = torch.optim.SGD([*model.head.parameters(), nn.Parameter(torch.ones(3))], lr=0.1)
    with pytest.warns(UserWarning, match="SGD holds parameters that .*Model had before") as warned:
        fsdp_hooks.install(model)
    assert len(warned) == 1 and warned[0].filename == __file__ and len(between.param_groups + later.param_groups) == 2


def test_a_part_of_a_sharded_model_alone_is_refused_and_the_model_goes_on() -> None:
    """Installed, it would be a root for good, and the whole model's forward would end in FSDP2's error."""
    model = sharded()
    said = "expects the outermost fully_shard module, found 'blocks.0' of FSDPModel, .*call fsdp_hooks.install on that"
    with pytest.raises(fsdp_hooks.InstallError, match=said):
        fsdp_hooks.install(model.blocks[0])
    fsdp_hooks.install(model)
    model(torch.ones(2, 8)).sum().backward()
    del model
    part = sharded().blocks[0]
    fsdp_hooks.install(part)(torch.ones(2, 8)).sum().backward()  # nobody holds the model any more


def test_an_optimizer_of_another_model_is_not_stale() -> None:
    """One of the same shapes that is alive, and one whose model has other shapes and is gone."""
    other = Model()
    optimizers = [torch.optim.SGD(other.parameters(), lr=0.1), torch.optim.SGD(nn.Linear(3, 3).parameters(), lr=0.1)]
    model = sharded()
    optimizers.append(torch.optim.SGD(model.parameters(), lr=0.1))
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        fsdp_hooks.install(model)
    assert len(optimizers) == 3


def test_fully_shard_inside_an_installed_model_is_refused_and_the_model_goes_on() -> None:
    """FSDP2 shards inside out; what is sharded already it refuses itself."""
    model = Model()
    mesh = init_device_mesh("cpu", (4,))
    fully_shard(model, mesh=mesh)
    fsdp_hooks.install(model)
    for inner in (model.blocks[1], model):
        with pytest.raises((TypeError, AssertionError)):
            fully_shard(inner, mesh=mesh)
    model(torch.ones(2, 8)).sum().backward()
    assert all(isinstance(parameter.grad, DTensor) for parameter in model.parameters())


def test_fully_shard_above_an_installed_model_cannot_run() -> None:
    model = Model()
    mesh = init_device_mesh("cpu", (4,))
    fully_shard(model.blocks[1], mesh=mesh)
    fsdp_hooks.install(model.blocks[1])
    fully_shard(model, mesh=mesh)
    with pytest.raises(RuntimeError, match="already been lazily initialized for blocks.1"):
        model(torch.ones(2, 8))


def test_fully_shard_after_install_needs_another_install() -> None:
    """FSDP2 applies itself to the new root; install names the part that was there before."""
    model = Model()
    mesh = init_device_mesh("cpu", (4,))
    fully_shard(model.blocks[1], mesh=mesh)
    fsdp_hooks.install(model.blocks[1])
    fully_shard(model, mesh=mesh)
    with pytest.raises(fsdp_hooks.InstallError, match="'blocks.1' is installed already: .*after the last fully_shard"):
        fsdp_hooks.install(model)


@pytest.mark.parametrize("frozen", [False, True], ids=["trained", "frozen at install"])
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_a_gradient_hook_registered_after_install_is_named(compiled: bool, frozen: bool) -> None:
    """Eager FSDP2 never calls it, autograd does: the first backward says so, also once a graph was compiled."""
    model = sharded()
    model.head.requires_grad_(not frozen)
    fsdp_hooks.install(model)
    backend = {"backend": "collective_identity", "options": {"inner": "aot_eager"}}
    run = torch.compile(model, **backend) if compiled else model
    run(torch.ones(2, 8)).sum().backward()
    model.head.requires_grad_(True)
    handle = model.head.weight.register_hook(lambda gradient: gradient * 2)
    with pytest.raises(fsdp_hooks.UnsupportedOption, match="a gradient hook .* eager FSDP2 never .*'head.weight'"):
        run(torch.ones(2, 8)).sum().backward()
    handle.remove()
    run(torch.ones(2, 8)).sum().backward()
    torch.save(list(model.parameters()), io.BytesIO())
    model.head.weight.register_hook(lambda gradient: gradient * 2)
    fsdp_hooks.uninstall(model)
    model(torch.ones(2, 8)).sum().backward()
