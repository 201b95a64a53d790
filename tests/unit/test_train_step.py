"""``trace_train_step`` without a world of processes: what it leaves alone, and what may change between steps."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import collective_identity as ci
import fsdp_hooks
import inductor_passes  # noqa: F401  (makes the backend known)
from tests.unit.sharded import sharded, snapshot

pytestmark = pytest.mark.usefixtures("fake_world")

EAGER = {"inner": "aot_eager"}


def loss_fn(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return model(x).square().mean()


def clip(model: nn.Module) -> None:
    torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)


def traced(optimizer: type[torch.optim.Optimizer], **options: Any) -> tuple[fsdp_hooks.TrainStep, Any]:
    made = optimizer((model := sharded()).parameters(), **options)
    return fsdp_hooks.trace_train_step(model, loss_fn, (torch.ones(2, 8),), optimizer=made), made


def test_tracing_changes_nothing() -> None:
    model = sharded()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    fsdp_hooks.uninstall(fsdp_hooks.install(model))  # lazy initialisation, which is FSDP2's own
    before, values = snapshot(model), [p.to_local().clone() for p in model.parameters()]
    random = torch.get_rng_state()
    fsdp_hooks.trace_train_step(
        model, loss_fn, (torch.ones(2, 8),), optimizer=optimizer, before_step=clip, scaler=scaler
    )
    assert snapshot(model) == before
    assert all(torch.equal(a, p.to_local()) for a, p in zip(values, model.parameters(), strict=True))
    assert all(p.grad is None for p in model.parameters())
    assert optimizer.param_groups[0]["lr"] == 0.1 and scaler.get_scale() == 8.0
    assert not any(value.any() for state in optimizer.state.values() for value in map(local, state.values()))
    assert torch.equal(random, torch.get_rng_state())


def test_gradients_of_a_unit_are_reduced_in_one_buffer() -> None:
    """As FSDP2 lays them out; the report expects that of a step, and of an installed model a reduction a parameter."""
    model = sharded()
    with ci.enable():
        step = fsdp_hooks.trace_train_step(model, loss_fn, (torch.ones(2, 8),))
        found = [ci.identity_of(node) for node in ci.start_nodes(step.graph_module)]
        reduced = [(one.param_group, one.params) for one in found if one and one.role == ci.GRAD_REDUCE_SHARD]
        assert reduced == [
            ("blocks.1", ("blocks.1.weight", "blocks.1.bias")),
            ("blocks.0", ("blocks.0.0.weight", "blocks.0.0.bias")),
            ("", ("head.weight",)),
        ]
        fsdp_hooks.trace_train_step(model, loss_fn, (torch.ones(3, 8),))
        assert ci.report().to_dict()["ok"] is True
        fsdp_hooks.install(model)
        torch.compile(model, backend="collective_identity", options=EAGER)(torch.ones(2, 8)).sum().backward()
        fsdp_hooks.trace_train_step(model, loss_fn, (torch.ones(4, 8),))
        report = ci.report().to_dict()
        assert report["ok"] is True, report["failures"]
        assert report["collectives"]["expected"][ci.GRAD_REDUCE_SHARD]["backward"] == 5 + 3
    with ci.enable():
        fsdp_hooks.trace_train_step(fsdp_hooks.install(sharded()), loss_fn, (torch.ones(2, 8),))
        assert ci.report().to_dict()["ok"] is True


class CalledFromOutside(nn.Module):
    """Its block's unit never opens: one of its methods runs instead of its forward."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(8, 8)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(x, self.blocks[0].weight)


@pytest.mark.parametrize("graded", [True, False], ids=["graded first", "no_grad first"])
def test_a_unit_that_never_opens_is_gathered_where_it_is_read(graded: bool) -> None:
    model = CalledFromOutside()
    fsdp_hooks.data_parallel(model, init_device_mesh("cpu", (4,)))

    def loss(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        with torch.set_grad_enabled(graded):
            first = model(x)
        return model(first).sum()

    step = fsdp_hooks.trace_train_step(model, loss, (torch.ones(2, 8),))
    step(torch.ones(2, 8))
    assert model.blocks[0].weight.grad is not None and model.blocks[0].bias.grad is None
    roles = [ci.identity_of(node) for node in ci.start_nodes(step.graph_module)]
    assert [one.params for one in roles if one and one.role == ci.GRAD_REDUCE_SHARD] == [("blocks.0.weight",)]


def local(tensor: torch.Tensor) -> torch.Tensor:
    return getattr(tensor, "_local_tensor", tensor)


def test_a_schedule_made_after_the_trace_may_keep_notes_in_the_groups() -> None:
    step, optimizer = traced(torch.optim.AdamW, lr=0.1)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.5, total_steps=4, cycle_momentum=False)
    for _ in range(2):
        step(torch.ones(2, 8))
        schedule.step()


