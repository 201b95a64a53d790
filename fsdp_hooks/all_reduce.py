"""HSDP's all-reduce as a functional collective with its role. FSDP2 has no custom object for it.

While at least one model uses functional comms, ``dist`` as FSDP2's ``foreach_reduce`` sees it is a router: an
all-reduce of a buffer that one of *our* reduce-scatter objects has just allocated is issued functionally under its
role; every other call goes to ``torch.distributed``, unchanged. The last model that is restored takes the router away.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from collective_identity import GRAD_REPLICATE_REDUCE, role_scope
from collective_identity.transports import WAIT, Transport, default_overload

from . import compat_eager
from .spec import reduce_op_name


class FunctionalAllReduce:
    """All-reduces the reduced gradients of one parameter group by a functional collective."""

    def __init__(self, producer: str, param_group: str, fqn: str) -> None:
        self._producer, self._param_group, self._fqn = producer, param_group, fqn
        self._expected: weakref.ref[torch.Tensor] | None = None
        self.params: list[str] | None = None

    def expect(self, buffer: torch.Tensor) -> None:
        """Remember the buffer last allocated for this group."""
        self._expected = weakref.ref(buffer)

    def is_for(self, tensor: Any) -> bool:
        """Whether FSDP2 is about to all-reduce this group's gradients."""
        return self._expected is not None and self._expected() is tensor

    def run(self, tensor: torch.Tensor, group: Any, op: Any) -> None:
        """All-reduce ``tensor`` (1-D, the reduce dtype) in place, in stream order."""
        name = group.group_name
        with role_scope(
            GRAD_REPLICATE_REDUCE,
            producer=self._producer,
            group=name,
            param_group=self._param_group,
            params=self.params,
        ):
            total = default_overload(Transport.ALL_REDUCE)(tensor, reduce_op_name(op, self._fqn), name)
        tensor.copy_(WAIT(total))
        self._expected = None


class Router:
    """Stands where FSDP2 looks up ``torch.distributed``."""

    def __init__(self) -> None:
        self.reducers: list[FunctionalAllReduce] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(dist, name)

    def all_reduce(self, tensor: torch.Tensor, op: Any = dist.ReduceOp.SUM, group: Any = None, **others: Any) -> Any:
        """``torch.distributed.all_reduce``, functional where the tensor is one of ours."""
        for reducer in self.reducers:
            if reducer.is_for(tensor):
                return reducer.run(tensor, group, op)
        return dist.all_reduce(tensor, op=op, group=group, **others)


def route(reducers: Sequence[FunctionalAllReduce]) -> None:
    """Send these groups' all-reduces through their objects.

    Raises:
        InstallError: FSDP2 is not as it was read, or another package stands in the same place.
    """
    module = compat_eager.collectives_module()
    router = module.dist
    if not isinstance(router, Router):
        router = Router()
        compat_eager.replace_dist(module, dist, router)
    router.reducers += reducers


def unroute(reducers: Sequence[FunctionalAllReduce]) -> None:
    """Undo :func:`route`; with the last one, put ``torch.distributed`` back.

    Raises:
        InstallError: another package stands where the router was.
    """
    module = compat_eager.collectives_module()
    router = module.dist
    if not isinstance(router, Router):
        compat_eager.replace_dist(module, None, dist)  # refuses, and says who is there
        return
    router.reducers = [one for one in router.reducers if one not in reducers]
    if not router.reducers:
        compat_eager.replace_dist(module, router, dist)
