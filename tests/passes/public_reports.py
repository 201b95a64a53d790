"""Inputs of public reports about collectives, each through torch's own pass and through ours: what came of it.

`CASES` by name: what torch gives, what we give, what is right. ``python -m tests.passes.public_reports`` prints the
table of docs/transformations.md.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any
from unittest.mock import patch

import torch
import torch._inductor.config as inductor_config
import torch.distributed as dist
from functorch.compile import make_boxed_func
from torch import fx, nn
from torch._dynamo.backends.common import aot_autograd
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import collective_identity as ci
import fsdp_hooks
from collective_identity import GRAD_REDUCE_SHARD, PARAM_UNSHARD, identity_of, launch_of, store
from collective_identity.subgraphs import graph_modules
from inductor_passes import bucket_collectives, dedup_reduce_scatters
from inductor_passes.reconcile import reconciled
from inductor_passes.upstream import inductor_option_exists
from inductor_passes.upstream_passes import symmetric_memory, upstream_passes
from tests.graphs import Builder, aten
from tests.passes import simulated_world
from tests.passes.upstream_graphs import SIZE, as_on_gpus, finished, world

CP, TP, USER, TP_SCATTER = "cp.kv_gather", "tp.activation_gather", "user.metric_scatter", "tp.output_reduce_scatter"
Facts = dict[str, Any]


@dataclass(frozen=True)
class Case:
    """One report: what torch does (None where this torch lacks the pass), what we do, what both should."""

    title: str
    right: Facts
    torchs: Callable[[], Facts | None]
    ours: Callable[[], Facts]


def start_nodes(gm: fx.GraphModule) -> list[fx.Node]:
    return [node for module in graph_modules(gm) for node in ci.start_nodes(module)]


def roles(gm: fx.GraphModule) -> list[str]:
    """Role of each collective that is left, sub-graphs included, sorted; ``"none"`` without one."""
    return sorted(one.role if (one := identity_of(node)) else "none" for node in start_nodes(gm))


def upstream(name: str, gm: fx.GraphModule) -> bool:
    """Run one of torch's passes; False when this torch lacks it."""
    found = upstream_passes().get(name)
    if found is not None:
        with as_on_gpus():
            found(gm)
    return found is not None


def values_kept(gm: fx.GraphModule, run: Callable[[fx.GraphModule], object]) -> bool:
    """Whether four pretended ranks get the same numbers after ``run`` as before it."""
    with patch.dict(simulated_world.GROUPS, {world(): ((0, 1, 2, 3),)}):  # type: ignore[arg-type]
        inputs, again = simulated_world.random_inputs(gm), simulated_world.random_inputs(gm)
        expected = simulated_world.run(gm, inputs)
        run(gm)
        return simulated_world.same(expected, simulated_world.run(gm, again))


# ---- a context-parallel gather on the group of the parameters ----


def shared_group() -> fx.GraphModule:
    b = Builder()
    shards = [b.placeholder(name, (8, 8)) for name in ("w0", "kv", "w1")]
    named = zip(shards, (PARAM_UNSHARD, CP, PARAM_UNSHARD), strict=True)
    return finished(b, *(b.all_gather(p, group=world(), size=SIZE, role=role).wait for p, role in named))


def both_shared(run: Callable[[fx.GraphModule], object]) -> Facts | None:
    gm = shared_group()
    return None if run(gm) is False else {"roles": roles(gm)}


# ---- reduce-scatter dedup: numbers ----


def scaled() -> fx.GraphModule:
    b = Builder()
    waits = [b.reduce_scatter(b.placeholder(n, (8, 2)), group=world(), size=SIZE, op="sum").wait for n in "ab"]
    return finished(b, b.call(aten.add.Tensor, *waits, alpha=2))


def broadcast() -> fx.GraphModule:
    b = Builder()
    a = b.reduce_scatter(b.placeholder("a", (8, 4, 1)), group=world(), size=SIZE, op="sum").wait
    c = b.reduce_scatter(b.placeholder("b", (4, 1)), group=world(), size=SIZE, op="sum").wait
    return finished(b, b.call(aten.add.Tensor, a, c))


def numbers(build: Callable[[], fx.GraphModule], ours: bool) -> Facts | None:
    gm = build()
    if ours:
        return {"same values": values_kept(gm, dedup_reduce_scatters)}
    if "dedup_reduce_scatters" not in upstream_passes():
        return None
    return {"same values": values_kept(gm, lambda gm: upstream("dedup_reduce_scatters", gm))}