def test_dampening_after_its_first_step() -> None:
    model = sharded()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, dampening=0.5)
    loss_fn(model, torch.ones(2, 8)).backward()
    optimizer.step()
    optimizer.zero_grad()
    fsdp_hooks.trace_train_step(model, loss_fn, (torch.ones(2, 8),), optimizer=optimizer)(torch.ones(2, 8))


def test_state_that_is_gone_is_named() -> None:
    step, optimizer = traced(torch.optim.AdamW, lr=0.1)
    optimizer.state.clear()
    with pytest.raises(fsdp_hooks.InstallError, match="expects the optimizer's 'exp_avg' of a parameter of shape"):
        step(torch.ones(2, 8))


@pytest.mark.parametrize(
    "penalty",
    [lambda p: p.square().sum(), lambda p: (p * p).sum(), lambda p: (p**2).sum(), torch.linalg.vector_norm],
    ids=["method", "times", "power", "function"],
)
def test_a_loss_that_reads_a_parameter_outside_forward_is_refused(penalty: Any) -> None:
    with pytest.raises(fsdp_hooks.UnsupportedOption, match="found 'head.weight' read outside it, by the loss function"):
        fsdp_hooks.trace_train_step(
            sharded(), lambda model, x: loss_fn(model, x) + penalty(model.head.weight), (torch.ones(2, 8),)
        )


def test_another_parameter_group_is_refused() -> None:
    step, optimizer = traced(torch.optim.SGD, lr=0.1)
    optimizer.add_param_group({"params": [nn.Parameter(torch.ones(2))]})
    with pytest.raises(fsdp_hooks.InstallError, match="the 1 parameter groups that it was traced with, found 2"):
        step(torch.ones(2, 8))


@pytest.mark.parametrize("fused", [True, False], ids=["fused", "plain"])
def test_a_compiled_step_reads_a_closed_over_tensor_as_it_is_now(fused: bool) -> None:
    weight = torch.tensor(0.0)
    model = sharded()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, fused=fused)

    def weighted(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return loss_fn(model, x) * 0 + weight

    step = fsdp_hooks.trace_train_step(model, weighted, (torch.ones(2, 8),), optimizer=optimizer)
    step.compile(options=EAGER)
    weight.fill_(3.0)
    with ci.enable():
        assert step(torch.ones(2, 8)).item() == 3.0


def halve_kept(params: list[torch.Tensor]) -> None:
    for param in params:
        assert param.grad is not None
        param.grad.mul_(0.5)


def replace_kept(params: list[torch.Tensor]) -> None:
    for param in params:
        assert param.grad is not None
        param.grad = param.grad * 0.5


@pytest.mark.parametrize("change", [halve_kept, replace_kept])
@pytest.mark.parametrize("kept", [False, True], ids=["of the model", "kept"])
def test_before_step_may_reach_gradients_through_parameters_that_it_kept(kept: bool, change: Any) -> None:
    """An optimizer's groups, or a list from before: their gradients are those of the step, as in eager training."""
    moved = []
    for before in (False, True):
        torch.manual_seed(0)
        model = fully_shard(nn.Linear(8, 8), mesh=init_device_mesh("cpu", (1,)))
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        params = list(model.parameters())

        def before_step(found: nn.Module, params: list[torch.Tensor] = params) -> None:
            change(params if kept else list(found.parameters()))

        step = fsdp_hooks.trace_train_step(
            model, loss_fn, (torch.ones(2, 8),), optimizer=optimizer, before_step=before_step if before else None
        )
        was = local(params[0]).clone()
        step(torch.ones(2, 8))
        moved.append(local(params[0]) - was)
        assert params[0].grad is None
    assert moved[0].any() and torch.allclose(moved[0], 2 * moved[1], atol=1e-6)
