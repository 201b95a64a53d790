"""One rank alone gathers nothing, and holds no copy of its parameters through backward if they are resharded."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import collective_identity as ci
import fsdp_hooks
import inductor_passes  # noqa: F401  (makes the backend known)

pytestmark = pytest.mark.usefixtures("one_rank")


@pytest.mark.parametrize("dtype", [torch.bfloat16, None], ids=["cast", "copy"])
@pytest.mark.parametrize("reshard", [True, False])
def test_what_is_saved_for_backward(reshard: bool, dtype: torch.dtype | None) -> None:
    torch.manual_seed(0)
    torch._dynamo.reset()
    model = nn.Sequential(nn.Linear(6, 32), nn.Linear(32, 32, bias=False), nn.Linear(32, 4))
    mesh = init_device_mesh("cpu", (1,))
    policy = MixedPrecisionPolicy(dtype)
    fully_shard(model[1], mesh=mesh, mp_policy=policy, reshard_after_forward=reshard)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    fsdp_hooks.install(model)
    shard = model[1].weight.to_local().data_ptr()
    compiled = torch.compile(
        model, backend="collective_identity", fullgraph=True, options={"inner": "aot_eager", "bucketing": False}
    )
    kept: list[torch.Tensor] = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        if tuple(tensor.shape) == (32, 32) and tensor.data_ptr() != shard:
            kept.append(tensor)
        return tensor

    saved = torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor)
    with ci.enable(agreement_timeout=0) as handle, saved:
        loss = compiled(torch.ones(5, 6)).sum()
        loss.backward()
        notes = handle.report().notes
    assert [note for note in notes if "a model sharded over one rank has none" in note], "install was called"
    assert len(kept) == (0 if reshard else 1)
    weight = model[1].weight.grad.to_local()
    assert weight.dtype is torch.float32 and bool(weight.any())
