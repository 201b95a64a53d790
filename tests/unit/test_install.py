"""`install` and `uninstall` on real ``fully_shard`` models: when they refuse, what they change, what they give back."""

from __future__ import annotations

import gc
import logging
import weakref
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor

import collective_identity as ci
import fsdp_hooks
from collective_identity import session
from fsdp_hooks import InstallError, compat
from tests.unit.sharded import Model, sharded, snapshot

pytestmark = pytest.mark.usefixtures("fake_world")


# ---- models that cannot be installed ----


def test_no_module() -> None:
    with pytest.raises(InstallError, match="expects an nn.Module, found dict"):
        fsdp_hooks.install({})  # type: ignore[arg-type]


def test_a_model_without_fully_shard() -> None:
    model = Model()
    with pytest.raises(InstallError, match=r"found Model with none: call torch.distributed.fsdp.fully_shard"):
        fsdp_hooks.install(model)


def test_fully_shard_on_nothing() -> None:
    model = fully_shard(nn.Sequential(nn.ReLU()), mesh=init_device_mesh("cpu", (4,)))
    before = snapshot(model)
    with pytest.raises(InstallError, match="found none in FSDPSequential: leave out fsdp_hooks.install"):
        fsdp_hooks.install(model)
    assert snapshot(model) == before


def test_install_twice() -> None:
    model = fsdp_hooks.install(sharded())
    before = snapshot(model)
    with pytest.raises(InstallError, match="^this model is installed already: .*uninstall undoes it"):
        fsdp_hooks.install(model)
    assert snapshot(model) == before


@pytest.mark.parametrize("name", ["blocks.0", "blocks.1", "blocks"])
def test_install_of_a_module_below_an_installed_one(name: str) -> None:
    model = fsdp_hooks.install(sharded())
    with pytest.raises(InstallError, match="is installed already"):
        fsdp_hooks.install(model.get_submodule(name))


def test_install_above_an_installed_module() -> None:
    model = Model()
    fully_shard(model.blocks[1], mesh=init_device_mesh("cpu", (4,)))
    fsdp_hooks.install(model.blocks[1])
    before = snapshot(model)
    with pytest.raises(InstallError, match="^its sub-module 'blocks.1' is installed already"):
        fsdp_hooks.install(model)
    assert snapshot(model) == before


def test_a_compiled_model() -> None:
    model = sharded()
    compiled = torch.compile(model, backend="eager")
    before = snapshot(model)
    with pytest.raises(InstallError, match=r"before torch.compile, found a compiled one: call fsdp_hooks.install"):
        fsdp_hooks.install(compiled)  # type: ignore[arg-type]
    assert snapshot(model) == before


def test_uninstall_without_install() -> None:
    model = sharded()
    with pytest.raises(InstallError, match="found FSDPModel without an installation: pass the root model"):
        fsdp_hooks.uninstall(model)
    fsdp_hooks.uninstall(fsdp_hooks.install(model))
    with pytest.raises(InstallError, match="without an installation"):
        fsdp_hooks.uninstall(model)


def test_uninstall_of_a_part() -> None:
    model = fsdp_hooks.install(sharded())
    with pytest.raises(InstallError, match="not a sub-module"):
        fsdp_hooks.uninstall(model.blocks[0])
    fsdp_hooks.uninstall(model)


# ---- a torch that was never read ----


