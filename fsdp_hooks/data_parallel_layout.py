"""How data parallelism lays out one parameter: this rank's part as a ``DTensor``, and the plan of its gather.

The layouts are FSDP2's (``FSDPParam._init_sharded_param``, torch/distributed/fsdp/_fully_shard/_fsdp_param.py, read
in 2.11.0 to 2.15.0), so a checkpoint of one loads into the other.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Placement, Replicate, Shard
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from . import compat
from .errors import InstallError
from .operator import UnshardArgs
from .spec import PAYLOAD_VERSION, ModelParallel, ParamSpec, reduce_op_name

PRODUCER = "data_parallel"
MODES = {"fully_shard": 1, "hybrid_shard": 2, "replicate": 1}


@dataclass(frozen=True, slots=True)
class Settings:
    """What one call of ``data_parallel`` asks of every parameter."""

    mesh: DeviceMesh
    mode: str
    policy: MixedPrecisionPolicy
    shard_dim: int
    divide_factor: float | None

    @property
    def shards(self) -> Any | None:
        """The process group whose ranks each hold a part; None when every rank holds the whole."""
        return None if self.mode == "replicate" else self.mesh.get_group(self.mesh.ndim - 1)

    @property
    def replicas(self) -> Any | None:
        """The process group whose ranks hold the same; None without replicas."""
        return None if self.mode == "fully_shard" else self.mesh.get_group(0)


def check_parameter(param: nn.Parameter, fqn: str, settings: Settings) -> None:
    """Refuse what cannot be laid out, before anything is changed.

    Raises:
        InstallError: naming the parameter, what was found and what to do.
    """
    found, way_out = None, ""
    if isinstance(param, nn.parameter.UninitializedParameter):
        found, way_out = "a lazy one without a shape", "run the model once, so that it gets one"
    elif is_traceable_wrapper_subclass(param) and not isinstance(param, DTensor):
        found, way_out = f"a {type(param).__name__}", "use fully_shard and fsdp_hooks.install, or a plain dtype"
    elif param._backward_hooks or getattr(param, "_post_accumulate_grad_hooks", None):
        found, way_out = "one with gradient hooks, which a sharded parameter would lose", "register them afterwards"
    elif param.grad is not None:
        found, way_out = "one with a gradient, which would be lost", "call zero_grad() first"
    elif settings.shards is not None and param.ndim == 0:
        found = "a scalar, which has no dimension to shard"
        way_out = "give it one element in one dimension, name it in ignored_params, or use mode='replicate'"
    elif isinstance(param, DTensor):
        way_out = "slice both meshes from one init_device_mesh with named dimensions, as in mesh['dp'] and mesh['tp']"
        if settings.mesh.mesh_dim_names is None or param.device_mesh.mesh_dim_names is None:
            found = f"a DTensor on {param.device_mesh}, and a mesh without dimension names"
        else:
            try:
                compat.mesh_over(settings.mesh, param.device_mesh)
            except RuntimeError as error:
                found = f"a DTensor whose {param.device_mesh} cannot be joined with {settings.mesh} ({error})"
    if found is not None:
        raise InstallError(f"data_parallel expects parameter {fqn!r} to be an ordinary one, found {found}: {way_out}")


def distribute(param: nn.Parameter, settings: Settings, device: torch.device) -> nn.Parameter:
    """This rank's part of ``param`` as a new parameter: a ``DTensor`` of the whole one's shape and dtype.

    Nothing is sent: every rank cuts its part from the values it holds.
    """
    mesh, placements = settings.mesh, _placements(param, settings)
    with torch.no_grad():
        local = param.to_local() if isinstance(param, DTensor) else param.detach()
        if not local.is_meta:
            local = local.to(device)
        if settings.shards is not None:
            local = _part(local, _dim(local, settings), settings.shards)
        if isinstance(param, DTensor):
            mesh, placements = compat.mesh_over(mesh, param.device_mesh), (*placements, *param.placements)
        stride = torch.empty(param.shape, device="meta").stride()
        if settings.shards is None:
            stride = param.stride()
        whole = DTensor.from_local(local, mesh, placements, run_check=False, shape=param.shape, stride=stride)
    made = nn.Parameter(whole, requires_grad=param.requires_grad)
    if not isinstance(param, DTensor):
        made.__dict__.update(param.__dict__)  # an attribute by which the user's optimizer groups parameters
    return made


def spec_of(
    param: nn.Parameter, settings: Settings, *, fqn: str, param_group: str, reshard: bool, device: torch.device
) -> ParamSpec:
    """The plan of gathering ``param``, not yet distributed, and of reducing its gradient."""
    parallel, local = None, param.detach()
    if isinstance(param, DTensor):
        parallel = ModelParallel(param.device_mesh, tuple(param.placements), param.shape, tuple(param.stride()))
        local = param.to_local().detach()
    dim = _dim(local, settings)
    param_dtype, reduce_dtype = _dtypes(param, settings.policy)
    shards, replicas = settings.shards, settings.replicas
    wire = reduce_dtype or param_dtype or param.dtype
    before, after, reduce_op, replicate_op = compat.factors_of(
        shards, replicas, wire, device.type, settings.divide_factor
    )
    args = UnshardArgs(
        version=PAYLOAD_VERSION,
        producer=PRODUCER,
        param=fqn,
        param_group=param_group,
        dim=dim,
        size=local.shape[dim] if local.ndim else 1,
        group="" if shards is None else shards.group_name,
        group_size=1 if shards is None else shards.size(),
        reduce_group="" if shards is None else shards.group_name,
        reduce_op=reduce_op_name(reduce_op, fqn),
        replicate_group=None if replicas is None else replicas.group_name,
        replicate_size=1 if replicas is None else replicas.size(),
        replicate_op=reduce_op_name(replicate_op, fqn),
        predivide=None if before in (None, 1) else float(before),
        postdivide=None if after in (None, 1) else float(after),
        param_dtype=param_dtype,
        reduce_dtype=reduce_dtype,
        reshard_after_forward=reshard and shards is not None,
    )
    return ParamSpec(args, parallel, param.requires_grad, param.dtype, tuple(local.shape))


def _dim(local: torch.Tensor, settings: Settings) -> int:
    """The dimension that is sharded: what was asked for, or the first where the parameter has not that many."""
    return settings.shard_dim if settings.shard_dim < local.ndim else 0


def _placements(param: nn.Parameter, settings: Settings) -> tuple[Placement, ...]:
    if settings.shards is None:
        return (Replicate(),)
    dim = _dim(param, settings)
    shard = compat.sharded_below(param, dim) if isinstance(param, DTensor) else Shard(dim)
    return (shard,) if settings.replicas is None else (Replicate(), shard)


def _part(full: torch.Tensor, dim: int, group: Any) -> torch.Tensor:
    """This rank's share of ``full`` in memory of its own, as ``torch.chunk`` gives it; the last may be empty."""
    chunks = torch.chunk(full, group.size(), dim)
    rank = group.rank()
    part = chunks[rank] if rank < len(chunks) else full.narrow(dim, 0, 0)
    return part.clone(memory_format=torch.contiguous_format)


def _dtypes(param: nn.Parameter, policy: MixedPrecisionPolicy) -> tuple[torch.dtype | None, torch.dtype | None]:
    """``(param_dtype, reduce_dtype)``, None where nothing is to be cast (``FSDPParam.init_dtype_attrs``)."""
    if not param.is_floating_point():
        return None, None
    gathered, reduced = policy.param_dtype, policy.reduce_dtype
    if reduced == gathered:
        reduced = None
    if gathered == param.dtype:
        gathered = None
    return gathered, reduced
