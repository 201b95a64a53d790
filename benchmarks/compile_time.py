"""Compile seconds of N equal FSDP2 blocks: captured whole, cold and warm, against each block compiled by itself.

``python -m benchmarks compile_time [--json] [--blocks 2 4 8] [--no-kernels] [--inner aot_eager]``. Every figure is of a
fresh process in a pretended world of two ranks on the CPU, with a cache folder that is new (cold) or left by the cold
run (warm). Two captured models beside the plain one: `gathers`, whose blocks multiply their input with one row of each
parameter, is what the collectives alone cost to compile; `regions`, whose blocks compute in a nested compile region
that is given their gathered parameters, has one body for all of them (docs/results.md says what is in its way).
Processor seconds: `python_s` of the compiling thread, `compiler_s` of the C++ compiler and other children;
`--no-kernels` leaves the C++ compiler out, so the values computed mean nothing. `phases` are parts of `python_s` by
torch's own timers, some inside others; `ours_s` is everything of this package.
"""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from argparse import Namespace
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import Any
from unittest.mock import patch

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import collective_identity as ci
import fsdp_hooks
from benchmarks.measure import Stopwatch, one_process, parser, show
from benchmarks.models import Block, Dense, Shape
from inductor_passes import backend

WAYS = ("per_block", "captured", "gathers", "regions")
PHASES = (
    "bytecode_tracing", "build_guards", "aot_collect_metadata", "aot_trace_joint_graph",
    "_recursive_joint_graph_passes", "min_cut_rematerialization_partition", "_recursive_post_grad_passes",
    "GraphLowering.run", "Scheduler.__init__", "Scheduler.codegen",
)  # fmt: skip
_OURS = ("__init__", "transform", "finish", "publish")


class _ProcessorClock:
    """The module `time` with processor seconds of this thread instead of the clock's."""

    def __getattr__(self, name: str) -> Any:
        return getattr(time, name)

    def time_ns(self) -> int:
        return time.thread_time_ns()

    def time(self) -> float:
        return time.thread_time()


class OneRowEach(Block):
    """A block that reads every parameter and computes next to nothing."""

    def forward(self, x: Tensor) -> Tensor:
        """``[batch, window, width]`` to the same."""
        mlp = self.feed_forward
        layers = (*self.attention.children(), mlp.gate, mlp.up, self.first_norm, self.second_norm)
        for layer in layers:
            x = x * layer.weight.view(-1, x.shape[-1])[0]  # type: ignore[operator, union-attr]
        return x * mlp.down.weight.t()[0]


class InRegion(Block):
    """A block that computes in a nested compile region, given its parameters: torch reads none computed before it."""

    def forward(self, x: Tensor) -> Tensor:
        """``[batch, window, width]`` to the same."""
        layers = (*self.attention.children(), *self.feed_forward.children(), self.first_norm, self.second_norm)
        return self.region(x, tuple(layer.weight for layer in layers))

    @torch.compiler.nested_compile_region
    def region(self, x: Tensor, given: tuple[Tensor, ...]) -> Tensor:
        """What `Block` computes."""
        return super().forward(x)


BLOCKS: Mapping[str, type[Block]] = MappingProxyType({"gathers": OneRowEach, "regions": InRegion})