@pytest.mark.parametrize("version", ["2.10.1", "2.16.0+cu130", "3.0.0"])
def test_an_unsupported_torch(version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = sharded()
    before = snapshot(model)
    monkeypatch.setattr(torch, "__version__", version)
    with pytest.raises(InstallError) as raised:
        fsdp_hooks.install(model)
    assert f"expects torch 2.11 to 2.15, found torch {version}: install a torch in that range" in str(raised.value)
    assert snapshot(model) == before


@pytest.mark.parametrize(
    ("holder", "attribute"),
    [("state", "_mp_policy"), ("group", "mesh_info"), ("param", "fsdp_placement")],
)
def test_unknown_internals_are_named(holder: str, attribute: str) -> None:
    """An attribute of FSDP2 is gone: the message says which, of what, in which module."""
    model = sharded()
    state = compat.state_of(model.blocks[1], "blocks.1")
    (group,) = compat.groups_of(state, "blocks.1")
    owner = {"state": state, "group": group, "param": group.fsdp_params[0]}[holder]
    delattr(owner, attribute)
    before = snapshot(model)
    with pytest.raises(InstallError) as raised:
        fsdp_hooks.install(model)
    assert str(raised.value).startswith(f"module 'blocks.1': expected FSDP2's {type(owner).__name__} to have")
    assert attribute in str(raised.value) and "use a released torch in that range" in str(raised.value)
    assert snapshot(model) == before


def test_unknown_divide_factors_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch.distributed.fsdp._fully_shard import _fsdp_collectives

    monkeypatch.setattr(_fsdp_collectives, "_get_gradient_divide_factors", lambda group, factor: None)
    with pytest.raises(InstallError, match=r"_get_gradient_divide_factors.*found \('group', 'factor'\)"):
        fsdp_hooks.install(sharded())


@pytest.mark.parametrize("name", ["blocks.0", ""])
def test_a_hook_that_another_tool_removed(name: str) -> None:
    """Found while planning, so that no other module was changed before."""
    model = sharded()
    compat.finish_lazy_init(model, "")
    module = model.get_submodule(name)
    compat.state_of(module, name)._post_forward_hook_handle.remove()
    before = snapshot(model)
    with pytest.raises(InstallError, match=f"^module {name!r}: expected FSDP2's forward hook to be registered"):
        fsdp_hooks.install(model)
    assert snapshot(model) == before


def test_a_session_with_another_folder_is_refused_before_anything_changes(tmp_path: Any) -> None:
    model = sharded()
    compat.finish_lazy_init(model, "")
    before = snapshot(model)
    with ci.enable(), pytest.raises(session.SessionError, match="run_dir"):
        fsdp_hooks.install(model, run_dir=tmp_path)
    assert snapshot(model) == before
    fsdp_hooks.install(model, run_dir=tmp_path)


# ---- what install changes, and uninstall gives back ----


def with_user_additions() -> Model:
    """Hooks around FSDP2's own, and a forward replaced on one instance."""
    model = sharded()
    compat.finish_lazy_init(model, "")
    block = model.blocks[1]
    block.register_forward_pre_hook(lambda module, args: None)
    block.register_forward_pre_hook(lambda module, args: None, prepend=True)
    block.register_forward_hook(lambda module, args, output: None)
    block.register_forward_hook(lambda module, args, output: None, prepend=True)
    original = block.forward
    block.forward = lambda x: original(x)  # type: ignore[method-assign]
    return model


def test_uninstall_restores_everything() -> None:
    model = with_user_additions()
    before = snapshot(model)
    fsdp_hooks.install(model)
    during = snapshot(model)
    assert during != before
    assert during["blocks.0.0"]["class"] is not before["blocks.0.0"]["class"]
    fsdp_hooks.uninstall(model)
    after = snapshot(model)
    for one in (*before.values(), *after.values()):
        one["keys"] = sorted(one["keys"])
    assert after == before
    assert all(type(module.weight) is nn.Parameter or isinstance(module.weight, DTensor) for module in model.blocks[1:])


def test_a_second_round_is_like_the_first() -> None:
    model = with_user_additions()
    first = snapshot(fsdp_hooks.install(model))
    fsdp_hooks.uninstall(model)
    second = snapshot(fsdp_hooks.install(model))
    for one in (*first.values(), *second.values()):
        one["class"] = [base.__qualname__ for base in one["class"].__mro__]
        one["keys"] = sorted(one["keys"])
    assert second == first


def test_equal_modules_share_one_class() -> None:
    """One captured class an original one, so that Dynamo's code is shared as before."""
    model = fsdp_hooks.install(sharded())
    assert type(model.blocks[0][0]).__name__ == "Linear"
    assert isinstance(model.blocks[1], FSDPModule) and isinstance(model.blocks[1], nn.Linear)
    other = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))
    for one in other:
        fully_shard(one, mesh=init_device_mesh("cpu", (4,)))
    fsdp_hooks.install(other)
    assert len({type(one) for one in other}) == 1


