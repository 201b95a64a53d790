"""While a compile only looks at shapes, unshard gives an outline: in everything but values what it gathers."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch._guards import TracingContext, tracing
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from fsdp_hooks import compat_trace
from fsdp_hooks.operator import UnshardArgs, unshard

pytestmark = pytest.mark.usefixtures("fake_world")  # 4 ranks


def plan(dim: int, size: int, param_dtype: torch.dtype | None) -> UnshardArgs:
    group = dist.group.WORLD.group_name
    return UnshardArgs(
        1, "fsdp2", "w", "", dim, size, group, 4, group, "avg", None, 1, "avg", None, None, param_dtype, None, True
    )


@pytest.mark.parametrize("trained", [True, False])
@pytest.mark.parametrize("param_dtype", [None, torch.bfloat16])
@pytest.mark.parametrize("dim, size", [(0, 8), (0, 7), (1, 8), (1, 6), (2, 5)])
def test_it_is_like_what_is_gathered(dim: int, size: int, param_dtype: torch.dtype | None, trained: bool) -> None:
    args = plan(dim, size, param_dtype)
    sizes = [8, 8, 8]
    sizes[dim] = min(args.chunk, size)
    mode = FakeTensorMode()
    with mode:
        shard = torch.empty(sizes, requires_grad=trained)
        gathered = unshard(shard, args)
        with tracing(TracingContext(mode)):
            outline = unshard(shard, args)
    assert type(outline) is type(gathered)
    for one in (outline, gathered):
        assert one.shape[dim] == size
    for look in (torch.Tensor.size, torch.Tensor.stride, torch.Tensor.storage_offset, torch.Tensor.is_contiguous):
        assert look(outline) == look(gathered), look
    assert (outline.dtype, outline.requires_grad) == (gathered.dtype, gathered.requires_grad)
    assert "Outline" in type(outline.grad_fn).__name__ if trained else outline.grad_fn is None


def test_only_where_nothing_is_recorded() -> None:
    mode = FakeTensorMode()
    with mode:
        fake = torch.empty(2)
    real = torch.empty(2)
    assert not compat_trace.only_shapes_count(fake), "no compile: whoever runs on fake tensors wants collectives"
    seen = []
    with tracing(TracingContext(mode)):
        assert compat_trace.only_shapes_count(fake) and not compat_trace.only_shapes_count(real)
        make_fx(lambda x: seen.append(compat_trace.only_shapes_count(x)) or x, tracing_mode="fake")(real)
    assert seen == [False]