# ---- reduce-scatter dedup: roles ----

PAIRS = {
    "same": (GRAD_REDUCE_SHARD, GRAD_REDUCE_SHARD),
    "two roles": (GRAD_REDUCE_SHARD, TP_SCATTER),
    "one role": (GRAD_REDUCE_SHARD, None),
}


def deduplicated(run: Callable[[fx.GraphModule], object]) -> Facts | None:
    found = {}
    for name, pair in PAIRS.items():
        b = Builder()
        waits = [
            b.reduce_scatter(b.placeholder(f"g{i}", (8, 8)), group=world(), size=SIZE, role=role).wait
            for i, role in enumerate(pair)
        ]
        gm = finished(b, b.call(aten.add.Tensor, *waits))
        if run(gm) is False:
            return None
        found[name] = roles(gm)
    return found


# ---- a bucket of two roles, and what is written around it ----


def scatters(run: Callable[[fx.GraphModule], object]) -> Facts:
    found: Facts = {}
    for name, pair in (("one role", (GRAD_REDUCE_SHARD,) * 2), ("two roles", (GRAD_REDUCE_SHARD, USER))):
        b = Builder()
        gm = finished(
            b,
            *(
                b.reduce_scatter(b.placeholder(f"g{i}", (8, 8)), group=world(), size=SIZE, role=role).wait
                for i, role in enumerate(pair)
            ),
        )
        run(gm)
        found[name] = roles(gm)
        carriers = [node for node in gm.graph.nodes if store.has_payload(node)]
        found["on helpers"] = found.get("on helpers", 0) + sum(launch_of(node) is None for node in carriers)
        shared = len(carriers) - len({id(node.meta["custom"]) for node in carriers})
        found["shared dicts"] = found.get("shared dicts", 0) + shared
    return found


# ---- robustness ----


def two_waits(run: Callable[[fx.GraphModule], object]) -> Facts | None:
    b = Builder()
    first = b.all_gather(b.placeholder("w0", (8, 8)), group=world(), size=SIZE, role=PARAM_UNSHARD)
    second = b.all_gather(b.placeholder("w1", (8, 8)), group=world(), size=SIZE, role=PARAM_UNSHARD)
    gm = finished(b, first.wait, b.wait(first.start), second.wait)
    result: list[object] = []
    try:
        same = values_kept(gm, lambda gm: result.append(run(gm)))
    except Exception as error:
        return {"same values": False, "raised": type(error).__name__}
    return None if result == [False] else {"same values": same, "raised": None}


def two_dtypes() -> fx.GraphModule:
    b = Builder()
    shards = [b.placeholder("a", (8,)), b.placeholder("b", (8,), dtype=torch.bfloat16)]
    return finished(b, *(b.all_gather(p, group=world(), size=SIZE, role=PARAM_UNSHARD).wait for p in shards))


def sent_dtypes(run: Callable[[fx.GraphModule], object]) -> Facts | None:
    gm = two_dtypes()
    if run(gm) is False:
        return None
    sent = {str(row.dtype).removeprefix("torch.") for row in ci.collective_table(gm)}
    return {"sent as": sorted(sent)}


def two_modes(gm: fx.GraphModule) -> bool:
    """The option of mixed buckets is on; the FSDP pass merges in its own mode."""
    option = "aten_distributed_optimizations.bucket_mode"
    values = {option: "custom_ops_multidtype"} if inductor_option_exists(option) else {}
    fsdp = importlib.import_module("torch._inductor.fx_passes.fsdp")
    with inductor_config.patch(values):  # type: ignore[attr-defined]
        fsdp.bucket_fsdp_all_gather(gm, lambda index: 100.0, "default")
    return bool(values)


def low_contention(put_right: bool) -> Facts | None:
    b = Builder()
    x = b.all_gather(b.placeholder("x", (8, 8)), group=world(), size=SIZE, role=TP)
    w = b.all_gather(b.placeholder("w", (8, 8)), group=world(), size=SIZE, role=PARAM_UNSHARD)
    gm = finished(b, b.call(aten.mm.default, x.wait, b.call(aten.permute.default, w.wait, [1, 0])))
    before = [one.start.meta["custom"] for one in (x, w)]
    with symmetric_memory(), as_on_gpus():
        if put_right:
            with reconciled(gm):
                upstream("low_contention", gm)
        elif not upstream("low_contention", gm):
            return None
    after = [node.meta.get("custom") for node in start_nodes(gm)]
    return {"roles": roles(gm), "shared dicts": sum(one is two for one in after for two in before)}


