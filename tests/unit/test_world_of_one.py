"""A real group of one rank: every value is real, so eager FSDP2 is the reference, bit for bit."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import fsdp_hooks
from fsdp_hooks import InstallError
from fsdp_hooks.operator import UnshardArgs, unshard

pytestmark = pytest.mark.usefixtures("one_rank")


class Renormed(nn.Module):
    """Changes its weights in place when it runs."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.linear = nn.Embedding(10, 8, max_norm=0.5), nn.Linear(8, 8)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            self.linear.weight.div_(self.linear.weight.norm())
        return self.linear(self.embedding(tokens))


def fsdp2(policy: MixedPrecisionPolicy) -> Renormed:
    return fully_shard(Renormed(), mesh=init_device_mesh("cpu", (1,)), mp_policy=policy)


def installed(policy: MixedPrecisionPolicy) -> Renormed:
    return fsdp_hooks.install(fsdp2(policy))


def plain(policy: MixedPrecisionPolicy) -> Renormed:
    return fsdp_hooks.data_parallel(Renormed(), init_device_mesh("cpu", (1,)), mp_policy=policy)


def trained(make: Callable[[MixedPrecisionPolicy], Renormed], policy: MixedPrecisionPolicy, micro: int = 1) -> list:
    torch.manual_seed(0)
    model = make(policy)
    optimizer, losses = torch.optim.SGD(model.parameters(), lr=0.1), []
    for _ in range(3):
        for at in range(micro):
            if micro > 1:
                model.set_requires_gradient_sync(at == micro - 1)
            loss = model(torch.arange(at, 10)).float().square().mean()
            loss.backward()
            losses.append(loss.detach())
        optimizer.step()
        optimizer.zero_grad()
    return [*losses, *(param.to_local().detach() for param in model.parameters())]


POLICIES = [MixedPrecisionPolicy(), MixedPrecisionPolicy(param_dtype=torch.bfloat16)]


