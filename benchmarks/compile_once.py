"""One compile of `compile_time`: of which model, in which way, and what clocks and torch's timers say of it."""

from __future__ import annotations

import resource
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any
from unittest.mock import patch

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import collective_identity as ci
import fsdp_hooks
from benchmarks.measure import Stopwatch, one_process
from benchmarks.models import Block, Dense, Shape
from inductor_passes import backend

WAYS = ("per_block", "captured", "packed", "whole", "gathers", "regions")
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


@dataclass(frozen=True, slots=True)
class Work:
    """What is compiled.

    Attributes:
        shape: of the model.
        device: ``"cpu"`` or ``"cuda"``, where parameters, tokens and the mesh are.
        bf16: parameters gathered in bfloat16, gradients reduced in float32, as `benchmarks.train` does.
        batch: sequences.
        window: tokens of each.
    """

    shape: Shape
    device: str = "cpu"
    bf16: bool = False
    batch: int = 2
    window: int = 64

    def model(self, way: str) -> Dense:
        """The model of one way to compile, sharded by FSDP2 block by block over the world, but for ``whole``."""
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

        torch.manual_seed(0)
        with torch.device(self.device):
            model = Dense(self.shape)
            model.blocks = nn.ModuleList(BLOCKS.get(way, Block)(self.shape) for _ in range(self.shape.layers))
        if way == "whole":
            return model.to(torch.bfloat16) if self.bf16 else model
        mesh = init_device_mesh(self.device, (2,))
        policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32) if self.bf16 else MixedPrecisionPolicy()
        for block in model.blocks:
            fully_shard(block, mesh=mesh, mp_policy=policy)
        fully_shard(model, mesh=mesh, mp_policy=policy)
        return model

    def tokens(self) -> Tensor:
        """int64 ``[batch, window]``."""
        return torch.randint(0, self.shape.vocabulary, (self.batch, self.window), device=self.device)

    def wait(self) -> None:
        """Until the device has done what it was given."""
        if self.device != "cpu":
            torch.accelerator.synchronize()


def measure(way: str, work: Work, *, inner: str = "inductor", kernels: bool = True) -> dict[str, Any]:
    """Compile forward and backward in this process, and run them once.

    Args:
        way: ``per_block``: `torch.compile` of each block, which shares the code of equal blocks; ``captured``: the
            whole model through this package; ``packed``: likewise, with ``kernels="triton"``; ``whole``: the model
            without FSDP as one graph without a collective; ``gathers``, ``regions``: captured, of `BLOCKS`.
        work: the model and its input.
        inner: ``inductor`` or ``aot_eager``.
        kernels: have the generated C++ compiled.
    """
    import torch._dynamo.utils as timers

    with one_process(2), ExitStack() as stack:
        sources = [] if kernels else stack.enter_context(_uncompiled())
        _warm_up(inner, work.device)
        model = work.model(way)
        call: Callable[[Tensor], Tensor] = model
        if way == "per_block":
            for block in model.blocks:
                block.compile(fullgraph=True, backend=inner)
        elif way == "whole":
            call = torch.compile(model, fullgraph=True, backend=inner)
        else:
            fsdp_hooks.install(model)
            options: dict[str, Any] = {} if inner == "inductor" else {"inner": inner}
            if way == "packed":
                options["kernels"] = "triton"
            call = torch.compile(model, backend="collective_identity", fullgraph=True, options=options)
        tokens = work.tokens()
        timers.compilation_time_metrics.clear()
        sources.clear()
        ours = Stopwatch()
        if way == "regions":  # on, a region's gradient is wrong: docs/upstream/nested-region-gradient.md
            stack.enter_context(torch._functorch.config.patch(donated_buffer=False))
        stack.enter_context(patch.object(timers, "time", _ProcessorClock()))
        stack.enter_context(ours.attached(backend._Compile, "__init__", "_joint", "_from_cache"))
        stack.enter_context(ours.attached(backend._Graph, *_OURS))
        handle = stack.enter_context(ci.enable(agreement_timeout=0))
        work.wait()
        started, wall, children = time.thread_time(), time.perf_counter(), _children()
        F.cross_entropy(call(tokens).float().flatten(0, 1), tokens.flatten()).backward()
        work.wait()
        python_s, wall_s = time.thread_time() - started, time.perf_counter() - wall
        compiler_s, metrics = _children() - children, timers.compilation_time_metrics
        found = {name: sum(metrics[name]) for name in PHASES if name in metrics}
        report = handle.report().to_dict() if way not in ("per_block", "whole") else {}
        collectives = report["collectives"]["before_bucketing"] if report else {}
    return {
        "way": way,
        "blocks": work.shape.layers,
        "python_s": python_s,
        "compiler_s": compiler_s,
        "wall_s": wall_s,
        "ours_s": ours.seconds,
        "passes_s": report["seconds"]["passes"] if report else None,
        "kernels": len(set(sources)) if not kernels and inner == "inductor" else None,
        "ok": report["ok"] if report else None,
        "collectives": sum(collectives.values()),
        "phases": {name: float(f"{seconds:.3g}") for name, seconds in found.items()},
    }


def _warm_up(inner: str, device: str) -> None:
    """Compile something else first: what a process does once, whatever it compiles, is no part of the figures."""
    x = torch.ones(8, 8, device=device, requires_grad=True)
    torch.compile(lambda x: (x.sin() * 2).sum(), backend=inner)(x).backward()
    (x @ x).sum().backward()
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