def devices(run: Callable[[fx.GraphModule], object]) -> Facts | None:
    """Shards offloaded to the CPU and copied to the GPU before their gather; then one that is not copied."""
    found: Facts = {}
    for name, copied in (("offloaded", (True, True)), ("two devices", (True, False))):
        b = Builder()
        waits = []
        for i, copy in enumerate(copied):
            shard = b.placeholder(f"w{i}", (8, 8))
            if copy:
                cpu, shard = shard, b.graph.call_function(aten._to_copy.default, (shard,), {"device": CUDA})
                shard.meta["val"] = b.empty(tuple(cpu.meta["val"].shape), device="cuda:0")
            waits.append(b.all_gather(shard, group=world(), size=SIZE, role=PARAM_UNSHARD).wait)
        gm = finished(b, *waits)
        try:
            if run(gm) is False:
                return None
        except Exception as error:
            found[name] = type(error).__name__
            continue
        found[name] = sorted(node.all_input_nodes[0].meta["val"].device.type for node in start_nodes(gm))
    return found


CUDA = torch.device("cuda:0")


def scheduled(put_right: bool) -> Facts:
    b = Builder()
    tensor_parallel = dist.new_group(list(range(SIZE))).group_name
    x = b.all_gather(b.placeholder("x", (8, 32)), group=tensor_parallel, size=SIZE, role=TP).wait
    for i in range(3):
        full = b.all_gather(b.placeholder(f"w{i}", (8, 32)), group=world(), size=SIZE, role=PARAM_UNSHARD).wait
        x = b.call(aten.mm.default, x, full)
    grads = [b.call(aten.mm.default, g, g) for g in (b.placeholder("g0", (32, 32)), b.placeholder("g1", (32, 32)))]
    outs = [b.reduce_scatter(g, group=world(), size=SIZE, role=GRAD_REDUCE_SHARD).wait for g in grads]
    gm = finished(b, x, *outs)
    with contextmanager(_nothing)() if not put_right else reconciled(gm):
        upstream("overlap", gm)
    wrong = sum(store.has_payload(node) and launch_of(node) is None for node in gm.graph.nodes)
    carriers = [node for node in gm.graph.nodes if store.has_payload(node)]
    shared = len(carriers) - len({id(node.meta["custom"]) for node in carriers})
    return {"roles": sorted(set(roles(gm))), "on helpers": wrong, "shared dicts": shared}


def _nothing() -> Iterator[None]:
    yield


# ---- what no graph shows ----


def lite(ours: bool) -> Facts:
    """A pass is configured, and lite mode runs none: is that said anywhere?"""
    called: list[fx.Graph] = []
    shards = [torch.ones(4, 8), torch.ones(4, 8)]
    group = world()

    def gathered(*shards: torch.Tensor) -> list[torch.Tensor]:
        ops = torch.ops._c10d_functional
        return [ops.wait_tensor(ops.all_gather_into_tensor(shard, SIZE, group)) for shard in shards]

    torch._dynamo.reset()
    with inductor_config.patch({"post_grad_custom_post_pass": called.append}):  # type: ignore[attr-defined]
        if not ours:
            torch.compile(gathered, mode="lite", fullgraph=True)(*shards)
            return {"reported": bool(called)}
        with ci.enable(agreement_timeout=0) as handle:
            torch.compile(gathered, backend="collective_identity", mode="lite", fullgraph=True)(*shards)
            (graph,) = handle.report().to_dict()["graphs"]
    return {"reported": graph["lite"] != "off" and not called}


def sharded() -> nn.Module:
    mesh = init_device_mesh("cpu", (SIZE,))
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    for layer in model:
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def not_captured(ours: bool) -> Facts:
    """FSDP2's collectives stay outside of the graphs: can a report tell that from collectives without a role?"""
    torch._dynamo.reset()
    model, batch = sharded(), torch.ones(3, 8, requires_grad=True)
    if not ours:
        seen: list[fx.Node] = []

        def look(gm: fx.GraphModule, inputs: object) -> Callable[..., Any]:
            seen.extend(start_nodes(gm))
            return make_boxed_func(gm.forward)

        backend = aot_autograd(fw_compiler=look, bw_compiler=look)
        torch.compile(model, backend=backend)(batch).sum().backward()
        return {"told": bool(seen)}
    with ci.enable(agreement_timeout=0) as handle:
        fsdp_hooks.install(model)
        call = torch.compile(model[0], backend="collective_identity", options={"inner": "aot_eager"})
        call(batch).sum().backward()
        counts = handle.report().to_dict()["counts"]
    return {"told": counts["explicit"] > 0 and counts["not_captured"] > 0 and counts["other"] == 0}