def model_of(way: str, blocks: int, width: int) -> Dense:
    """The model of one way to compile, sharded by FSDP2 block by block over the world."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    torch.manual_seed(0)
    shape = Shape(vocabulary=300, width=width, heads=4, layers=blocks)
    model = Dense(shape)
    model.blocks = nn.ModuleList(BLOCKS.get(way, Block)(shape) for _ in range(blocks))
    mesh = init_device_mesh("cpu", (2,))
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def measure(way: str, blocks: int, *, width: int = 64, inner: str = "inductor", kernels: bool = True) -> dict[str, Any]:
    """Compile forward and backward in this process.

    Args:
        way: ``per_block``: `torch.compile` of each block, which shares the code of equal blocks; ``captured``: the
            whole model through this package; ``gathers``, ``regions``: likewise, of `BLOCKS`.
        blocks: how many.
        width: of the model.
        inner: ``inductor`` or ``aot_eager``.
        kernels: have the generated C++ compiled.
    """
    import torch._dynamo.utils as timers

    with one_process(2), ExitStack() as stack:
        sources = [] if kernels else stack.enter_context(_uncompiled())
        _warm_up(inner)
        model = model_of(way, blocks, width)
        call: Callable[[Tensor], Tensor] = model
        if way == "per_block":
            for block in model.blocks:
                block.compile(fullgraph=True, backend=inner)
        else:
            fsdp_hooks.install(model)
            options: dict[str, Any] = {} if inner == "inductor" else {"inner": inner}
            call = torch.compile(model, backend="collective_identity", fullgraph=True, options=options)
        tokens = torch.randint(0, 300, (2, 64))
        timers.compilation_time_metrics.clear()
        sources.clear()
        ours = Stopwatch()
        if way == "regions":  # on, a region's gradient is wrong: docs/upstream/nested-region-gradient.md
            stack.enter_context(torch._functorch.config.patch(donated_buffer=False))
        stack.enter_context(patch.object(timers, "time", _ProcessorClock()))
        stack.enter_context(ours.attached(backend._Compile, "__init__", "_joint", "_from_cache"))
        stack.enter_context(ours.attached(backend._Graph, *_OURS))
        handle = stack.enter_context(ci.enable(agreement_timeout=0))
        started, wall, children = time.thread_time(), time.perf_counter(), _children()
        F.cross_entropy(call(tokens).flatten(0, 1), tokens.flatten()).backward()
        python_s, wall_s = time.thread_time() - started, time.perf_counter() - wall
        compiler_s, metrics = _children() - children, timers.compilation_time_metrics
        found = {name: sum(metrics[name]) for name in PHASES if name in metrics}
        report = handle.report().to_dict() if way != "per_block" else {}
        collectives = report["collectives"]["before_bucketing"] if report else {}
    return {
        "way": way,
        "blocks": blocks,
        "python_s": python_s,
        "compiler_s": compiler_s,
        "wall_s": wall_s,
        "ours_s": ours.seconds,
        "kernels": len(set(sources)) if not kernels and inner == "inductor" else None,
        "ok": report["ok"] if report else None,
        "collectives": sum(collectives.values()),
        "phases": {name: float(f"{seconds:.3g}") for name, seconds in found.items()},
    }


def _warm_up(inner: str) -> None:
    """Compile something else first: what a process does once, whatever it compiles, is no part of the figures."""
    x = torch.ones(8, 8, requires_grad=True)
    torch.compile(lambda x: (x.sin() * 2).sum(), backend=inner)(x).backward()
    torch._dynamo.reset()


def _children() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


@contextmanager
def _uncompiled() -> Iterator[list[str]]:
    """Inductor's C++ kernels are noted and do nothing."""
    from torch._inductor.async_compile import AsyncCompile

    sources: list[str] = []

    def noted(self: Any, argtypes: Any, source: str) -> Callable[..., None]:
        sources.append(source)
        return lambda *args: None

    with patch.object(AsyncCompile, "cpp_pybinding", noted):
        yield sources


def in_new_process(way: str, blocks: int, given: Namespace, cache: Path) -> dict[str, Any]:
    """`measure` in a process of its own, whose compile caches are in ``cache``."""
    command = [sys.executable, "-m", "benchmarks", "compile_time", "--only", way, "--blocks", str(blocks)]
    command += ["--width", str(given.width), "--inner", given.inner, *(["--no-kernels"] if given.no_kernels else [])]
    environment = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(cache)}
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    return dict(json.loads(done.stdout.splitlines()[-1]))


def seconds(row: dict[str, Any]) -> float:
    """All processor seconds of a row."""
    return float(row["python_s"]) + float(row["compiler_s"])


def ratios(rows: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """What the rows of one number of blocks say, by the names of their ways and ``warm``."""
    cold = rows["captured"]
    return {
        "what": "ratios",
        "blocks": cold["blocks"],
        **{f"{way}_to_per_block": seconds(rows[way]) / seconds(rows["per_block"]) for way in WAYS[1:]},
        "cold_to_warm": seconds(cold) / seconds(rows["warm"]),
        "ours_share": cold["ours_s"] / seconds(cold),
    }


def main() -> int:
    """Run the benchmark; exit code 1 if our own part of a whole cold compile is over 1 %."""
    options = parser("compile seconds of equal blocks")
    options.add_argument("--blocks", type=int, nargs="+", default=[2, 4, 8])
    options.add_argument("--width", type=int, default=64)
    options.add_argument("--inner", choices=("inductor", "aot_eager"), default="inductor")
    options.add_argument("--no-kernels", action="store_true", help="leave the C++ compiler out")
    options.add_argument("--only", choices=WAYS, help="one way, in this process")
    given = options.parse_args()
    if given.only:
        row = measure(given.only, *given.blocks, width=given.width, inner=given.inner, kernels=not given.no_kernels)
        show(row, as_json=True)
        return 0
    show({"benchmark": "compile_time", "torch": torch.__version__, "seconds": "processor"}, as_json=given.json)
    held = True
    for blocks in given.blocks:
        rows = {}
        for way in WAYS:
            with tempfile.TemporaryDirectory(prefix="compile-time-") as name:
                rows[way] = in_new_process(way, blocks, given, Path(name))
                show({"what": "cold", **rows[way]}, as_json=given.json)
                if way == "captured":
                    rows["warm"] = in_new_process(way, blocks, given, Path(name))
                    show({"what": "warm", **rows["warm"]}, as_json=given.json)
        last = ratios(rows)
        show(last, as_json=given.json)
        held &= given.inner != "inductor" or given.no_kernels or last["ours_share"] <= 0.01
    return 0 if held else 1
