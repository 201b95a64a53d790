"""Whatever stops `install` or `data_parallel` half-way, the model is as it was before, and can be given to it again."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import fsdp_hooks
from collective_identity import session
from tests.unit.sharded import Model, sharded, snapshot

pytestmark = pytest.mark.usefixtures("fake_world")

Take = Callable[[nn.Module], nn.Module]


class Named(nn.Linear):
    """Wants a label of every class below it."""

    def __init_subclass__(cls, *, label: str, **options: Any) -> None:
        super().__init_subclass__(**options)


def fsdp2() -> tuple[Model, Take]:
    return sharded(), fsdp_hooks.install


def plain() -> tuple[Model, Take]:
    return Model(), lambda model: fsdp_hooks.data_parallel(model, init_device_mesh("cpu", (4,)))


def with_replaced_forward(made: tuple[Model, Take]) -> tuple[Model, Take]:
    model, take = made
    original = model.blocks[1].forward
    model.blocks[1].forward = lambda x: original(x)  # type: ignore[method-assign]
    model.register_buffer("shift", torch.zeros(8))
    if take is fsdp_hooks.install:
        model(torch.ones(2, 8))  # lazy initialisation is FSDP2's, and stays
        model.reshard()  # type: ignore[operator]
    return model, take


def state_of(model: nn.Module) -> dict[str, Any]:
    found = snapshot(model)
    for name, module in model.named_modules():
        found[name]["keys"].sort()
        found[name]["buffers"] = [(key, id(value)) for key, value in module._buffers.items()]
        hooks = [getattr(p, "_post_accumulate_grad_hooks", None) for p in module._parameters.values()]
        found[name]["watched"] = [len(one or ()) for one in hooks]
    return found


@pytest.mark.parametrize("make", [fsdp2, plain])
@pytest.mark.parametrize("cause", ["class", "warning", "ledger"])
def test_a_failure_leaves_the_model_as_it_was(
    cause: str, make: Callable[[], tuple[Model, Take]], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, take = with_replaced_forward(make())
    wanted: type[Exception] = TypeError
    with monkeypatch.context() as patch, warnings.catch_warnings():
        if cause == "class":
            model.head.__class__ = Named
        if cause == "warning":
            stale = torch.optim.SGD([torch.ones_like(p.data).requires_grad_() for p in model.parameters()])
            wanted = UserWarning
            warnings.simplefilter("error")
        if cause == "ledger":
            wanted = OSError

            def declare(self: Any, *args: Any) -> None:
                raise OSError("no space left on device")

            patch.setattr(session.Session, "declare", declare)
        before = state_of(model)
        with pytest.raises(wanted):
            take(model)
        assert state_of(model) == before
    if cause == "class":
        model.head.__class__ = nn.Linear
    if cause == "warning":
        del stale
    assert take(model)(torch.ones(2, 8)).shape == (2, 8)


class Quantised(nn.Module):
    """A frozen integer weight below a trained one."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.coded = nn.Parameter(torch.ones(8, 8, dtype=dtype), requires_grad=False)
        self.linear = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x) + x @ self.coded.to(x.dtype)


def quantised(way: str, dtype: torch.dtype, policy: MixedPrecisionPolicy) -> nn.Module:
    model, mesh = nn.Sequential(Quantised(dtype), Quantised(dtype)), init_device_mesh("cpu", (4,))
    if way == "data_parallel":
        return fsdp_hooks.data_parallel(model, mesh, mp_policy=policy)
    for block in model:
        fully_shard(block, mesh=mesh, mp_policy=policy)
    return fsdp_hooks.install(fully_shard(model, mesh=mesh, mp_policy=policy))


#: ``fully_shard`` of torch 2.11 takes no integer parameters itself.
WAYS = ["data_parallel"] if torch.__version__.startswith("2.11.") else ["data_parallel", "install"]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("dtype", [torch.int8, torch.bool], ids=str)
@pytest.mark.parametrize("param_dtype", [None, torch.bfloat16], ids=str)
def test_integer_parameters_are_gathered_as_they_are(
    way: str, dtype: torch.dtype, param_dtype: torch.dtype | None
) -> None:
    model = quantised(way, dtype, MixedPrecisionPolicy(param_dtype=param_dtype))
    read: list[torch.dtype] = []
    model[0].linear.register_forward_hook(lambda *_: read.append(model[0].coded.dtype))
    model(torch.ones(2, 8)).sum().backward()
    assert read == [dtype]
    assert model[0].coded.dtype == dtype and model[0].coded.grad is None
    assert model[0].linear.weight.grad.dtype == torch.float32
