"""Random graphs of collectives, run on real ranks before and after every pass, and what must then be equal.

``python -m tests.distributed.transform_runs [--graphs N] [--seed S] [--ranks R]`` runs as many as wanted; a failure
names its seed.
"""

from __future__ import annotations

import argparse
import copy
import math
import operator
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import fx

from collective_identity import identity_of, members_of, start_nodes, store
from inductor_passes import bucket_collectives, dedup_reduce_scatters, fuse_tensor_parallel
from inductor_passes.bucketing import BUCKETED
from inductor_passes.overlap import apply_overlap, plan_overlap
from tests.distributed.launch import launch
from tests.distributed.transform_graphs import Graph

Values = list[torch.Tensor]
AT_ONCE, BY_ALL = 64, 32  # graphs prepared before any runs; every 32nd of them is prepared by each rank


def fused(gm: fx.GraphModule) -> None:
    fuse_tensor_parallel(gm, enabled=lambda group: True)


def overlapped(gm: fx.GraphModule) -> None:
    if apply_overlap(gm, plan_overlap(gm)):
        gm.recompile()


def everything(gm: fx.GraphModule) -> None:
    for run in (fused, dedup_reduce_scatters, bucket_collectives, overlapped):
        run(gm)


PASSES: dict[str, Callable[[fx.GraphModule], object]] = {
    "bucket": bucket_collectives,
    "bucket for kernels": lambda gm: bucket_collectives(gm, kernels="triton"),
    "bucket by name, coalesced": lambda gm: bucket_collectives(gm, order="fqn", coalesced=BUCKETED),
    "bucket across units, as bytes": lambda gm: bucket_collectives(gm, order="graph", mixed_dtypes=True),
    "dedup": dedup_reduce_scatters,
    "dedup equals": lambda gm: dedup_reduce_scatters(gm, mixed="refuse"),
    "fuse": fused,
    "overlap": overlapped,
    "all": everything,
}
REASSOCIATES = ("dedup", "dedup equals", "fuse", "all")


@dataclass(frozen=True, slots=True)
class Prepared:
    """One graph before and after every pass, as code: one rank prepares it, all run it.

    Attributes:
        seed: that of the graph.
        inputs: shape and element type of each.
        before: its code.
        after: by pass, the code, and how many collectives the pass took away.
    """

    seed: int
    inputs: tuple[tuple[tuple[int, ...], torch.dtype], ...]
    before: str
    after: dict[str, tuple[str, int]]

    @staticmethod
    def of(seed: int, group: str, ranks: int) -> Prepared:
        gm = Graph(seed, group, ranks).build()
        said, count = roles(gm), len(start_nodes(gm))
        values = [node.meta["val"] for node in gm.graph.nodes if node.op == "placeholder"]
        after = {}
        for name, run in PASSES.items():
            changed = copied(gm)
            with naming(seed, name, ranks):
                run(changed)
                changed.graph.lint()
                found = roles(changed)
                assert name == "all" or found == said, f"a role is neither there nor on record: {said}, {found}"
            after[name] = (changed.code, count - len(start_nodes(changed)))
        return Prepared(seed, tuple((tuple(v.shape), v.dtype) for v in values), gm.code, after)

    def values(self, rank: int, integers: bool) -> Values:
        """This rank's inputs: small integers, or any numbers."""
        generator = torch.Generator().manual_seed(1000 * self.seed + rank)
        row = []
        for shape, dtype in self.inputs:
            tensor = torch.randn(shape, generator=generator) * 8
            row.append((tensor.round().clamp(-2, 2) if integers else tensor).to(dtype))
        return row


def copied(gm: fx.GraphModule) -> fx.GraphModule:
    """The graph again, sharing no dict with the first."""
    graph = fx.Graph()
    new: dict[fx.Node, fx.Node] = {}
    for node in gm.graph.nodes:
        new[node] = graph.node_copy(node, lambda n: new[n])
        if "custom" in node.meta:
            new[node].meta["custom"] = copy.deepcopy(node.meta["custom"])
    return fx.GraphModule(torch.nn.Module(), graph)


@contextmanager
def naming(seed: int, name: str, ranks: int) -> Iterator[None]:
    """Say of any failure which graph and pass it is of."""
    try:
        yield
    except Exception as error:
        raise AssertionError(f"seed {seed}, pass {name!r}, {ranks} ranks: {error}") from error


def roles(gm: fx.GraphModule) -> Counter[str]:
    """What producers said, on collectives, in the records of merged ones and in those of what was fused."""
    found: Counter[str] = Counter()
    starts = set(start_nodes(gm))
    for node in starts:
        record, identity = members_of(node), identity_of(node)
        members = [identity] if record is None else [m.identity for m in record.members]
        found.update(m.role for m in members if m is not None and m.explicit)
    for node in gm.graph.nodes:
        record = members_of(node)
        if node not in starts and store.dropped_of(node) is not None and record is not None:
            found.update(m.identity.role for m in record.members if m.identity is not None)
    return found


def fused_on_cpu() -> torch.library.Library:
    """Have torch's own definition of the fused operators run on CPU tensors too."""
    from torch.distributed import _symmetric_memory as symmetric

    library = torch.library.Library("symm_mem", "IMPL")
    library.impl("fused_all_gather_matmul", symmetric._fused_all_gather_matmul_fallback, "CPU")
    library.impl("fused_matmul_reduce_scatter", symmetric._fused_matmul_reduce_scatter_fallback, "CPU")
    return library


