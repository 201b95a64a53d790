"""How tensor parallelism splits the example's transformer over one dimension of the mesh.

Attention and feed-forward are split by columns, then by rows. What is not split (embedding, norms, head) is
held whole by every rank of that dimension, as a replicated DTensor, so that all parameters live on the same mesh
once FSDP2 has sharded them: ``clip_grad_norm_`` needs that.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_module
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)


def _enter(came: Placement, _module: nn.Module, inputs: tuple[Tensor | DTensor, ...], mesh: DeviceMesh) -> DTensor:
    x = inputs[0]
    if not isinstance(x, DTensor):
        x = DTensor.from_local(x, mesh, [came], run_check=False)
    return x.redistribute(mesh, [Replicate()])


def _leave(goes: Placement, copy: bool, _module: nn.Module, output: DTensor, mesh: DeviceMesh) -> Tensor:
    local = output.redistribute(mesh, [goes]).to_local()
    return local.clone() if copy else local


class Whole(ParallelStyle):
    """Hold a module's parameters whole on every rank; ``came`` and ``goes`` place its input and output.

    With ``copy`` the output is no view: FSDP2 hangs its backward hook on what the root module returns.
    """

    def __init__(self, *, came: Placement | None = None, goes: Placement | None = None, copy: bool = False) -> None:
        self.came = came or Replicate()
        self.goes = goes or Replicate()
        self.copy = copy

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        enter: Any = partial(_enter, self.came)
        leave: Any = partial(_leave, self.goes, self.copy)
        return distribute_module(module, device_mesh, None, enter, leave)


def parallelize(model: nn.Module, mesh: DeviceMesh, *, sequence: bool) -> None:
    """Split ``model`` (a ``Transformer``) over the 1-D ``mesh``, in place.

    With ``sequence`` the activations between the split parts are sharded along the window (dimension 1).
    """
    block: dict[str, ParallelStyle] = {}
    for part, into, out in (
        ("attention", ("query", "key", "value"), "out"),
        ("feed_forward", ("gate", "up"), "down"),
    ):
        block |= {f"{part}.{name}": ColwiseParallel() for name in into}
        block[f"{part}.{out}"] = RowwiseParallel(output_layouts=Shard(1) if sequence else None)
    for norm in ("attention_norm", "forward_norm"):
        block[norm] = SequenceParallel() if sequence else Whole()
    if sequence:
        gathered = (Shard(1), None, None), (Replicate(), None, None)
        block["attention"] = PrepareModuleInput(input_layouts=gathered[0], desired_input_layouts=gathered[1])
        block["feed_forward"] = PrepareModuleInput(input_layouts=Shard(1), desired_input_layouts=Replicate())
    for layer in model.get_submodule("layers").children():
        parallelize_module(layer, mesh, block)
    ends: dict[str, ParallelStyle] = {
        "embed": Whole(goes=Shard(1) if sequence else None),
        "norm": SequenceParallel() if sequence else Whole(),
        "head": Whole(came=Shard(1) if sequence else None, copy=True),
    }
    parallelize_module(model, mesh, ends)
