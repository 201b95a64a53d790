"""Eager FSDP2 whose collectives are functional and say why they were issued.

FSDP2's own hooks, streams, buffers and prefetching stay; only what they call to communicate is replaced, through
its public protocols ``AllGather`` and ``ReduceScatter`` (torch/distributed/fsdp/_fully_shard/_fsdp_api.py, read in
2.11.0 to 2.15.0). HSDP's all-reduce has no such protocol: see :mod:`fsdp_hooks.all_reduce`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp._fully_shard._fsdp_api import AllGather, ReduceScatter

from collective_identity import GRAD_REDUCE_SHARD, PARAM_UNSHARD, role_scope
from collective_identity import session as ci_session
from collective_identity.outside import say_eager_roles
from collective_identity.transports import WAIT, Transport, default_overload

from . import compat, compat_eager
from .all_reduce import FunctionalAllReduce, route, unroute
from .errors import InstallError, UnsupportedOption
from .reshard import reshard_mark
from .runtime import UNIT
from .spec import reduce_op_name
from .survey import Found, Managed, attribute_names, managed, outermost, parameters_of

PRODUCER = "fsdp2_eager"

_PREVIOUS = "_fsdp_hooks_previous_comms"


class FunctionalAllGather(AllGather):
    """All-gathers one FSDP parameter group by a functional collective, role included."""

    says_roles = True  # to `collective_identity.compat.eager_fsdp_modules`

    def __init__(self, found: Sequence[Found]) -> None:
        self._param_group = found[0].param_group
        self._params = [one.fqn for one in found]
        self._group = found[0].group

    def allocate(
        self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device
    ) -> torch.Tensor:
        """A plain buffer, as FSDP2's default has it."""
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        async_op: bool = False,
    ) -> dist.Work | None:
        """Fill ``output_tensor`` (1-D, world size x input elements), in stream order: there is no work to wait on."""
        name = group.group_name
        with (
            role_scope(
                PARAM_UNSHARD, producer=PRODUCER, group=name, param_group=self._param_group, params=self._params
            ),
            torch.fx.traceback.annotate(reshard_mark(compat.resharded_after_forward(self._group))),
        ):
            full = default_overload(Transport.ALL_GATHER)(input_tensor, group.size(), name)
        output_tensor.copy_(WAIT(full))
        return None


class FunctionalReduceScatter(ReduceScatter):
    """Reduce-scatters one FSDP parameter group by a functional collective, role included."""

    def __init__(self, found: Sequence[Found], all_reduce: FunctionalAllReduce | None) -> None:
        self._found = tuple(found)
        self._param_group = found[0].param_group
        self._all_reduce = all_reduce

    def allocate(
        self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device
    ) -> torch.Tensor:
        """A plain buffer. The last one before an all-reduce is what HSDP all-reduces, so it is remembered."""
        buffer = torch.empty(*size, dtype=dtype, device=device)
        if self._all_reduce is not None:
            self._all_reduce.expect(buffer)
        return buffer

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> dist.Work | None:
        """Reduce ``input_tensor`` (1-D, world size x output elements) into ``output_tensor``, in stream order.

        Raises:
            UnsupportedOption: ``op`` is neither SUM nor AVG (a custom gradient divide factor).
        """
        name = group.group_name
        reduce_op = reduce_op_name(op, self._found[0].fqn)
        params = carried(self._found, input_tensor.numel(), group.size())
        if self._all_reduce is not None:
            self._all_reduce.params = params
        with role_scope(
            GRAD_REDUCE_SHARD, producer=PRODUCER, group=name, param_group=self._param_group, params=params
        ):
            shard = default_overload(Transport.REDUCE_SCATTER)(input_tensor, reduce_op, group.size(), name)
        output_tensor.copy_(WAIT(shard))
        return None


def carried(found: Sequence[Found], numel: int, world: int) -> list[str] | None:
    """The parameters whose gradients fill ``numel`` elements: all that are trained, or None (some had no gradient)."""
    trained = [one for one in found if one.param.sharded_param.requires_grad]
    total = sum(_padded_numel(one.param, world) for one in trained)
    return [one.fqn for one in trained] if total == numel else None