def execute(code: str, inputs: Values) -> Values:
    """Outputs of a graph's code, and what it left in its inputs."""
    names = {"torch": torch, "device": torch.device, "operator": operator, "inf": math.inf, "nan": math.nan}
    exec(code, names)
    with torch.inference_mode():
        own = [tensor.clone() for tensor in inputs]
        return [*names["forward"](None, *own), *own]  # type: ignore[operator]


class Runs:
    """What one graph's codes compute on this rank: each asked for once, whichever passes end in it."""

    def __init__(self, prepared: Prepared, rank: int) -> None:
        self._prepared, self._rank = prepared, rank
        self._known: dict[tuple[str, bool], Values] = {}
        self._magnitudes: Values | None = None

    def of(self, code: str, integers: bool) -> Values:
        if (code, integers) not in self._known:
            self._known[code, integers] = execute(code, self._prepared.values(self._rank, integers))
        return self._known[code, integers]

    def magnitudes(self) -> Values:
        """The outputs for the inputs' magnitudes: the sums of what is added up, without signs."""
        if self._magnitudes is None:
            inputs = [t if t.dtype is torch.bool else t.abs() for t in self._prepared.values(self._rank, False)]
            self._magnitudes = execute(self._prepared.before, inputs)
        return self._magnitudes


def compare(prepared: Prepared, rank: int, ranks: int) -> None:
    """One graph before and after every pass. Every rank takes the same turns: what it runs communicates."""
    runs = Runs(prepared, rank)
    addends = max(8 * ranks * ranks, 24 * ranks)  # what `sums` and `products` add up at most
    for name, (code, _) in prepared.after.items():
        integers = name == "all" or (ranks > 2 and name not in REASSOCIATES) or prepared.seed % 2 == 0
        reassociated = name in REASSOCIATES and not integers
        expected, found = runs.of(prepared.before, integers), runs.of(code, integers)
        magnitudes = runs.magnitudes() if reassociated else expected
        with naming(prepared.seed, name, ranks):
            for i, (x, y, m) in enumerate(zip(expected, found, magnitudes, strict=True)):
                assert (x.dtype, x.shape) == (y.dtype, y.shape), f"output {i} is {y.dtype} {y.shape}"
                if torch.equal(x, y):
                    continue
                apart = (x - y).abs()
                assert reassociated and x.dtype.is_floating_point, f"output {i}: {apart.max()} apart"
                assert bool((apart <= addends * torch.finfo(x.dtype).eps * m.abs()).all()), f"output {i}: {apart.max()}"


def check(group: dist.ProcessGroup, seeds: Sequence[int]) -> dict[str, int]:
    """Every graph before and after every pass, on the ranks of a group; how many collectives each took away."""
    rank, ranks = group.rank(), group.size()
    saved: Counter[str] = Counter(dict.fromkeys(PASSES, 0))
    for first in range(0, len(seeds), AT_ONCE):
        some = seeds[first:first + AT_ONCE]
        ours = [seed for i, seed in enumerate(some) if i % ranks == rank or i % BY_ALL == 0]
        everybodys: list[Any] = [None] * ranks
        dist.all_gather_object(
            everybodys, [Prepared.of(seed, group.group_name, ranks) for seed in ours], group=group
        )
        by_seed: dict[int, Prepared] = {}
        for one in (one for theirs in everybodys for one in theirs):
            assert by_seed.setdefault(one.seed, one) == one, f"seed {one.seed}: ranks decide differently"
        for seed in some:
            compare(by_seed[seed], rank, ranks)
            saved.update({name: fewer for name, (_, fewer) in by_seed[seed].after.items()})
    return dict(saved)


def on_all(rank: int, ranks: int, seeds: Sequence[int]) -> dict[str, int]:
    """Run these on all ranks."""
    library = fused_on_cpu()
    saved = check(dist.group.WORLD, seeds)  # type: ignore[arg-type]
    del library
    return saved


def on_pairs_and_all(rank: int, ranks: int, in_pairs: Sequence[int], on_all: Sequence[int]) -> list[dict[str, int]]:
    """In one launch: some on two ranks, the pairs sharing them out, others on all ranks."""
    library = fused_on_cpu()
    pairs = [dist.new_group([first, first + 1]) for first in range(0, ranks, 2)]
    saved = [check(pairs[rank // 2], in_pairs[rank // 2::ranks // 2]), check(dist.group.WORLD, on_all)]  # type: ignore[arg-type]
    del library
    return saved


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--graphs", type=int, default=1000, help="how many (default 1000)")
    parser.add_argument("--seed", type=int, default=int(time.time()) % 10**6, help="of the first graph")
    parser.add_argument("--ranks", type=int, default=2)
    given = parser.parse_args()
    print(f"seeds {given.seed} to {given.seed + given.graphs - 1} on {given.ranks} ranks", flush=True)
    seeds = list(range(given.seed, given.seed + given.graphs))
    print(launch(on_all, given.ranks, seeds, timeout=60 + 5 * given.graphs)[0])
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
