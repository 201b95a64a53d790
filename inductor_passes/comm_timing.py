"""How long do collectives take on a process group? Measured by all of its ranks together."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from .comm_costs import CommCosts, fit_costs
from .options import KINDS

SIZES: tuple[int, ...] = tuple(2**16 * 4**i for i in range(7))
"""Bytes that are timed when the caller names none: 64 KiB to 256 MiB, each four times the last."""
WARM_UP = 3
"""Runs of each collective at each size that are not counted: the first ones set up connections and buffers."""


def measure_comm_costs(
    group: dist.ProcessGroup | DeviceMesh | None = None,
    *,
    device: torch.device | str | None = None,
    sizes: Sequence[int] = SIZES,
    repeats: int = 10,
) -> CommCosts:
    """Time collectives on a group and fit latency and bandwidth of each kind. All ranks of the group call it together.

    Each of `all_gather_into_tensor`, `reduce_scatter_tensor` and `all_reduce` (float32, ``sum``) runs at each size,
    after a warm-up, one at a time with nothing beside it. On an accelerator events take the time, so that launching
    counts where the device waits for it; on a CPU the clock does. The ranks exchange their times through the group: of
    each repeat the slowest rank's counts, and of the repeats the quickest, in which least else ran. So all ranks return
    an equal value. The default sizes take 256 MiB and a rank's share of it.

    Measure once and keep the value (`CommCosts.to_json`): another measurement may give another ``cap_mb``, and another
    cap is another cache key and, where only some ranks have it, a disagreement (CI050).

    Args:
        group: a process group, or a mesh of one dimension such as ``mesh["shard"]``; the default group when None.
        device: where the tensors live; the accelerator if the group has a backend for it besides the CPU's (NCCL),
            else the CPU.
        sizes: bytes, two different ones or more, counted as `CommCosts` says; each is rounded up so that ranks divide
            it. Let them span what a bucket may be.
        repeats: timed runs of each collective at each size, 1 or more.

    Raises:
        RuntimeError: there is no process group.
        ValueError: a group of one rank or one that this rank is not in, a mesh of more dimensions, a device without a
            backend in the group, sizes or repeats out of range. On all ranks, if they were given different ones.
    """
    members = _group(group)
    chosen = _device(members, device)
    timed = time_collectives(members, chosen, sizes, repeats)
    fitted = {kind: fit_costs(points) for kind, points in timed.items()}
    return CommCosts(**fitted, group_size=members.size(), device=chosen.type)


def time_collectives(
    group: dist.ProcessGroup, device: torch.device, sizes: Sequence[int], repeats: int
) -> dict[str, list[tuple[int, float]]]:
    """(bytes, seconds) of each kind at each size, the seconds as `shortest` says. All ranks call it together.

    Raises:
        ValueError: as `measure_comm_costs`.
    """
    ranks = group.size()
    _check(sizes, repeats)
    with _current(device):
        settings = _exchange((tuple(sizes), repeats, device.type), group)
        if len(set(settings)) > 1:
            raise ValueError(f"expected equal sizes, repeats and device on all ranks, found by rank {settings}")
        elements = [-(-nbytes // (4 * ranks)) * ranks for nbytes in sizes]
        whole = torch.zeros(max(elements), device=device)
        part = torch.zeros(max(elements) // ranks, device=device)
        meeting = torch.zeros(1, device=device)
        mine = {
            kind: _seconds(
                [_call(kind, whole[:n], part[: n // ranks], group) for n in elements],
                _call("all_reduce", meeting, meeting, group),
                device,
                repeats,
            )
            for kind in KINDS
        }
        found = shortest(_exchange(mine, group))
    return {kind: [(4 * n, seconds) for n, seconds in zip(elements, found[kind], strict=True)] for kind in KINDS}


def shortest(by_rank: Sequence[Mapping[str, Sequence[Sequence[float]]]]) -> dict[str, list[float]]:
    """For each kind and size, the repeat that ended first on the rank where it ended last.

    Args:
        by_rank: seconds of one rank each: of each kind, of each size, of each repeat.
    """
    return {
        kind: [min(map(max, zip(*size, strict=True))) for size in zip(*(one[kind] for one in by_rank), strict=True)]
        for kind in KINDS
    }


def _call(kind: str, whole: torch.Tensor, part: torch.Tensor, group: dist.ProcessGroup) -> Callable[[], Any]:
    calls: dict[str, Callable[[], Any]] = {
        "all_gather": lambda: dist.all_gather_into_tensor(whole, part, group=group),
        "reduce_scatter": lambda: dist.reduce_scatter_tensor(part, whole, group=group),
        "all_reduce": lambda: dist.all_reduce(whole, group=group),
    }
    return calls[kind]


def _seconds(
    calls: list[Callable[[], Any]], meet: Callable[[], Any], device: torch.device, repeats: int
) -> list[list[float]]:
    """Seconds of each of ``repeats`` runs of each call, after `WARM_UP` others.

    All calls in turn, again and again: what else the machine does for a while meets one repeat of each, not all of one.
    The ranks meet before each, since they do not leave the last one at the same time.
    """
    for call in calls * WARM_UP:
        call()
    found: list[list[float]] = [[] for _ in calls]
    for _ in range(repeats):
        for seconds, call in zip(found, calls, strict=True):
            meet()
            seconds.append(_one(call, device))
    return found


def _one(call: Callable[[], Any], device: torch.device) -> float:
    """Seconds of one call."""
    if device.type == "cpu":
        start = time.perf_counter()
        call()
        return time.perf_counter() - start
    module = torch.get_device_module(device)
    begin, end = module.Event(enable_timing=True), module.Event(enable_timing=True)
    module.synchronize(device)
    begin.record()
    call()
    end.record()
    end.synchronize()
    return 1e-3 * float(begin.elapsed_time(end))


def _exchange(value: Any, group: dist.ProcessGroup) -> list[Any]:
    """Every rank's value, in rank order."""
    found: list[Any] = [None] * group.size()
    dist.all_gather_object(found, value, group=group)
    return found


