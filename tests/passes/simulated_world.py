"""Run one graph on several pretended ranks in one process: collectives are computed over the ranks' values.

    results = run(gm, inputs)        # inputs[rank] = one tensor per placeholder; results[rank] = outputs

Ranks go through the graph in step. A reduction adds up in rank order, element by element, so what it yields
does not depend on how elements are laid out, and a right bucket is equal bit for bit.

A collective is under way until it is waited for: its result is no number before that, and nobody may write meanwhile
to what it sends.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from collective_identity.subgraphs import wrapped_body
from collective_identity.transports import Launch, Transport, is_wait, launch_of
from inductor_passes.bucketing import Plan, bucket_collectives

WORLD = 4
GROUPS: Mapping[str, tuple[tuple[int, ...], ...]] = {
    "dp": ((0, 1), (2, 3)),
    "other": ((0, 1), (2, 3)),
    "tp": ((0, 2), (1, 3)),
    "world": ((0, 1, 2, 3),),
    "self": ((0,), (1,), (2,), (3,)),
}
SIZES: Mapping[str, int] = {name: len(rows[0]) for name, rows in GROUPS.items()}


def random_inputs(gm: fx.GraphModule, seed: int = 0) -> list[list[torch.Tensor]]:
    """One tensor per placeholder and rank, of the shape, strides and dtype that the graph expects."""
    generator = torch.Generator().manual_seed(seed)
    inputs: list[list[torch.Tensor]] = []
    for _ in range(WORLD):
        row = []
        for node in gm.graph.nodes:
            if node.op == "placeholder":
                value = node.meta["val"]
                filled = torch.randint(-64, 64, tuple(value.shape), generator=generator).to(value.dtype)
                tensor = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype)
                row.append(tensor.copy_(filled / 8))
        inputs.append(row)
    return inputs


@dataclass(frozen=True, eq=False)
class UnderWay:
    """One tensor that one collective sends on one rank: what it held, and what to put where in the end."""

    sent: torch.Tensor
    held: torch.Tensor
    received: torch.Tensor
    result: torch.Tensor


def run(gm: fx.GraphModule, inputs: Sequence[Sequence[torch.Tensor]], seed: int = 0) -> list[Any]:
    """What each rank's graph returns. Inputs are written to if the graph writes to them."""
    torch.manual_seed(seed)
    env: dict[fx.Node, list[Any]] = {}
    under_way: list[UnderWay] = []
    feeds = [iter(row) for row in inputs]
    for node in gm.graph.nodes:
        args = [fx.map_arg((node.args, node.kwargs), lambda n, r=rank: env[n][r]) for rank in range(WORLD)]
        launch = launch_of(node)
        if node.op == "placeholder":
            env[node] = [next(feed) for feed in feeds]
        elif node.op == "get_attr":
            env[node] = [operator.attrgetter(str(node.target))(gm)] * WORLD
        elif node.op == "output":
            return [a[0][0] for a in args]
        elif str(node.target).startswith("symm_mem.fused"):
            env[node] = _fused(str(node.target), [a for a, _ in args], [k for _, k in args])
        elif launch is not None:
            env[node] = _launched(node, launch, env, under_way)
        elif is_wait(node):
            env[node] = [a[2] if wrapped_body(node) is not None else a[0] for a, _ in args]
            for received in env[node]:
                _arrived(received, under_way)
        elif wrapped_body(node) is not None:
            env[node] = [a[1](*a[2:]) for a, _ in args]
        else:
            env[node] = [node.target(*a, **k) for a, k in args]
    raise AssertionError("the graph has no output")


def _launched(
    node: fx.Node, launch: Launch, env: Mapping[fx.Node, list[Any]], under_way: list[UnderWay]
) -> list[Any]:
    """Start a collective: what each rank gets is no number until it is waited for."""
    handles: list[list[torch.Tensor]] = [[] for _ in range(WORLD)]
    several = launch.form == "coalesced"
    for sent in ([env[i] for i in launch.inputs]):
        results = _collective(launch, sent)
        for rank, result in enumerate(results):
            held = sent[rank].clone()
            if launch.form == "out":
                received = env[node.kwargs["out"]][rank]  # type: ignore[index]
            else:
                received = sent[rank] if str(node.target).rpartition(".")[0].endswith("_") else result.clone()
            under_way.append(UnderWay(sent[rank], received if received is sent[rank] else held, received, result))
            received.fill_(-99 if received.dtype is not torch.bool else True)
            handles[rank].append(received)
    return handles if several else [handle[0] for handle in handles]


def _arrived(received: torch.Tensor, under_way: list[UnderWay]) -> None:
    """Finish whatever writes to the memory of this tensor."""
    memory = received.untyped_storage()._cdata
    for one in [one for one in under_way if one.received.untyped_storage()._cdata == memory]:
        assert torch.equal(one.sent, one.held), "written while a collective was sending it"
        one.received.copy_(one.result)
        under_way.remove(one)


def same(a: Any, b: Any) -> bool:
    """Bitwise equal, with equal dtypes, shapes and structure."""
    if isinstance(a, torch.Tensor):
        return a.dtype == b.dtype and a.shape == b.shape and torch.equal(a, b)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(same(x, y) for x, y in zip(a, b, strict=True))
    return bool(a == b)


def bucketed(gm: fx.GraphModule, **options: Any) -> Plan:
    """Bucket and check that every pretended rank still gets the same values, bit for bit."""
    inputs, again = random_inputs(gm), random_inputs(gm)
    expected = run(gm, inputs)
    plan = bucket_collectives(gm, **options)
    gm.graph.lint()
    assert same(expected, run(gm, again)) and same(inputs, again)
    return plan


def _collective(launch: Launch, sent: list[torch.Tensor]) -> list[torch.Tensor]:
    assert launch.group is not None
    received: list[torch.Tensor] = [torch.empty(0)] * WORLD
    for ranks in GROUPS[launch.group]:
        parts = [sent[r].contiguous() for r in ranks]
        for place, rank in enumerate(ranks):
            if launch.transport is Transport.ALL_GATHER:
                received[rank] = torch.cat(parts)
                continue
            total = _reduce(launch.reduce_op, parts)
            if launch.transport is Transport.ALL_REDUCE:
                received[rank] = total.clone()
            else:
                rows = total.shape[0] // len(ranks)
                received[rank] = total[place * rows:(place + 1) * rows].clone()
    return received


def _fused(name: str, args: list[Any], kwargs: list[Any]) -> list[Any]:
    """Gather and multiply, or multiply, reduce and scatter, along a dimension, as the fused operators say."""
    results: list[Any] = [None] * WORLD
    *_, dim, group = args[0]
    for ranks in GROUPS[group]:
        if "all_gather" in name:
            whole = torch.cat([args[r][0] for r in ranks], dim)
            for r in ranks:
                kept = whole.clone() if kwargs[r].get("return_A", True) else None
                results[r] = (kept, [torch.matmul(whole, b) for b in args[r][1]])
        else:
            total = _reduce(args[0][2], [torch.matmul(args[r][0], args[r][1]) for r in ranks])
            for r, part in zip(ranks, total.chunk(len(ranks), dim), strict=True):
                results[r] = part.contiguous()
    return results


def _reduce(op: str | None, parts: list[torch.Tensor]) -> torch.Tensor:
    if op in ("min", "max", "product"):
        combine = {"min": torch.minimum, "max": torch.maximum, "product": torch.mul}[op]
        return functools.reduce(combine, parts)
    total = functools.reduce(torch.add, parts)
    return total / len(parts) if op == "avg" else total
