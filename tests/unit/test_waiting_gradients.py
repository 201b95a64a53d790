"""Gradients that wait (no gradient sync): what would be reduced too late, or never, raises."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import fsdp_hooks
import inductor_passes  # noqa: F401  (makes the backend known)
from fsdp_hooks import InstallError
from tests.unit.sharded import Model, sharded

pytestmark = pytest.mark.usefixtures("fake_world")


def test_options_that_change_between_forward_and_backward() -> None:
    model = fsdp_hooks.install(sharded())
    model.set_requires_gradient_sync(False)
    loss = model(torch.ones(2, 8)).sum()
    model.set_requires_gradient_sync(True)
    with pytest.raises(InstallError, match="expected the gradient-sync options to stay .* before the forward"):
        loss.backward()


def test_a_reducing_step_that_does_not_use_a_waiting_parameter() -> None:
    model = fsdp_hooks.install(sharded())
    model.set_requires_gradient_sync(False)
    model(torch.ones(2, 8)).sum().backward()
    model.set_requires_gradient_sync(True)
    model(torch.ones(2, 8))  # no backward
    with pytest.raises(InstallError, match="the gradient was never reduced: use it in that step too"):
        model.set_requires_gradient_sync(False)


def test_a_used_one_raises_nothing() -> None:
    model = fsdp_hooks.install(sharded())
    for sync in (False, True, False, True):
        model.set_requires_gradient_sync(sync)
        model(torch.ones(2, 8)).sum().backward()
    assert all(isinstance(parameter.grad, DTensor) for parameter in model.parameters())
    fsdp_hooks.uninstall(model)


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_accumulation_hooks_where_nothing_is_reduced(compiled: bool) -> None:
    """FSDP2 calls none there. Compiled code would, with no gradient or an old one: refused by name."""
    model = fsdp_hooks.install(sharded())
    calls = []
    model.head.weight.register_post_accumulate_grad_hook(lambda parameter: calls.append(parameter.grad is not None))
    call = torch.compile(model, backend="collective_identity", options={"inner": "aot_eager"}) if compiled else model
    call(torch.ones(2, 8)).sum().backward()
    assert calls == [True]
    model.set_requires_gradient_sync(False)
    loss = call(torch.ones(2, 8)).sum()
    if compiled:
        with pytest.raises(fsdp_hooks.UnsupportedOption, match=r"post_accumulate_grad_hook with gradient sync off in"):
            loss.backward()
        return
    loss.backward()
    model.set_requires_gradient_sync(True)
    model(torch.ones(2, 8)).sum().backward()
    assert calls == [True, True]


def test_a_hook_that_backward_calls_reads_the_shard() -> None:
    """As in eager FSDP2; a gather there would be one rank's alone."""
    model = fsdp_hooks.install(sharded())
    seen: list[type] = []
    model.head.weight.register_post_accumulate_grad_hook(lambda _: seen.append(type(model.blocks[1].weight.data)))
    model.blocks[1].register_full_backward_hook(lambda *_: seen.append(type(model.head.weight.data)))
    model(torch.ones(2, 8)).sum().backward()
    assert seen == [DTensor, DTensor]


def test_a_member_of_a_group_called_alone_closes_at_once() -> None:
    """As in a loss that runs the head chunk by chunk, after the model's forward."""
    model = Model()
    mesh = init_device_mesh("cpu", (4,))
    fully_shard([model.blocks[1], model.head], mesh=mesh)
    fully_shard(model, mesh=mesh)
    fsdp_hooks.install(model)
    model.head(torch.ones(2, 8))
    assert isinstance(model.head.weight, DTensor) and isinstance(model.blocks[1].weight, DTensor)
    assert isinstance(model(torch.ones(2, 8)), torch.Tensor) and isinstance(model.head, nn.Linear)
