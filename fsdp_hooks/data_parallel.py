"""``data_parallel``: FSDP, HSDP or DDP for a plain model, without FSDP2's run-time machinery (SimpleFSDP style)."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import weakref
from collections.abc import Collection, Sequence
from os import PathLike

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DataParallel, DistributedDataParallel

import collective_identity

from . import compat
from .data_parallel_layout import MODES, Settings, check_parameter, distribute, spec_of
from .data_parallel_record import RECORD, Placed, Record, records_of
from .data_parallel_units import Owned, UnitChoice, choose, owned
from .errors import InstallError
from .expected import expected_collectives
from .runtime import BINDINGS, METHODS, UNIT, Unit, capture_by_class, gather
from .stale_optimizers import warn_of_stale_optimizers

logger = logging.getLogger("collective_identity.fsdp_hooks")


def data_parallel(
    model: nn.Module,
    mesh: DeviceMesh,
    mode: str = "fully_shard",
    *,
    mp_policy: MixedPrecisionPolicy | None = None,
    units: Sequence[UnitChoice] | None = None,
    reshard_after_forward: bool | None = None,
    shard_dim: int = 0,
    gradient_divide_factor: float | None = None,
    ignored_params: Collection[nn.Parameter] = (),
    run_dir: str | PathLike[str] | None = None,
) -> nn.Module:
    """Make a plain model data parallel: parameters become ``DTensor`` objects, forward reads them in full.

    Every collective is functional and has an explicit role, so ``torch.compile(model,
    backend="collective_identity", fullgraph=True)`` captures all of them; without compile the model computes the
    same. Call it before ``torch.compile`` and before the optimizer is built: the parameters are new objects. No
    value is sent, each rank keeps its part of what it holds, so all ranks must have initialised alike (or be on the
    meta device: ``model.to_empty(device=...)`` and initialise afterwards).

    Args:
        model: a plain model, on any device; it moves to the mesh's. Parameters that are ``DTensor`` objects already
            (tensor or expert parallelism) keep that layout inside forward. Modules below it that are data parallel
            already, say experts with a mesh of their own, are left as they are.
        mesh: the data-parallel mesh, one dimension; two for hybrid_shard, ``("replicate", "shard")``.
        mode: "fully_shard" shards parameters, gradients and optimizer state over the mesh; "hybrid_shard" shards
            over its last dimension and replicates over the first; "replicate" shards nothing (DDP).
        mp_policy: FSDP2's policy. ``param_dtype`` and ``reduce_dtype`` for every parameter, ``cast_forward_inputs``
            at every unit, ``output_dtype`` for what the model returns. Buffers stay as they are.
        units: what is gathered together, as the modules given to ``fully_shard`` are: modules, names (``fnmatch``
            patterns as in "layers.*") or classes; the rest belongs to the model itself. None: the elements of the
            outermost ``ModuleList`` and ``ModuleDict`` objects.
        reshard_after_forward: whether compiled code gathers again in backward what backward needs. None: all but
            the model's own unit, as FSDP2.
        shard_dim: dimension to shard, 0 or more; parameters of fewer dimensions use dimension 0. Uneven is fine.
        gradient_divide_factor: what the sum of gradients is divided by; None: the number of data-parallel ranks.
        ignored_params: parameters that stay plain tensors, with no collective.
        run_dir: folder for this run's report (see docs/run-format.md); None keeps it in memory.

    Returns:
        The same model. :func:`undo_data_parallel` gives it back.

    Raises:
        InstallError: the model is compiled, sharded, installed or data parallel already, the mesh does not fit the
            mode, or a parameter cannot be sharded. Nothing has been changed then.

    Source: SimpleFSDP (arXiv 2411.00284) for the idea of plain parametrised reads; FSDP2 (torch 2.11 to 2.15) for
    layouts, mixed precision and the order of the gradient's arithmetic.
    """
    compat.check_version()
    _check_model(model)
    _check_mesh(mesh, mode, shard_dim)
    inner = records_of(model)
    done = {id(module) for _, top, _ in inner for module in top.modules()}
    settings = Settings(mesh, mode, mp_policy or MixedPrecisionPolicy(), shard_dim, gradient_divide_factor)
    names = choose(model, units, done)
    params = owned(model, names, {id(param) for param in ignored_params}, done)
    if not params:
        raise InstallError(
            f"data_parallel expects a model with parameters, found none in {type(model).__name__} that are not "
            "ignored or data parallel already: leave out data_parallel"
        )
    _check_ties(params, [record for _, _, record in inner])
    for one in params:
        check_parameter(one.param, one.fqn, settings)
    session = collective_identity.session.ensure(run_dir=run_dir)

    device = _device(mesh)
    made = _units(model, names, settings.policy, device)
    record = Record(made[id(model)], [(module, made[id(module)]) for module in model.modules() if id(module) in made])
    with contextlib.ExitStack() as undo:
        undo.callback(_give_back, model, record)
        for one in params:
            reshard = one.unit is not model if reshard_after_forward is None else reshard_after_forward
            unit = made[id(one.unit)]
            spec = spec_of(one.param, settings, fqn=one.fqn, param_group=unit.name, reshard=reshard, device=device)
            sharded = distribute(one.param, settings, device)
            for owner, attribute in one.owners:
                undo.callback(owner._parameters.__setitem__, attribute, one.param)
                owner._parameters[attribute] = sharded
            record.placed.append(Placed(one.owners, unit, spec, weakref.ref(one.param)))
        for module in model.modules():
            undo.callback(module._buffers.update, dict(module._buffers))
        _move_buffers(model, device)
        record.bind()
        _take_over(record)
        model.__dict__[RECORD] = record
        warn_of_stale_optimizers(model)
        for prefix, _, below in inner:
            undo.callback(below.move_back, below.root, [unit.name for _, unit in below.units], below.placed)
            below.move_below(prefix, record.root)
        for _, module, _ in inner:
            nothing = collective_identity.ledger.Expectation(model=type(module).__name__, world={}, rows=())
            session.declare(nothing, module)
        session.declare(expected_collectives(model), model)
        undo.pop_all()
    logger.info("%s of %s: %d parameters in %d units", mode, type(model).__name__, len(params), len(made))
    return model


def undo_data_parallel(model: nn.Module) -> nn.Module:
    """Give back a plain model with the full, current values; modules below it that were data parallel as well.

    Every rank of the mesh must call it (parameters are gathered). The parameters are new objects without gradients;
    those of tensor or expert parallelism are ``DTensor`` objects of their own mesh again.

    Raises:
        InstallError: the model is not data parallel.
    """
    if RECORD not in model.__dict__:
        raise InstallError(
            f"undo_data_parallel expects the model that was given to data_parallel, found {type(model).__name__}, "
            "which was not: pass that model itself (not the torch.compile wrapper, not a sub-module)"
        )
    for _, top, record in records_of(model):
        for one in record.placed:
            full = _full(one)
            for owner, attribute in one.owners:
                owner._parameters[attribute] = full
        _give_back(top, record)
    torch._dynamo.reset()  # compiled code of this process may hold the captured forward
    return model


def _give_back(model: nn.Module, record: Record) -> None:
    """Undo whatever was taken over, all but parameters and buffers."""
    model.__dict__.pop(RECORD, None)
    for module, original in reversed(record.classes):
        module.__class__ = original
    for one in record.placed:
        for owner, _ in one.owners:
            owner.__dict__.pop(BINDINGS, None)
    for module, _ in record.units:
        module.__dict__.pop(UNIT, None)
        module.__dict__.update(module.__dict__.pop(METHODS, {}))


# ---- what is refused ---------------------------------------------------------------------------------------


def _check_model(model: nn.Module) -> None:
    if not isinstance(model, nn.Module):
        raise InstallError(f"data_parallel expects an nn.Module, found {type(model).__name__}")
    if hasattr(model, "_orig_mod"):
        raise InstallError(
            "data_parallel expects the model before torch.compile, found a compiled one: call data_parallel first, "
            "then model = torch.compile(model, backend='collective_identity')"
        )
    if RECORD in model.__dict__:
        raise InstallError(
            f"{type(model).__name__} is data parallel already: call data_parallel once on a model "
            "(fsdp_hooks.undo_data_parallel undoes it)"
        )
    tops = {id(module) for _, top, _ in records_of(model) for module in top.modules()}
    for name, module in model.named_modules():
        where = f"{type(model).__name__}" if name == "" else f"its sub-module {name!r}"
        if isinstance(module, FSDPModule):
            raise InstallError(
                f"data_parallel expects a plain model, found fully_shard applied to {where}: use one of the two "
                "(fsdp_hooks.install captures a fully_shard model)"
            )
        if isinstance(module, (DistributedDataParallel, DataParallel)):
            raise InstallError(
                f"data_parallel expects a plain model, found {type(module).__name__} at {where}: give the module "
                "inside it; mode='replicate' does what it does"
            )
        if BINDINGS in module.__dict__ and id(module) not in tops:
            raise InstallError(
                f"data_parallel expects a plain model, found {where} inside one that is data parallel or installed: "
                "call data_parallel on inner modules first, then on the model around them"
            )


def _check_mesh(mesh: DeviceMesh, mode: str, shard_dim: int) -> None:
    if mode not in MODES:
        raise InstallError(f"data_parallel expects a mode of {', '.join(map(repr, MODES))}, found {mode!r}")
    if not isinstance(mesh, DeviceMesh):
        raise InstallError(
            f"data_parallel expects a DeviceMesh, found {type(mesh).__name__}: make one with "
            "torch.distributed.device_mesh.init_device_mesh"
        )
    if mesh.ndim != MODES[mode]:
        wanted = "one dimension" if MODES[mode] == 1 else "two dimensions, replicate and shard"
        raise InstallError(
            f"data_parallel with mode={mode!r} expects a mesh of {wanted}, found {mesh}: slice the data-parallel part "
            "out of a larger mesh, as in mesh['dp']"
        )
    if mesh.get_coordinate() is None:
        raise InstallError(f"data_parallel expects this rank to be in the mesh, found {mesh} without it")
    if not isinstance(shard_dim, int) or shard_dim < 0:
        raise InstallError(f"data_parallel expects shard_dim to be 0 or more, found {shard_dim!r}")


def _check_ties(params: list[Owned], inner: list[Record]) -> None:
    placed = [one for record in inner for one in record.placed]
    sharded = {id(param): one.spec.fqn for one in placed if (param := one.before()) is not None}
    for one in params:
        if id(one.param) in sharded:
            raise InstallError(
                f"parameter {one.fqn!r} is tied to {sharded[id(one.param)]!r} of a sub-module that is data parallel "
                "already, which broke the tie: call data_parallel once, on the model that holds both"
            )


# ---- how it is taken over ----------------------------------------------------------------------------------


def _device(mesh: DeviceMesh) -> torch.device:
    if mesh.device_type == "cpu":
        return torch.device("cpu")
    return torch.device(mesh.device_type, torch.get_device_module(mesh.device_type).current_device())


def _units(
    model: nn.Module, names: dict[int, str], policy: MixedPrecisionPolicy, device: torch.device
) -> dict[int, Unit]:
    return {
        identity: Unit(
            name,
            is_root=identity == id(model),
            device=device,
            cast_inputs_to=policy.param_dtype if policy.cast_forward_inputs else None,
            cast_outputs_to=policy.output_dtype if identity == id(model) else None,
        )
        for identity, name in names.items()
    }


def _move_buffers(model: nn.Module, device: torch.device) -> None:
    for module in model.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None and not buffer.is_meta and not isinstance(buffer, DTensor):
                module._buffers[name] = buffer.to(device)


def _take_over(record: Record) -> None:
    """Open and close the units in forward, and read parameters through their bindings."""
    for module, unit in record.units:
        module.__dict__[UNIT] = unit, 0
        module.__dict__[METHODS] = {name: module.__dict__[name] for name in ("forward",) if name in module.__dict__}
        module.__dict__.pop("forward", None)
    owners = (owner for one in record.placed for owner, _ in one.owners)
    capture_by_class((*(module for module, _ in record.units), *owners), record.classes)


def _full(one: Placed) -> nn.Parameter:
    """The whole parameter, in its own dtype."""
    module, attribute = one.owners[0]
    sharded = module._parameters[attribute]
    spec = one.spec
    with torch.no_grad():
        args = spec.args._replace(param_dtype=None, replicate_group=None)
        full = gather(sharded, dataclasses.replace(spec, args=args))
        if args.group_size == 1:
            full = full.clone()
    return nn.Parameter(full, requires_grad=sharded.requires_grad)  # type: ignore[union-attr]