def test_outside_forward_parameters_are_the_shards() -> None:
    model = sharded()
    before = dict(model.named_parameters())
    fsdp_hooks.install(model)
    assert all(value is before[name] for name, value in model.named_parameters())
    linear = model.blocks[0][0]
    assert linear.weight is linear._parameters["weight"] and isinstance(linear.weight, DTensor)


def test_an_unsharded_model_is_resharded_first() -> None:
    """After an eager forward of a root that is not resharded, install still finds shards."""
    model = sharded()
    model(torch.ones(2, 8))
    assert not isinstance(model.head.weight, DTensor)
    fsdp_hooks.install(model)
    assert isinstance(model.head.weight, DTensor)
    assert model(torch.ones(2, 8)).shape == (2, 8)


def test_a_forward_replaced_on_the_instance_still_runs() -> None:
    model = sharded()
    calls: list[torch.Size] = []
    block = model.blocks[1]
    original = block.forward

    def forward(x: torch.Tensor) -> torch.Tensor:
        calls.append(block.weight.shape)
        return original(x)

    block.forward = forward  # type: ignore[method-assign]
    fsdp_hooks.install(model)
    model(torch.ones(2, 8))
    assert calls == [(8, 8)], "called once, with the full parameter"
    fsdp_hooks.uninstall(model)
    assert block.__dict__["forward"] is forward


def test_user_hooks_run_in_their_order() -> None:
    """FSDP2's places are taken, not removed; hooks see FSDP2's shards, not gathered parameters."""
    model = with_user_additions()
    order: list[str] = []
    block = model.blocks[1]
    block.register_forward_pre_hook(lambda *_: order.append("pre, first"), prepend=True)
    block.register_forward_pre_hook(lambda *_: order.append("pre, last"))
    block.register_forward_hook(lambda *_: order.append("post, first"), prepend=True)
    block.register_forward_hook(lambda *_: order.append("post, last"))
    keys = list(block._forward_pre_hooks), list(block._forward_hooks)
    fsdp_hooks.install(model)
    assert (list(block._forward_pre_hooks), list(block._forward_hooks)) == keys
    model(torch.ones(2, 8))
    assert order == ["pre, first", "pre, last", "post, first", "post, last"]


def test_a_slice_of_an_installed_container_is_a_plain_one() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8))
    mesh = init_device_mesh("cpu", (4,))
    fully_shard(model[0], mesh=mesh)
    fully_shard(model, mesh=mesh)
    fsdp_hooks.install(model)
    part = model[:2]
    assert type(part) is nn.Sequential and list(part) == [model[0], model[1]]
    assert part(torch.ones(2, 8)).shape == (2, 8)


def test_install_says_what_it_did(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="collective_identity"):
        fsdp_hooks.install(sharded())
    assert "installed on FSDPModel: 5 attributes read through 3 fully_shard modules" in caplog.text


@pytest.mark.parametrize("ran", [False, True])
@pytest.mark.parametrize("make", ["install", "data_parallel", "installed and compiled"])
def test_a_model_that_nobody_holds_is_freed(make: str, ran: bool) -> None:
    if make == "data_parallel":
        model: nn.Module = fsdp_hooks.data_parallel(Model(), init_device_mesh("cpu", (4,)))
    else:
        model = fsdp_hooks.install(sharded())
    if ran:
        call = torch.compile(model, backend="eager") if make == "installed and compiled" else model
        call(torch.ones(2, 8)).sum().backward()
        del call
        torch._dynamo.reset()
    alive = weakref.ref(model)
    del model
    gc.collect()
    assert alive() is None
