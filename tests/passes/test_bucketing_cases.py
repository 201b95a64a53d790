"""Inputs of public bug reports on bucketing, and variants of each kind: expected values stated here.

Graphs are traced, not built by hand, so that they look as a compiler's do; the process group is a fake one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import fx
from torch.fx.experimental.proxy_tensor import make_fx

from collective_identity.identity import Identity, Source
from collective_identity.store import identity_of, members_of, stamp
from collective_identity.transports import Transport, is_start, launch_of, start_nodes
from inductor_passes.bucketing import Plan, bucket_collectives, plan_buckets
from tests.graphs import Builder

C = torch.ops._c10d_functional
aten = torch.ops.aten
UNSHARD, REDUCE = "fsdp.param_unshard", "fsdp.grad_reduce_shard"
Group = Callable[[list[int]], str]


def ag(x: torch.Tensor, size: int, group: str) -> torch.Tensor:
    return C.wait_tensor(C.all_gather_into_tensor(x, size, group))


def rs(x: torch.Tensor, op: str, size: int, group: str) -> torch.Tensor:
    return C.wait_tensor(C.reduce_scatter_tensor(x, op, size, group))


def trace(fn: Callable[..., Any], *args: torch.Tensor, mode: str = "fake") -> fx.GraphModule:
    return make_fx(fn, tracing_mode=mode)(*args)


def label(gm: fx.GraphModule, roles: list[str | None], source: Source = Source.EXPLICIT) -> fx.GraphModule:
    for node, role in zip(start_nodes(gm), roles, strict=True):
        if role is not None:
            stamp(node, Identity(version=1, role=role, source=source, producer="test"))
    return gm


def roles(gm: fx.GraphModule) -> list[str | None]:
    found = [identity_of(n) for n in start_nodes(gm)]
    return [None if i is None else i.role for i in found]


def bucket(gm: fx.GraphModule, **options: Any) -> Plan:
    plan = bucket_collectives(gm, **options)
    gm.graph.lint()
    return plan


def count(gm: fx.GraphModule, transport: Transport) -> int:
    return sum(1 for n in start_nodes(gm) if launch_of(n).transport is transport)  # type: ignore[union-attr]


# ---- one group shared with a context-parallel gather


def shared_group(group: str) -> fx.GraphModule:
    def f(w0: torch.Tensor, w1: torch.Tensor, kv: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
        a = ag(w0, 2, group)
        k = ag(kv, 2, group)
        b = ag(w1, 2, group)
        return (q @ a) @ b + k.sum()

    return trace(f, *(torch.randn(4, 8) for _ in range(3)), torch.randn(3, 8))


@pytest.mark.parametrize("other", ["cp.kv_gather", "user.metric_gather", "tp.activation_gather"])
def test_a_bucket_does_not_take_in_another_role_on_its_group(new_group: Group, other: str) -> None:
    gm = label(shared_group(new_group([0, 1])), [UNSHARD, other, UNSHARD])
    first, foreign, last = start_nodes(gm)
    plan = bucket(gm)
    assert [b.members for b in plan.buckets] == [(first, last)]
    assert sorted(map(str, roles(gm))) == sorted([UNSHARD, other])
    assert foreign in start_nodes(gm)


def test_nor_an_unlabelled_one_whose_identity_is_absent(new_group: Group) -> None:
    gm = label(shared_group(new_group([0, 1])), [UNSHARD, None, UNSHARD])
    before = start_nodes(gm)
    bucket(gm, identities={n: identity_of(n) for n in before})
    assert count(gm, Transport.ALL_GATHER) == 2 and before[1] in start_nodes(gm)


def test_same_ranks_under_another_name_is_another_group(new_group: Group) -> None:
    one, two = new_group([0, 1]), new_group([0, 1])
    gm = trace(lambda a, b: (ag(a, 2, one), ag(b, 2, two)), torch.randn(4, 8), torch.randn(4, 8))
    assert bucket(label(gm, [UNSHARD, UNSHARD])).buckets == ()


# ---- what a bucket carries


def scatters(new_group: Group, labels: list[str | None], source: Source = Source.EXPLICIT) -> fx.GraphModule:
    group = new_group([0, 1])
    gm = trace(lambda a, b: (rs(a, "sum", 2, group), rs(b, "sum", 2, group)), torch.randn(4, 8), torch.randn(4, 8))
    return label(gm, labels, source)


def test_same_role_is_kept_without_alias_and_without_spread(new_group: Group) -> None:
    gm = scatters(new_group, [REDUCE, REDUCE])
    dicts = [n.meta["custom"] for n in start_nodes(gm)]
    bucket(gm)
    assert roles(gm) == [REDUCE]
    carriers = [n for n in gm.graph.nodes if n.meta.get("custom")]
    assert carriers == start_nodes(gm)
    assert all(carriers[0].meta["custom"] is not d for d in dicts)


@pytest.mark.parametrize("labels", [
    [REDUCE, "user.metric_scatter"], ["user.metric_scatter", REDUCE], ["user.a", "user.a"],
])
def test_other_roles_are_not_merged_and_lose_nothing(new_group: Group, labels: list[str | None]) -> None:
    gm = scatters(new_group, labels)
    assert bucket(gm).buckets == ()
    assert roles(gm) == labels
    assert all(members_of(n) is None for n in gm.graph.nodes)


def test_inferred_stays_inferred(new_group: Group) -> None:
    gm = scatters(new_group, [REDUCE, REDUCE], Source.INFERRED)
    given = {n: identity_of(n) for n in start_nodes(gm)}
    bucket(gm, identities=given)
    merged = identity_of(start_nodes(gm)[0])
    assert merged is not None and merged.source is Source.INFERRED


# ---- several waits on one start


@pytest.mark.parametrize("waits", [2, 3])
def test_a_gather_that_is_waited_for_several_times(new_group: Group, waits: int) -> None:
    group = new_group([0, 2])

    def f(w0: torch.Tensor, w1: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        start = C.all_gather_into_tensor(w0, 2, group)
        total = x @ ag(w1, 2, group)
        for _ in range(waits):
            total = total + x @ C.wait_tensor(start)
        return total

    gm = label(trace(f, torch.randn(4, 8), torch.randn(4, 8), torch.randn(3, 8)), [UNSHARD, UNSHARD])
    assert len(bucket(gm).buckets) == 1
    assert count(gm, Transport.ALL_GATHER) == 1


# ---- dtypes and devices


@pytest.mark.parametrize("dtypes", [
    [torch.float32, torch.bfloat16], [torch.float32, torch.float64], [torch.float16, torch.bfloat16],
])
def test_dtypes_do_not_mix_and_none_changes(new_group: Group, dtypes: list[torch.dtype]) -> None:
    group = new_group([0, 1])
    shards = [torch.randn(4, 8).to(d) for d in dtypes for _ in range(2)]
    gm = trace(lambda *xs: tuple(ag(x, 2, group) + 0 for x in xs), *shards)
    bucket(label(gm, [UNSHARD] * 4))
    assert count(gm, Transport.ALL_GATHER) == 2
    out = gm.graph.output_node().args[0]
    assert [n.meta["val"].dtype for n in out] == [s.dtype for s in shards]  # type: ignore[union-attr]
    assert [n.meta["val"].dtype for n in start_nodes(gm)] == dtypes


@pytest.mark.parametrize("mixed", [False, True])
def test_a_copy_to_the_device_stays_outside_and_devices_do_not_mix(mixed: bool) -> None:
    b = Builder()
    parameters = [b.placeholder(f"w{i}") for i in range(2)]
    waits = []
    for i, w in enumerate(parameters):
        sent = w if mixed and i else b.call(aten._to_copy.default, w, device=torch.device("cuda:0"))
        waits.append(b.all_gather(sent, role=UNSHARD).wait)
    b.output(*waits)
    gm = b.module()
    plan = bucket(gm)
    devices = [str(n.meta["val"].device) for n in start_nodes(gm)]
    assert devices == (["cuda:0", "cpu"] if mixed else ["cuda:0"])
    assert len(plan.buckets) == (0 if mixed else 1)
    copies = [n for n in gm.graph.nodes if n.target is aten._to_copy.default]
    assert len(copies) == (1 if mixed else 2)
    if not mixed:
        tensors = [n.meta["val"] for n in gm.graph.nodes
                   if n.op == "call_function" and isinstance(n.meta["val"], torch.Tensor)]
        assert {t.device.type for t in tensors} == {"cuda"}, "nothing was moved back"


# ---- FSDP, tensor parallel and gradients in one graph


def test_every_role_is_readable_and_the_tensor_parallel_gather_is_left_alone(new_group: Group) -> None:
    dp, tp = new_group([0, 2]), new_group([0, 1])
    activation = "tp.activation_gather"

    def f(w0: Any, w1: Any, w2: Any, x: Any, g0: Any, g1: Any) -> Any:
        x = ag(x, 2, tp)
        h = x @ ag(w0, 2, dp)
        h = h @ ag(w1, 2, dp)
        h = h @ ag(w2, 2, dp)
        return h, rs(g0 @ g0, "avg", 2, dp), rs(g1 @ g1, "avg", 2, dp)

    gm = trace(f, *(torch.randn(4, 8) for _ in range(4)), torch.randn(8, 8), torch.randn(8, 8))
    label(gm, [activation, UNSHARD, UNSHARD, UNSHARD, REDUCE, REDUCE])
    (foreign, *_) = start_nodes(gm)
    bucket(gm)
    assert sorted(map(str, roles(gm))) == sorted([activation, UNSHARD, REDUCE])
    assert foreign in start_nodes(gm) and members_of(foreign) is None


# ---- faults of other passes that are easily repeated


def test_caps_are_read_per_bucket(new_group: Group) -> None:
    group = new_group([0, 1])
    gm = trace(lambda *xs: tuple(ag(x, 2, group) for x in xs), *(torch.randn(4, 8) for _ in range(6)))
    one = 256 / 2**20
    plan = plan_buckets(label(gm, [UNSHARD] * 6), cap_mb=[2 * one, 4 * one])
    assert [len(b.members) for b in plan.buckets] == [2, 4]


def test_replicate_reductions_merge_and_a_loss_reduction_does_not(new_group: Group) -> None:
    shard, replicate = new_group([0, 1]), new_group([0, 2])

    def f(a: Any, b: Any, loss: Any) -> Any:
        return (*(C.wait_tensor(C.all_reduce(rs(g, "avg", 2, shard), "avg", replicate)) for g in (a, b)),
                C.wait_tensor(C.all_reduce(loss, "avg", shard)))

    gm = trace(f, torch.randn(4, 8), torch.randn(4, 8), torch.randn(()))
    label(gm, [REDUCE, "fsdp.grad_replicate_reduce"] * 2 + ["user.loss"])
    bucket(gm)
    assert [count(gm, t) for t in (Transport.REDUCE_SCATTER, Transport.ALL_REDUCE)] == [1, 2]
    assert sum(map(is_start, gm.graph.nodes)) == 3


def test_an_input_that_is_written_between_members_is_read_before_the_write(new_group: Group) -> None:
    group = new_group([0, 1])

    def f(a: torch.Tensor, b: torch.Tensor) -> Any:
        first = ag(a, 2, group)
        a.mul_(2)
        return first, ag(a, 2, group), ag(b, 2, group)

    gm = trace(f, torch.randn(4, 8), torch.randn(4, 8))
    before, *after = start_nodes(gm)
    plan = bucket(label(gm, [UNSHARD] * 3))
    assert [b.members for b in plan.buckets] == [tuple(after)]
    order = list(gm.graph.nodes)
    write = next(n for n in order if n.target is aten.mul_.Tensor)
    assert order.index(before) < order.index(write) < order.index(start_nodes(gm)[1])
