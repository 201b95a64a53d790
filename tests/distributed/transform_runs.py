"""Random graphs of collectives, run on real ranks before and after every pass, and what must then be equal.

``python -m tests.distributed.transform_runs [--graphs N] [--seed S] [--ranks R]`` runs as many as wanted; a failure
names its seed.
"""

from __future__ import annotations

import argparse
import copy
import random
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import fx

from collective_identity import identity_of, members_of, start_nodes, store
from inductor_passes import bucket_collectives, dedup_reduce_scatters, fuse_tensor_parallel
from tests.distributed.launch import launch
from tests.graphs import Builder, aten

UNSHARD, REDUCE, REPLICATE = "fsdp.param_unshard", "fsdp.grad_reduce_shard", "fsdp.grad_replicate_reduce"
SHAPES: list[tuple[int, ...]] = [(4, 3), (8,), (4, 1, 5), (0, 3), (4, 0), (12, 2)]


class Graph:
    """Gathers, gradients scattered and added up, and tensor-parallel products, from one seed."""

    def __init__(self, seed: int, group: str, ranks: int) -> None:
        self.rng, self.b, self.group, self.ranks = random.Random(seed), Builder(), group, ranks
        self.outputs: list[fx.Node] = []
        self.count = 0

    def build(self) -> fx.GraphModule:
        steps: list[Callable[[], None]] = [self.gathers, self.sums, self.products]
        for step in self.rng.choices(steps, [3, 3, 2], k=self.rng.randint(2, 5)):
            step()
        self.b.output(*self.outputs)
        return self.b.module()

    def input(self, shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> fx.Node:
        self.count += 1
        first = next(iter(self.b.graph.nodes), None)
        if first is None:
            return self.b.placeholder(f"x{self.count}", shape, dtype=dtype)
        with self.b.graph.inserting_before(first):
            return self.b.placeholder(f"x{self.count}", shape, dtype=dtype)

    def role(self, fsdp: str) -> dict[str, Any]:
        role = self.rng.choices([fsdp, "tp.other", None], [6, 1, 1])[0]
        return {} if role is None else {"role": role, "param_group": self.rng.choice("ab")}

    def gathers(self) -> None:
        rng, b = self.rng, self.b
        for _ in range(rng.randint(2, 5)):
            x = self.input(rng.choice(SHAPES), rng.choice([torch.float32, torch.bfloat16, torch.int64, torch.bool]))
            made = b.all_gather(x, group=self.group, size=self.ranks, **self.role(UNSHARD))
            self.outputs += [made.wait, *([b.wait(made.start)] if rng.random() < 0.2 else [])]

    def sums(self) -> None:
        rng, b = self.rng, self.b
        dtype, shape = rng.choice([torch.float32, torch.float64]), (4 * self.ranks, rng.choice([1, 3]))
        shard = (4, shape[1])
        values = []
        for _ in range(rng.randint(2, 6)):
            x = b.call(aten.mul.Tensor, self.input(shape, dtype), 2)
            made = b.reduce_scatter(x, group=self.group, size=self.ranks, op="sum", **self.role(REDUCE))
            values.append(made.wait)
            if rng.random() < 0.2:
                self.outputs.append(made.wait)
        values += [self.input(shard, dtype) for _ in range(rng.randint(0, 2))]
        rng.shuffle(values)
        while len(values) > 1:
            scale = {"alpha": 2} if rng.random() < 0.1 else {}
            left, right = values.pop(rng.randrange(len(values))), values.pop(rng.randrange(len(values)))
            values.append(b.call(aten.add.Tensor, left, right, **scale))
        total = values[0]
        if rng.random() < 0.5:
            total = b.all_reduce(total, group=self.group, op="sum", **self.role(REPLICATE)).wait
        self.outputs.append(total)

    def products(self) -> None:
        rng, b = self.rng, self.b
        weights = [self.input((6, 4), torch.float64) for _ in range(rng.randint(1, 3))]
        down = self.input((4, 5), torch.float64)
        dim = rng.choice([0, 1])
        x = b.call(aten.mul.Tensor, self.input((2, 4, 6), torch.float64), 1)
        full = b.all_gather(x, group=self.group, size=self.ranks, role=rng.choice(["tp.in", UNSHARD])).wait
        if dim:
            full = b.cat([b.slice(full, 2 * i, 2 * i + 2) for i in range(self.ranks)], 1)
        shape = list(full.meta["val"].shape)
        flat = b.view(full, [-1, 6])
        hidden = [b.call(aten.mm.default, flat, w) for w in weights]
        self.outputs += hidden[1:] + ([full] if rng.random() < 0.3 else [])
        out = b.view(b.call(aten.mm.default, hidden[0], down), [*shape[:-1], 5])
        if dim:
            size = shape[1] // self.ranks
            out = b.cat([b.slice(out, i * size, (i + 1) * size, 1) for i in range(self.ranks)])
        self.outputs.append(b.reduce_scatter(out, group=self.group, size=self.ranks, op="sum", role="tp.out").wait)


PASSES: dict[str, Callable[[fx.GraphModule], Any]] = {
    "bucket": bucket_collectives,
    "bucket by name": lambda gm: bucket_collectives(gm, order="fqn"),
    "bucket across units, as bytes": lambda gm: bucket_collectives(gm, order="graph", mixed_dtypes=True),
    "dedup": dedup_reduce_scatters,
    "dedup equals": lambda gm: dedup_reduce_scatters(gm, mixed="refuse"),
    "fuse": lambda gm: fuse_tensor_parallel(gm, enabled=lambda group: True),
    "all": lambda gm: (
        fuse_tensor_parallel(gm, enabled=lambda group: True), dedup_reduce_scatters(gm), bucket_collectives(gm)
    ),
}
REASSOCIATES = ("dedup", "dedup equals", "fuse", "all")


def inputs_for(gm: fx.GraphModule, seed: int, integers: bool) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    row = []
    for node in gm.graph.nodes:
        if node.op == "placeholder":
            value = node.meta["val"]
            tensor = torch.randn(value.shape, generator=generator) * 8
            row.append((tensor.round().clamp(-2, 2) if integers else tensor).to(value.dtype))
    return row


def magnitude(tensor: torch.Tensor) -> torch.Tensor:
    return tensor if tensor.dtype is torch.bool else tensor.abs()


def roles(gm: fx.GraphModule) -> Counter[str]:
    """What producers said, on collectives, in the records of merged ones and in those of what was fused."""
    found: Counter[str] = Counter()
    for node in start_nodes(gm):
        record, identity = members_of(node), identity_of(node)
        members = [identity] if record is None else [m.identity for m in record.members]
        found.update(m.role for m in members if m is not None and m.explicit)
    for node in gm.graph.nodes:
        record = members_of(node)
        if store.dropped_of(node) is not None and node not in start_nodes(gm) and record is not None:
            found.update(m.identity.role for m in record.members if m.identity is not None)
    return found


def fused_on_cpu() -> torch.library.Library:
    """Have torch's own definition of the fused operators run on CPU tensors too."""
    from torch.distributed import _symmetric_memory as symmetric

    library = torch.library.Library("symm_mem", "IMPL")
    library.impl("fused_all_gather_matmul", symmetric._fused_all_gather_matmul_fallback, "CPU")
    library.impl("fused_matmul_reduce_scatter", symmetric._fused_matmul_reduce_scatter_fallback, "CPU")
    return library


class Before:
    """What one graph computes before any pass, for small integers and for any numbers; each asked for once."""

    def __init__(self, rank: int, ranks: int, group: str, seed: int) -> None:
        self.gm, self.ranks = Graph(seed, group, ranks).build(), ranks
        self.roles, self.count = roles(self.gm), len(start_nodes(self.gm))
        self._seed = 1000 * seed + rank
        self._known: dict[bool, tuple[list[torch.Tensor], Any, Any]] = {}

    def values(self, integers: bool) -> tuple[list[torch.Tensor], Any, Any]:
        """Inputs, outputs, and the outputs for the inputs' magnitudes."""
        if integers not in self._known:
            tensors = inputs_for(self.gm, self._seed, integers)
            magnitudes = None if integers else self.gm(*map(magnitude, tensors))
            self._known[integers] = tensors, self.gm(*tensors), magnitudes
        return self._known[integers]

    def copied(self) -> fx.GraphModule:
        """The graph again, sharing no dict with the first."""
        graph = fx.Graph()
        new: dict[fx.Node, fx.Node] = {}
        for node in self.gm.graph.nodes:
            new[node] = graph.node_copy(node, lambda n: new[n])
            if "custom" in node.meta:
                new[node].meta["custom"] = copy.deepcopy(node.meta["custom"])
        return fx.GraphModule(torch.nn.Module(), graph)


def check_one(before: Before, integers: bool, name: str, run: Callable[[fx.GraphModule], Any]) -> int:
    """One graph before and after one pass; returns how many collectives the pass took away."""
    gm = before.copied()
    tensors, expected, magnitudes = before.values(integers)
    addends = max(8 * before.ranks * before.ranks, 24 * before.ranks)  # what `sums` and `products` add up at most
    run(gm)
    gm.graph.lint()
    if name != "all":
        assert roles(gm) == before.roles, f"a role is neither there nor on record: {before.roles}, {roles(gm)}"
    found = gm(*tensors)
    for i, (x, y) in enumerate(zip(expected, found, strict=True)):
        assert x.dtype == y.dtype and x.shape == y.shape, f"output {i} is {y.dtype} {y.shape}, not {x.dtype} {x.shape}"
        if torch.equal(x, y):
            continue
        assert name in REASSOCIATES and magnitudes is not None and x.dtype.is_floating_point, (
            f"output {i}: {(x - y).abs().max()} apart"
        )
        limit = addends * torch.finfo(x.dtype).eps * magnitudes[i].abs()
        assert bool(((x - y).abs() <= limit).all()), f"output {i}: {(x - y).abs().max()} apart"
    return before.count - len(start_nodes(gm))


def check(rank: int, ranks: int, seeds: list[int]) -> dict[str, int]:
    """Every graph before and after every pass; returns how many collectives each pass took away."""
    library = fused_on_cpu()
    group = dist.group.WORLD.group_name  # type: ignore[union-attr]
    saved: Counter[str] = Counter()
    for seed in seeds:
        before = Before(rank, ranks, group, seed)
        for name, run in PASSES.items():
            integers = name == "all" or (ranks > 2 and name not in REASSOCIATES) or seed % 2 == 0
            try:
                saved[name] += check_one(before, integers, name, run)
            except Exception as error:
                raise AssertionError(f"seed {seed}, pass {name!r}, {ranks} ranks: {error}") from error
    del library
    return dict(saved)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--graphs", type=int, default=1000, help="how many (default 1000)")
    parser.add_argument("--seed", type=int, default=int(time.time()) % 10**6, help="of the first graph")
    parser.add_argument("--ranks", type=int, default=2)
    given = parser.parse_args()
    print(f"seeds {given.seed} to {given.seed + given.graphs - 1} on {given.ranks} ranks", flush=True)
    seeds = list(range(given.seed, given.seed + given.graphs))
    print(launch(check, given.ranks, seeds, timeout=5 * given.graphs)[0])
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
