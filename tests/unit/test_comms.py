"""use_functional_comms: what it refuses, and that a refusal changes nothing."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp._fully_shard import _fsdp_collectives

import fsdp_hooks
from fsdp_hooks import compat_eager
from fsdp_hooks.all_reduce import FunctionalAllReduce, Router
from fsdp_hooks.comms import carried
from fsdp_hooks.errors import InstallError, UnsupportedOption
from fsdp_hooks.survey import attribute_names, managed, parameters_of
from tests.unit.sharded import sharded

pytestmark = pytest.mark.usefixtures("fake_world")


class OtherGather(fsdp_hooks.comms.AllGather):
    def allocate(self, size: Any, *, dtype: Any, device: Any) -> torch.Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(self, **arguments: Any) -> None:
        raise AssertionError("never called")


def with_other_comms() -> nn.Module:
    model = sharded()
    model.blocks[0].set_custom_all_gather(OtherGather())
    return model


@pytest.mark.parametrize(
    ("build", "error", "said"),
    [
        (lambda: nn.Linear(2, 2), InstallError, "with fully_shard applied, found Linear with none"),
        (with_other_comms, UnsupportedOption, "'blocks.0': use_functional_comms would replace .*OtherGather"),
        (lambda: fsdp_hooks.install(sharded()), InstallError, "captured by fsdp_hooks.install"),
        (lambda: fsdp_hooks.use_functional_comms(sharded()), InstallError, "was called already"),
    ],
    ids=["plain", "other_comms", "installed", "twice"],
)
def test_refused(build: Callable[[], nn.Module], error: type[Exception], said: str) -> None:
    with pytest.raises(error, match=said):
        fsdp_hooks.use_functional_comms(build())


def test_install_after_functional_comms_is_refused_and_restoring_makes_it_work() -> None:
    model = fsdp_hooks.use_functional_comms(sharded())
    with pytest.raises(UnsupportedOption, match="custom all-gather or reduce-scatter object"):
        fsdp_hooks.install(model)
    fsdp_hooks.restore_comms(model)
    fsdp_hooks.install(model)


def test_restore_without_use_is_refused() -> None:
    with pytest.raises(InstallError, match="given to fsdp_hooks.use_functional_comms"):
        fsdp_hooks.restore_comms(sharded())


def test_importing_leaves_torch_alone_and_one_dimensional_fsdp_needs_no_router() -> None:
    model = fsdp_hooks.use_functional_comms(sharded())
    assert _fsdp_collectives.dist is torch.distributed
    fsdp_hooks.restore_comms(model)


def test_a_dist_that_another_package_put_there_is_named_and_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    other = SimpleNamespace(all_reduce=None)
    monkeypatch.setattr(_fsdp_collectives, "dist", other)
    model = sharded(shape=(2, 2))
    with pytest.raises(InstallError, match=r"expected .*dist to be torch.distributed, found types.SimpleNamespace"):
        fsdp_hooks.use_functional_comms(model)
    assert _fsdp_collectives.dist is other
    with pytest.raises(InstallError, match="given to fsdp_hooks.use_functional_comms"):
        fsdp_hooks.restore_comms(model)  # nothing was half done


def test_a_foreach_reduce_that_was_never_read_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def foreach_reduce() -> None:
        """All-reduces something else."""

    monkeypatch.setattr(_fsdp_collectives, "foreach_reduce", foreach_reduce)
    with pytest.raises(InstallError, match="foreach_reduce to allocate reduce_output"):
        compat_eager.collectives_module()


def test_the_router_passes_on_what_is_not_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []
    monkeypatch.setattr(torch.distributed, "all_reduce", lambda tensor, **how: asked.append((tensor, how)))
    reducer, router = FunctionalAllReduce("producer", "unit", "weight"), Router()
    router.reducers.append(reducer)
    reducer.expect(torch.ones(2))  # gone at once: a dead buffer is nobody's
    other = torch.ones(2)
    router.all_reduce(other, group="group", async_op=True)
    assert asked[0][0] is other and asked[0][1]["group"] == "group" and asked[0][1]["async_op"] is True
    assert router.get_world_size is torch.distributed.get_world_size


def test_parameters_are_named_only_if_all_of_them_are_carried() -> None:
    model = sharded()
    found = list(parameters_of(next(one for one in managed(model) if one.name == "blocks.0"), attribute_names(model)))
    assert carried(found, 8 * 8 + 8, 4) == ["blocks.0.0.weight", "blocks.0.0.bias"]
    assert carried(found, 8 * 8, 4) is None, "the bias had no gradient"
    found[1].param.sharded_param.requires_grad_(False)
    assert carried(found, 8 * 8, 4) == ["blocks.0.0.weight"]


def test_a_divide_factor_without_a_functional_form_is_refused_when_it_is_used() -> None:
    model = fsdp_hooks.use_functional_comms(sharded())
    state = fsdp_hooks.compat.state_of(model.blocks[0], "blocks.0")
    (group,) = fsdp_hooks.compat.groups_of(state, "blocks.0")
    _, scatter = compat_eager.comms_of(group, "blocks.0")
    process_group = fsdp_hooks.compat.reduce_group(group)
    with pytest.raises(UnsupportedOption, match="'blocks.0.0.weight': expected a gradient reduction of SUM or AVG"):
        scatter(torch.empty(18), torch.empty(72), process_group, torch.distributed.ReduceOp.MAX)
    fsdp_hooks.restore_comms(model)