def _padded_numel(param: Any, world: int) -> int:
    sizes = list(param._orig_size)
    dim = param.fsdp_placement.dim
    sizes[dim] = -(-sizes[dim] // world) * world
    return math.prod(sizes)


def use_functional_comms(model: nn.Module) -> nn.Module:
    """Let eager FSDP2 issue its collectives as functional ones, each with an explicit role. Same numbers, bit for bit.

    For whoever traces or watches FSDP2's eager hooks: the role is on every node that a trace such as ``make_fx``
    records. To compile, use :func:`fsdp_hooks.install` or :func:`fsdp_hooks.trace_train_step` instead. Call it
    after the last ``fully_shard``; :func:`restore_comms` undoes it. Each collective costs one more buffer of its
    output's size and one copy, since a functional collective makes its own output.

    Args:
        model: the root of a ``fully_shard`` model, one- or two-dimensional mesh, trained eagerly.

    Returns:
        The same model.

    Raises:
        InstallError: no module of it was given to ``fully_shard``, it is captured by ``install``, it has these
            objects already, or this torch's FSDP2 is unknown.
        UnsupportedOption: it has communication objects of another kind, ``replicate()`` without a shard dimension,
            or several parameter groups on one module.
    """
    compat.check_version()
    groups = list(_groups(model))
    for one, _, group in groups:
        _check(model, one.name, group)
    for name, root in outermost(model):
        compat.finish_lazy_init(root, name)
    names = attribute_names(model)
    reducers: list[FunctionalAllReduce] = []
    planned = []
    for one, module, group in groups:
        found = tuple(parameters_of(one, names))
        if not found:
            continue
        reducer = None
        if compat.replicate_group(group) is not None:
            reducer = FunctionalAllReduce(PRODUCER, found[0].param_group, found[0].fqn)
            reducers.append(reducer)
        previous = compat_eager.comms_of(group, one.name)
        planned.append((module, previous, FunctionalAllGather(found), FunctionalReduceScatter(found, reducer)))
    if reducers:
        route(reducers)  # the last thing that may refuse
    for module, _, gather, scatter in planned:
        module.set_custom_all_gather(gather)
        module.set_custom_reduce_scatter(scatter)
    if (session := ci_session.current()) is not None:
        say_eager_roles(session.ledger, sorted(one.name or "(root)" for one, _, _ in groups))
    model.__dict__[_PREVIOUS] = ([(module, previous) for module, previous, _, _ in planned], reducers)
    return model


def restore_comms(model: nn.Module) -> nn.Module:
    """Give the model FSDP2's own communication back, exactly as it was before :func:`use_functional_comms`.

    Raises:
        InstallError: it was not given to :func:`use_functional_comms`.
    """
    kept = model.__dict__.get(_PREVIOUS)
    if kept is None:
        raise InstallError(
            f"restore_comms expects the model that was given to fsdp_hooks.use_functional_comms, found "
            f"{type(model).__name__} without it: pass the root model itself"
        )
    modules, reducers = kept
    if reducers:
        unroute(reducers)
    for module, (gather, scatter) in modules:
        module.set_custom_all_gather(gather)
        module.set_custom_reduce_scatter(scatter)
    del model.__dict__[_PREVIOUS]
    return model


def _groups(model: nn.Module) -> Iterator[tuple[Managed, Any, Any]]:
    """What was given to ``fully_shard``, its first module and its parameter group."""
    everything = managed(model)
    for one in everything:
        groups = compat.groups_of(one.state, one.name)
        if len(groups) > 1:
            raise UnsupportedOption(
                f"module {one.name!r}: use_functional_comms expects one parameter group a module, found {len(groups)} "
                "(shard_placement_fn with several meshes): FSDP2's setters are for one group; leave it out"
            )
        for group in groups:
            yield one, one.modules[0][1], group
    if not everything:
        raise InstallError(
            f"use_functional_comms expects a model with fully_shard applied, found {type(model).__name__} with none: "
            "call torch.distributed.fsdp.fully_shard on its blocks and on the model first"
        )


def _check(model: nn.Module, name: str, group: Any) -> None:
    gather, _ = compat_eager.comms_of(group, name)
    if isinstance(gather, FunctionalAllGather):
        raise InstallError(
            f"module {name!r}: use_functional_comms was called already: call it once, on the root "
            "(fsdp_hooks.restore_comms undoes it)"
        )
    if any(UNIT in module.__dict__ for module in model.modules()):
        raise InstallError(
            f"module {name!r}: expected an eager FSDP2 model, found one captured by fsdp_hooks.install, whose "
            "collectives are functional already: leave use_functional_comms out, or call fsdp_hooks.uninstall first"
        )
    if not compat.uses_default_comms(group):
        raise UnsupportedOption(
            f"module {name!r}: use_functional_comms would replace a communication object of another kind "
            f"({type(gather).__name__}): leave one of the two out"
        )
    if compat.shard_group(group) is None:
        raise UnsupportedOption(
            f"module {name!r}: use_functional_comms does not support replicate() (a mesh without a shard dimension): "
            "leave it out for this model"
        )
