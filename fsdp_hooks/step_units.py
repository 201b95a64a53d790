"""How does a traced step open its units? Each once, its gradients reduced in one buffer, as FSDP2 does.

A communication library adds up in an order that may depend on a number's place in what is sent (gloo's does in groups
of more than two ranks), and a gradient added before it is reduced rounds otherwise than after. So a whole-step graph
sends what FSDP2 sends: one buffer for each parameter group, laid out as ``foreach_reduce`` and ``chunk_cat`` in
torch/distributed/fsdp/_fully_shard/_fsdp_collectives.py (read in 2.11.0 to 2.15.0), of gradients that autograd has
added up over all calls of the module.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from . import compat_checkpoint, compat_step
from .operator import UnshardArgs, gathered, own_part, rank_by_rank, reduced, unshard
from .runtime import UNIT, Unit, laid_out, shard_on
from .spec import ParamSpec


class OpenedUnit:
    """One unit while a step is traced.

    Attributes:
        params: names of its parameters.
        reopened: for each time it was opened again in forward, the name of the last node traced before.
    """

    def __init__(self, unit: Unit) -> None:
        self._unit = unit
        self.params = [spec.fqn for _, _, spec in unit.sources]
        self._full: dict[bool, dict[str, torch.Tensor]] = {}
        self.reopened: list[str] = []

    def gather_all(self, module: nn.Module) -> dict[str, torch.Tensor]:
        """Every parameter in full, gathered when it is first asked for; without autograd anew."""
        if torch.is_grad_enabled() in self._full and not compat_checkpoint.recomputing():
            self.reopened.append(compat_step.last_traced_node())
        return dict(self._held())

    def gather(self, sharded: Any, spec: ParamSpec) -> torch.Tensor:
        """One parameter that is read while the unit is closed: by a checkpoint that runs again, say."""
        return self._held()[spec.fqn]

    def _held(self) -> dict[str, torch.Tensor]:
        graded = torch.is_grad_enabled()
        if graded not in self._full:
            self._full[graded] = self._gathered()
        return self._full[graded]

    def _gathered(self) -> dict[str, torch.Tensor]:
        unit = self._unit
        full: dict[str, torch.Tensor] = {}
        together: dict[tuple[object, ...], list[tuple[ParamSpec, torch.Tensor]]] = {}
        for module, name, spec in unit.sources:
            shard = shard_on(unit.device, module._parameters[name])
            if not shard.requires_grad:
                full[spec.fqn] = unshard(shard, spec.args)
                continue
            alike = spec.args._replace(param="", dim=0, size=0), spec.reduce_dtype
            together.setdefault(alike, []).append((spec, shard))
        for members in together.values():
            shards = _Together.apply(tuple(spec.args for spec, _ in members), *(shard for _, shard in members))
            full.update((spec.fqn, whole) for (spec, _), whole in zip(members, shards, strict=True))
        return {spec.fqn: laid_out(full[spec.fqn], spec) for _, _, spec in unit.sources}


@contextmanager
def opened_once(model: nn.Module) -> Iterator[Sequence[OpenedUnit]]:
    """While a step is traced, open each unit of ``model`` once, however often its modules run."""
    units = {id(held[0]): held[0] for module in model.modules() if (held := module.__dict__.get(UNIT)) is not None}
    opened = [OpenedUnit(unit) for unit in units.values()]
    try:
        for unit, one in zip(units.values(), opened, strict=True):
            unit.__dict__.update(gather_all=one.gather_all, gather=one.gather)
        yield opened
    finally:
        for unit in units.values():
            del unit.__dict__["gather_all"], unit.__dict__["gather"]


class _Together(torch.autograd.Function):
    """Gathers parameters; reduces those of their gradients that there are in one buffer."""

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any, args: tuple[UnshardArgs, ...], *shards: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.args, ctx.shards = args, [(shard.shape, shard.dtype) for shard in shards]
        return tuple(gathered(shard, one) for shard, one in zip(shards, args, strict=True))

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:  # type: ignore[override]
        found = [(place, grad) for place, grad in enumerate(grads) if grad is not None]
        results: list[torch.Tensor | None] = [None] * len(grads)
        if found:
            args = [ctx.args[place] for place, _ in found]
            first: UnshardArgs = args[0]
            rows = [
                rank_by_rank(grad if one.accumulate_dtype is None else grad.to(one.accumulate_dtype), one)
                for one, (_, grad) in zip(args, found, strict=True)
            ]
            sizes = [row.numel() // first.group_size for row in rows]
            sent = torch.cat([row.reshape(first.group_size, size) for row, size in zip(rows, sizes, strict=True)], 1)
            received = reduced(sent.flatten(), first, [one.param for one in args])
            for one, (place, _), row, part in zip(args, found, rows, received.split(sizes), strict=True):
                shape, dtype = ctx.shards[place]
                cut = (row.shape[0] // first.group_size, *row.shape[1:]) if first.group_size > 1 else row.shape
                results[place] = own_part(part.to(dtype).reshape(cut), one, shape)
        return None, *results