def each(name: str) -> Callable[[fx.GraphModule], bool]:
    return lambda gm: upstream(name, gm)


CASES: MappingProxyType[str, Case] = MappingProxyType(
    {
        "shared_group": Case(
            "parameters and a context-parallel gather share a group",
            {"roles": [CP, PARAM_UNSHARD]},
            lambda: both_shared(each("pre_bucket_fsdp")),
            lambda: both_shared(bucket_collectives) or {},
        ),
        "alpha": Case(
            "dedup of `RS(a) + 2·RS(b)`",
            {"same values": True},
            lambda: numbers(scaled, False),
            lambda: numbers(scaled, True) or {},
        ),
        "broadcast": Case(
            "dedup of shards that only broadcast",
            {"same values": True},
            lambda: numbers(broadcast, False),
            lambda: numbers(broadcast, True) or {},
        ),
        "dedup_roles": Case(
            "role of a deduplicated reduce-scatter",
            {"same": [GRAD_REDUCE_SHARD], "two roles": ["none"], "one role": ["none"]},
            lambda: deduplicated(each("dedup_reduce_scatters")),
            lambda: deduplicated(dedup_reduce_scatters) or {},
        ),
        "bucket_of_two_roles": Case(
            "two reduce-scatters in a bucket: of one role, of two",
            {
                "one role": [GRAD_REDUCE_SHARD],
                "on helpers": 0,
                "shared dicts": 0,
                "two roles": [GRAD_REDUCE_SHARD, USER],
            },
            lambda: scatters(each("bucket_reduce_scatters")),
            lambda: scatters(bucket_collectives),
        ),
        "two_waits": Case(
            "a gather waited for twice",
            {"same values": True, "raised": None},
            lambda: two_waits(each("bucket_all_gathers")),
            lambda: two_waits(bucket_collectives) or {},
        ),
        "two_bucket_modes": Case(
            "float32 and bfloat16 parameters under two bucket modes",
            {"sent as": ["bfloat16", "float32"]},
            lambda: sent_dtypes(two_modes),
            lambda: sent_dtypes(bucket_collectives) or {},
        ),
        "low_contention": Case(
            "lowering to low-contention collectives (ours: torch's pass, reconciled)",
            {"roles": [PARAM_UNSHARD, TP], "shared dicts": 0},
            lambda: low_contention(False),
            lambda: low_contention(True) or {},
        ),
        "devices": Case(
            "device of a gather: offloaded shards; shards of two devices",
            {"offloaded": ["cuda"], "two devices": ["cpu", "cuda"]},
            lambda: devices(each("pre_bucket_fsdp")),
            lambda: devices(bucket_collectives) or {},
        ),
        "overlap": Case(
            "roles after the overlap scheduler (ours: torch's pass, reconciled)",
            {"roles": [GRAD_REDUCE_SHARD, PARAM_UNSHARD, TP], "on helpers": 0, "shared dicts": 0},
            lambda: scheduled(False),
            lambda: scheduled(True),
        ),
        "lite": Case(
            "lite mode: no pass runs", {"reported": True}, lambda: lite(False), lambda: lite(True)
        ),
        "not_captured": Case(
            "FSDP2 whose collectives never enter a graph",
            {"told": True},
            lambda: not_captured(False),
            lambda: not_captured(True),
        ),
    }
)


def said(facts: Facts | None) -> str:
    """Facts as one cell of a table."""
    if facts is None:
        return "no such pass"
    return "; ".join(f"{k}: {', '.join(v) if isinstance(v, list) else v}" for k, v in facts.items())


def table() -> list[str]:
    """The lines of the docs table, from this run."""
    head = ["| input | torch's own pass | ours |", "| --- | --- | --- |"]
    return head + [f"| {case.title} | {said(case.torchs())} | {said(case.ours())} |" for case in CASES.values()]


if __name__ == "__main__":
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=4)
    print("\n".join(table()))