def _current(device: torch.device) -> AbstractContextManager[Any]:
    """Make an accelerator the current one: what objects are exchanged through is allocated there."""
    if device.type == "cpu" or device.index is None:
        return nullcontext()
    entered: AbstractContextManager[Any] = torch.get_device_module(device).device(device)
    return entered


def _group(group: dist.ProcessGroup | DeviceMesh | None) -> dist.ProcessGroup:
    if not dist.is_available() or not dist.is_initialized():
        raise RuntimeError(
            "measure_comm_costs expects a process group, found none: call torch.distributed.init_process_group first"
        )
    if isinstance(group, DeviceMesh):
        if group.ndim != 1:
            raise ValueError(
                f"measure_comm_costs expects a mesh of one dimension, found {group}: name the one that is sharded, as "
                'in mesh["shard"]'
            )
        group = group.get_group()
    found = dist.group.WORLD if group is None else group
    if not isinstance(found, dist.ProcessGroup):
        raise ValueError(
            f"measure_comm_costs expects a process group that this rank is in, or a mesh, found {found!r}: only the "
            "members of a group measure it"
        )
    if found.size() < 2:
        raise ValueError("measure_comm_costs expects a group of two ranks or more, found one: it sends nothing")
    return found


def _device(group: dist.ProcessGroup, device: torch.device | str | None) -> torch.device:
    pairs = [pair.split(":") for pair in dist.get_backend_config(group).split(",")]
    backends: dict[str, str] = dict(pairs)  # "cpu:gloo,cuda:nccl"
    if device is None:
        accelerator = torch.accelerator.current_accelerator()
        kind = "cpu" if accelerator is None or not torch.accelerator.is_available() else accelerator.type
        device = kind if backends.get(kind) not in (None, backends.get("cpu")) else "cpu"
    chosen = torch.device(device)
    if chosen.type not in backends:
        raise ValueError(
            f"measure_comm_costs expects a device with a backend in the group ({', '.join(sorted(backends))}), found "
            f"{str(chosen)!r}"
        )
    return chosen


def _check(sizes: Sequence[int], repeats: int) -> None:
    fine = isinstance(sizes, Sequence) and all(type(one) is int and one > 0 for one in sizes)
    if not fine or len(set(sizes)) < 2:
        raise ValueError(f"expected sizes to be two different numbers of bytes or more, found {sizes!r}")
    if type(repeats) is not int or repeats < 1:
        raise ValueError(f"expected repeats to be a number of runs, 1 or more, found {repeats!r}")
