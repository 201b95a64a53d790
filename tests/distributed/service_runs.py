"""Real compiles on real ranks: planted differences, an extra graph, and eight ranks in trouble."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import fx

import collective_identity as ci
from collective_identity import Identity, Source
from collective_identity.agreement import RanksDisagree
from inductor_passes.backend import collective_identity

BOUND = 60.0
KILLED, DELAYED, WARM = 5, 6, 3
DELAY = 30.0

Function = Callable[..., torch.Tensor]


def gather(x: torch.Tensor, name: str) -> torch.Tensor:
    ops = torch.ops._c10d_functional
    return ops.wait_tensor(ops.all_gather_into_tensor(x, dist.get_world_size(), name))  # type: ignore[no-any-return]


def reduce(x: torch.Tensor, name: str, op: str = "sum") -> torch.Tensor:
    ops = torch.ops._c10d_functional
    return ops.wait_tensor(ops.all_reduce(x, op, name))  # type: ignore[no-any-return]


def right(x: torch.Tensor, a: str, b: str) -> torch.Tensor:
    return reduce(gather(x, a) * 2, b)


def swapped_groups(x: torch.Tensor, a: str, b: str) -> torch.Tensor:
    return reduce(gather(x, b) * 2, a)


def other_reduce_op(x: torch.Tensor, a: str, b: str) -> torch.Tensor:
    return reduce(gather(x, a) * 2, b, "max")


def other_order(x: torch.Tensor, a: str, b: str) -> torch.Tensor:
    first = reduce(x, b)
    return gather(x, a).sum() + first


def its_order(x: torch.Tensor, a: str, b: str) -> torch.Tensor:
    first = gather(x, a)
    return reduce(x, b) + first.sum()


def missing_collective(x: torch.Tensor, a: str, b: str) -> torch.Tensor:
    return gather(x, a) * 2


def extra_graph(x: torch.Tensor, a: str, b: str) -> torch.Tensor:
    return gather(gather(x, a), a)


def first_stage(x: torch.Tensor, a: str, b: str) -> torch.Tensor:
    return reduce(x * 2, a)


def second_stage(x: torch.Tensor, a: str, b: str) -> torch.Tensor:
    return reduce(reduce(x, a) * 2, a)


FAULTS: dict[str, tuple[Function, Function]] = {
    "swapped_groups": (right, swapped_groups),
    "other_reduce_op": (right, other_reduce_op),
    "other_role": (right, right),
    "other_order": (its_order, other_order),
    "missing_collective": (right, missing_collective),
    "other_graph": (right, extra_graph),
}
"""By the kind of fault that is planted: what every rank but the last compiles, and what the last does. An extra graph
on one rank meets the next graph of the others."""


class Stamp:
    """A pass that gives every gather a role."""

    def __init__(self, role: str) -> None:
        self.role = role

    def __call__(self, gm: fx.GraphModule) -> None:
        for node in ci.start_nodes(gm):
            if "all_gather" in str(node.target):
                ci.stamp(node, Identity(version=1, role=self.role, source=Source.EXPLICIT, producer="test"))


def compiled(function: Function, **options: Any) -> Any:
    torch._dynamo.reset()
    return torch.compile(
        function, backend=collective_identity, fullgraph=True, options={"inner": "aot_eager", **options}
    )


def plant(rank: int, ranks: int) -> dict[str, Any]:
    """Each fault in a session of its own; then graphs that only one rank, or one stage of a pipeline, has."""
    a, b = (dist.new_group().group_name for _ in range(2))
    pairs = [dist.new_group([i, i + 1]) for i in range(0, ranks, 2)]
    last, x = rank == ranks - 1, torch.ones(4)
    seen: dict[str, Any] = {}
    for fault, (theirs, mine) in FAULTS.items():
        with ci.enable(agreement_timeout=20):
            options = {}
            if fault == "other_role":
                options["pre_passes"] = [Stamp("tp.gather" if last else "user.gather")]
            began = time.monotonic()
            try:
                compiled(mine if last else theirs, **options)(x, a, b)
                seen[fault] = None
            except RanksDisagree as error:
                seen[fault] = {"fault": error.fault, "field": error.field, "position": error.position}
                seen[fault] |= {"text": str(error), "seconds": time.monotonic() - began}
        dist.barrier()
    with ci.enable(agreement_timeout=20) as handle:  # stages: each its own graph, on its own group
        pair = pairs[rank // 2].group_name
        compiled(first_stage if rank < 2 else second_stage)(x, pair, pair)
        compiled(right)(x, a, b)
        seen["stages"] = verdicts(handle)
    dist.barrier()
    with ci.enable(agreement_timeout=8) as handle:  # a graph that nobody else ever compiles
        function = compiled(right)
        function(x, a, b)
        if last:
            try:
                handle.session.begin_graph("inference", "extra", "test").agree(rows_of(right, x, a, b), tag="extra")
            except RanksDisagree as error:
                seen["error"] = str(error)
        seen["alone"] = verdicts(handle)
    dist.barrier()
    return seen


def rows_of(function: Function, *args: Any) -> tuple[ci.CollectiveRow, ...]:
    from torch.fx.experimental.proxy_tensor import make_fx

    gm = make_fx(lambda x: function(x, *args[1:]), tracing_mode="fake")(args[0])
    return ci.collective_table(gm)


def verdicts(handle: ci.Handle) -> list[list[str]]:
    """Status and detail of each comparison so far."""
    records = [r for r in handle.session.ledger.records() if type(r).__name__ == "AgreementRecord"]
    return [[r.status, r.detail] for r in records]  # type: ignore[union-attr]


def only_collectives(x: torch.Tensor, name: str) -> torch.Tensor:
    """Nothing to generate a kernel for: Inductor compiles it in seconds, and caches it."""
    ops, ranks = torch.ops._c10d_functional, dist.get_world_size()
    whole = ops.wait_tensor(ops.all_gather_into_tensor(x, ranks, name))
    return ops.wait_tensor(ops.reduce_scatter_tensor(whole, "sum", ranks, name))  # type: ignore[no-any-return]


def in_trouble(rank: int, ranks: int, folder: str) -> dict[str, Any]:
    """One is killed while it compiles, one comes late, one has a warm cache."""
    name, x = dist.group.WORLD.group_name, torch.ones(4)  # type: ignore[union-attr]

    def build(cache: str, **options: Any) -> Any:
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = f"{folder}/{rank}-{cache}"
        torch._dynamo.reset()
        return torch.compile(only_collectives, backend=collective_identity, fullgraph=True, options=options)

    with ci.enable(agreement_timeout=BOUND) as handle:
        build("first")(x, name)
        first = verdicts(handle)
    dist.barrier()
    began = time.monotonic()
    with ci.enable(agreement_timeout=BOUND) as handle:
        if rank == DELAYED:
            time.sleep(DELAY)
        killed = {"pre_passes": [lambda gm: os.kill(os.getpid(), signal.SIGKILL)]} if rank == KILLED else {}
        ended = "ran"
        try:
            build("first" if rank == WARM else "second", **killed)(x, name)
        except RuntimeError as error:  # gloo: the killed rank's connection is closed
            ended = f"{type(error).__name__}: {error}"
        cached = [graph["cached"] for graph in handle.report().to_dict()["graphs"]]
        second = verdicts(handle)
    return {
        "first": first,
        "second": second,
        "cached": cached,
        "ended": ended,
        "seconds": time.monotonic() - began,
    }
