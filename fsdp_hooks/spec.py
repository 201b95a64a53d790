"""What FSDP2 decided about one parameter, as a frozen value: the plan of its gather and of its gradient."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.placement_types import Placement

from . import compat
from .errors import UnsupportedOption
from .operator import UnshardArgs

PRODUCER = "fsdp2"
PAYLOAD_VERSION = 1


@dataclass(frozen=True, slots=True)
class ModelParallel:
    """The tensor- or expert-parallel layout that the unsharded parameter has (the DTensor FSDP2 was given)."""

    mesh: DeviceMesh
    placements: tuple[Placement, ...]
    shape: torch.Size
    stride: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class ParamSpec:
    """One FSDP2 parameter: the operator's arguments and the layout around it."""

    args: UnshardArgs
    model_parallel: ModelParallel | None
    trainable: bool
    dtype: torch.dtype
    shape: tuple[int, ...]
    """This rank's unsharded shape; under tensor parallelism that of its local tensor."""

    def __deepcopy__(self, memo: Any) -> ParamSpec:
        """Itself: meshes are not copied with a model."""
        return self

    @property
    def fqn(self) -> str:
        """Fully qualified name of the parameter in the installed model."""
        return self.args.param

    @property
    def gather_dtype(self) -> torch.dtype:
        """Dtype on the wire of the all-gather."""
        return self.args.param_dtype or self.dtype

    @property
    def reduce_dtype(self) -> torch.dtype:
        """Dtype on the wire of the gradient collectives."""
        return self.args.reduce_dtype or self.gather_dtype

    @property
    def accumulator_shape(self) -> tuple[int, ...]:
        """Shape of a gradient that backward leaves unreduced (``"none"``) or reduced, still padded (``"shard"``)."""
        if self.args.sync == "none":
            return self.shape
        return (*self.shape[: self.args.dim], self.args.chunk, *self.shape[self.args.dim + 1 :])


def read_spec(param: Any, group: Any, *, fqn: str, param_group: str) -> ParamSpec:
    """Read one ``FSDPParam`` of an ``FSDPParamGroup`` whose lazy initialisation has run."""
    shard, reduce, replicate = compat.shard_group(group), compat.reduce_group(group), compat.replicate_group(group)
    param_dtype, reduce_dtype = compat.dtypes_of(param, fqn)
    wire_dtype = reduce_dtype or param_dtype or param.sharded_param.dtype
    device_type = param.sharded_param.device.type
    predivide, postdivide, reduce_op, replicate_op = compat.divide_factors(group, wire_dtype, device_type)
    factor = compat.custom_divide_factor(group)
    assert shard is not None
    if factor is not None and (shard.size() == 1 or not is_plain(reduce_op)):
        # NCCL multiplies inside the reduction (PREMUL_SUM), and one shard is only divided: here, a division before.
        predivide, reduce_op = factor * (predivide or 1.0), dist.ReduceOp.SUM
    args = UnshardArgs(
        version=PAYLOAD_VERSION,
        producer=PRODUCER,
        param=fqn,
        param_group=param_group,
        dim=param.fsdp_placement.dim,
        size=param._orig_size[param.fsdp_placement.dim],
        group=shard.group_name,
        group_size=shard.size(),
        reduce_group=reduce.group_name,
        reduce_op=reduce_op_name(reduce_op, fqn),
        replicate_group=None if replicate is None else replicate.group_name,
        replicate_size=1 if replicate is None else replicate.size(),
        replicate_op=reduce_op_name(replicate_op, fqn),
        predivide=_or_none(predivide),
        postdivide=_or_none(postdivide),
        param_dtype=param_dtype,
        reduce_dtype=reduce_dtype,
        reshard_after_forward=compat.resharded_after_forward(group),
        sync=compat.sync_of(group),
    )
    return ParamSpec(
        args,
        _model_parallel(param),
        param.sharded_param.requires_grad,
        param.sharded_param.dtype,
        tuple(param._orig_size),
    )


def is_plain(op: Any) -> bool:
    """Whether a ``ReduceOp`` has a functional-collective name."""
    return op == dist.ReduceOp.SUM or op == dist.ReduceOp.AVG


def reduce_op_name(op: Any, fqn: str) -> str:
    """The functional-collective name of a ``ReduceOp``.

    Raises:
        UnsupportedOption: the operation has no functional form.
    """
    for candidate, name in ((dist.ReduceOp.SUM, "sum"), (dist.ReduceOp.AVG, "avg")):
        if op == candidate:
            return name
    raise UnsupportedOption(
        f"parameter {fqn!r}: expected a gradient reduction of SUM or AVG, found {op}: train this model with eager FSDP2"
    )


def _or_none(factor: float | None) -> float | None:
    return None if factor is None or factor == 1 else float(factor)


def _model_parallel(param: Any) -> ModelParallel | None:
    spec = compat.unsharded_spec(param)
    if spec is None:
        return None
    return ModelParallel(spec.mesh, tuple(spec.placements), spec.tensor_meta.shape, tuple(spec.tensor_meta.stride))
