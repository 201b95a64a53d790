"""Which kernels will a graph launch? Read from its operators once its passes have run, so that they compile meanwhile.

Read, not noted as the operators are emitted: what matters is the graph that is lowered, whoever wrote it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from types import ModuleType

import torch
from torch import fx

from collective_identity.subgraphs import graph_modules

from ..sizes import is_static
from . import choice, launch
from .launch import Move
from .layout import layout_of

logger = logging.getLogger("collective_identity.inductor_passes")

Runs = Callable[[torch.device], bool]


def compile_kernels_of(gm: fx.GraphModule, *, runs: Runs = launch.available, kernels: ModuleType | None = None) -> None:
    """Start to compile what the operators of a graph will launch, and return at once; see `ahead`.

    It saves time and nothing else: whatever fails, a launch compiles what it needs.

    Args:
        gm: the graph as it will be lowered.
        runs: whether kernels run on a device.
        kernels: the module with the kernels; None: `triton_kernels`.
    """
    try:
        launch.compile_ahead(list(moves_of(gm, runs)), kernels=kernels)
    except Exception:
        logger.debug("no kernel is compiled ahead of its launch", exc_info=True)


def moves_of(gm: fx.GraphModule, runs: Runs) -> Iterator[Move]:
    """The kernels that ``pack`` and ``unpack`` of a graph and its sub-graphs launch, but for those of unknown sizes."""
    for part in graph_modules(gm):
        for node in part.graph.nodes:
            if node.target not in (torch.ops.inductor_passes.pack.default, torch.ops.inductor_passes.unpack.default):
                continue
            args, kwargs = fx.map_arg((node.args, node.kwargs), lambda n: n.meta.get("val", ...))
            if _is_known((args, kwargs)):
                packing = node.target is torch.ops.inductor_passes.pack.default
                move = (_packing if packing else _unpacking)(runs, *args, **kwargs)
                if move is not None:
                    yield move


def _is_known(given: object) -> bool:
    """Whether arguments are tensors of known sizes, numbers and types throughout."""
    if isinstance(given, (tuple, list)):
        return all(map(_is_known, given))
    if isinstance(given, dict):
        return all(map(_is_known, given.values()))
    if isinstance(given, torch.Tensor):
        return is_static(given)
    return given is None or isinstance(given, (int, torch.dtype))


def _packing(
    runs: Runs, members: Sequence[torch.Tensor], widths: Sequence[int], outers: Sequence[int], rows: int,
    dtype: torch.dtype,
) -> Move | None:  # fmt: skip
    device, types = members[0].device, frozenset(member.dtype for member in members)
    if not runs(device):
        return None
    layout = layout_of(tuple(widths), tuple(outers), tuple(member.numel() for member in members), rows)
    way = choice.way_to_pack(layout, types, dtype, kernels=True)
    return Move(layout, dtype, types, True, device) if way == "kernel" else None


def _unpacking(
    runs: Runs, buffer: torch.Tensor, widths: Sequence[int], outers: Sequence[int], lengths: Sequence[int], rows: int,
    dtype: torch.dtype | None = None,
) -> Move | None:  # fmt: skip
    if not runs(buffer.device):
        return None
    layout, types = layout_of(tuple(widths), tuple(outers), tuple(lengths), rows), frozenset([dtype or buffer.dtype])
    way = choice.way_to_unpack(layout, types, buffer.dtype, kernels=True)
    return Move(layout, buffer.dtype, types, False, buffer.device) if way == "kernel" else None