@pytest.mark.parametrize("policy", POLICIES, ids=["fp32", "bf16"])
@pytest.mark.parametrize("make", [installed, plain])
def test_a_weight_that_forward_changes(
    make: Callable[[MixedPrecisionPolicy], Renormed], policy: MixedPrecisionPolicy
) -> None:
    """The change is made to the gathered copy and is gone after the step, as in FSDP2."""
    for one, other in zip(trained(fsdp2, policy), trained(make, policy), strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize(
    "dtypes",
    [(None, torch.bfloat16), (None, torch.float16), (torch.bfloat16, torch.float16), (torch.bfloat16, torch.float32)],
    ids=lambda pair: f"{pair[0]} reduced in {pair[1]}",
)
def test_gradients_that_wait_in_another_dtype(dtypes: tuple[torch.dtype | None, torch.dtype]) -> None:
    """Each is added before it is cast."""
    policy = MixedPrecisionPolicy(param_dtype=dtypes[0], reduce_dtype=dtypes[1])
    for one, other in zip(trained(fsdp2, policy, 3), trained(installed, policy, 3), strict=True):
        assert torch.equal(one, other)


def test_an_uneven_parameter_can_be_changed_in_place(monkeypatch: pytest.MonkeyPatch) -> None:
    """The padding is cut off the gathered tensor, whose part is no view to autograd."""
    group = dist.group.WORLD.group_name
    args = UnshardArgs(
        version=1, producer="test", param="p", param_group="", dim=0, size=3, group=group, group_size=2,
        reduce_group=group, reduce_op="sum", replicate_group=None, replicate_size=1, replicate_op="sum",
        predivide=None, postdivide=None, param_dtype=None, reduce_dtype=None, reshard_after_forward=False,
    )  # fmt: skip
    monkeypatch.setattr("fsdp_hooks.operator._gather", lambda x, a: torch.cat((x, x)))
    monkeypatch.setattr("fsdp_hooks.operator._reduce", lambda x, a, params: x[:2])
    monkeypatch.setattr("fsdp_hooks.operator.WAIT", lambda x: x)
    shard = torch.tensor([1.0, 2.0], requires_grad=True)
    full = unshard(shard, args)
    with torch.no_grad():
        full.mul_(10)
    assert full.tolist() == [10.0, 20.0, 10.0] and shard.tolist() == [1.0, 2.0]
    full.mul(torch.tensor([1.0, 2.0, 3.0])).sum().backward()
    assert shard.grad is not None and shard.grad.tolist() == [1.0, 2.0]


# ---- copies ----


class Two(nn.Module):
    """Tied weights."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)])
        self.layers[1].weight = self.layers[0].weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers[1](self.layers[0](x))


def two() -> Two:
    torch.manual_seed(0)
    return fsdp_hooks.data_parallel(Two(), init_device_mesh("cpu", (1,)))


def test_a_copy_of_a_data_parallel_model_is_another_one() -> None:
    model, x = two(), torch.ones(2, 4)
    before = model(x).detach()
    other = copy.deepcopy(model)
    assert type(other) is type(model) and other.layers[0].weight is other.layers[1].weight
    assert isinstance(other.layers[0].weight, DTensor) and other.layers[0].weight is not model.layers[0].weight
    other(x).sum().backward()
    torch.optim.SGD(other.parameters(), lr=0.1).step()
    assert all(param.grad is None for param in model.parameters())
    assert torch.equal(model(x), before) and not torch.equal(other(x), before)
    after = other(x).detach()
    plain = fsdp_hooks.undo_data_parallel(other)
    assert type(plain) is Two and not isinstance(plain.layers[0].weight, DTensor)
    assert torch.equal(plain(x), after) and torch.equal(model(x), before)


def test_an_average_of_a_data_parallel_model() -> None:
    model, x = two(), torch.ones(2, 4)
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.5))
    average.update_parameters(model)  # the first one copies
    with torch.no_grad():
        for param in model.parameters():
            param.mul_(3)
    average.update_parameters(model)
    for one, other in zip(average.module.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(one.to_local() * 3, other.to_local() * 2)
    assert average(x).shape == (2, 4)


def save(model: nn.Module) -> None:
    torch.save(model, io.BytesIO())


@pytest.mark.parametrize("way", [pickle.dumps, save])
def test_a_captured_model_is_not_pickled(way: Callable[[nn.Module], object]) -> None:
    with pytest.raises(pickle.PicklingError, match=r"Two is captured by fsdp_hooks .* save model.state_dict\(\)"):
        way(two())


def test_a_part_of_an_installed_model_is_not_copied() -> None:
    model = fsdp_hooks.install(fully_shard(Two(), mesh=init_device_mesh("cpu", (1,))))
    with pytest.raises(InstallError, match=r"^Linear: expected no copy of a part of an installed model"):
        copy.deepcopy(model.layers[0])
    with pytest.raises(AssertionError, match="FSDP does not support deepcopy"):
        copy.deepcopy(model)


# ---- parameters taken away afterwards ----


@pytest.mark.parametrize("take", ["delete", "weight_norm", "none"])
def test_a_parameter_that_was_taken_away_is_named(take: str) -> None:
    model = fsdp_hooks.install(fully_shard(nn.Sequential(nn.Linear(4, 4)), mesh=init_device_mesh("cpu", (1,))))
    layer = model[0]
    assert hasattr(layer, "weight") and not hasattr(layer, "wait")
    if take == "delete":
        del layer.weight
        assert not hasattr(layer, "weight")
        with pytest.raises(AttributeError, match="parameter '0.weight': expected the one that was sharded"):
            layer.weight = torch.ones(4, 4)
    if take == "weight_norm":
        nn.utils.parametrizations.weight_norm(layer)
    if take == "none":
        layer.register_parameter("weight", None)
    with pytest.raises(InstallError, match=r"parameter '0.weight': .*found none.* come before fully_shard"):
        model(torch.ones(2, 4))


# ---- forwards that meet a shard ----


class Penalised(nn.Module):
    """Reads a weight by `parameters()`, or a child's when that has returned."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.child, self.linear, self.way = nn.Linear(4, 4), nn.Linear(4, 4), way

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.child(self.linear(x))
        if self.way == "parameters":
            return x + next(self.linear.parameters())
        return x @ self.child.weight


@pytest.mark.parametrize("way", ["parameters", "child"])
def test_a_forward_that_computes_with_a_shard_is_told_so(way: str) -> None:
    mesh, outer = init_device_mesh("cpu", (1,)), nn.Sequential(Penalised(way))
    fully_shard(outer[0].child, mesh=mesh, reshard_after_forward=False)
    fully_shard(outer[0], mesh=mesh)
    fsdp_hooks.install(fully_shard(outer, mesh=mesh))
    with pytest.raises(InstallError) as raised:
        outer(torch.ones(2, 4))
    assert str(raised.value).startswith("module '0': expected its forward to read full parameters, found a sharded one")
    assert str(raised.value).count("got mixed torch.Tensor and DTensor") == 1
