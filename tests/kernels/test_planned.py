"""Which kernels a graph will launch, read from it; and that a launch finds what was compiled for it."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import triton
from torch import fx
from torch.fx.experimental.proxy_tensor import make_fx
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

from inductor_passes.bucketing import bucket_collectives
from inductor_passes.kernels import Layout, compile_kernels_of, launch, layout_of, pack, plain, triton_kernels
from inductor_passes.kernels.launch import Move
from inductor_passes.kernels.planned import moves_of
from tests.graphs import Builder
from tests.passes.simulated_world import random_inputs, run

UNSHARD, REDUCE = "fsdp.param_unshard", "fsdp.grad_reduce_shard"
HALF, FULL = torch.bfloat16, torch.float32
UNPACK = torch.ops.inductor_passes.unpack.default


def anywhere(device: torch.device) -> bool:
    """Kernels run on every device."""
    return True


def nowhere(device: torch.device) -> bool:
    """Kernels run on no device."""
    return False


def mixed_precision(coalesced: Sequence[str] = (), members: int = 2) -> fx.GraphModule:
    """float32 shards gathered in bfloat16, or as they are, and bfloat16 gradients reduced in float32."""
    b = Builder()
    made = [b.all_gather(b.cast(b.placeholder(f"w{i}", (4, 8)), HALF), role=UNSHARD) for i in range(members)]
    as_it_is = [b.all_gather(b.placeholder(f"n{i}", (8,), dtype=FULL), role=UNSHARD) for i in range(2)]
    gradients = [b.cast(b.placeholder(f"g{i}", (8, 4), dtype=HALF), FULL) for i in range(2)]
    reduced = [b.reduce_scatter(one, role=REDUCE) for one in gradients]
    b.output(*(c.wait for c in (*made, *as_it_is, *reduced)))
    gm = b.module()
    assert len(bucket_collectives(gm, kernels="triton", coalesced=coalesced).buckets) == 3
    return gm


def kinds(moves: Sequence[Move]) -> list[tuple[torch.dtype, set[torch.dtype], bool, int]]:
    return [(m.buffer, set(m.types), m.packing, m.layout.rows) for m in moves]


def test_what_mixed_precision_launches() -> None:
    """Two gathers and a reduction: what joins as it is takes no kernel, nor what stays where it was received."""
    assert sorted(kinds(list(moves_of(mixed_precision(), anywhere))), key=str) == sorted([
        (HALF, {FULL}, True, 1), (HALF, {HALF}, False, 2), (FULL, {FULL}, False, 2), (FULL, {HALF}, True, 2),
    ], key=str)  # fmt: skip
    coalesced = kinds(list(moves_of(mixed_precision(["all_gather"]), anywhere)))
    assert sorted(coalesced, key=str) == sorted([(HALF, {FULL}, True, 1), (FULL, {HALF}, True, 2)], key=str)
    assert not list(moves_of(mixed_precision(), nowhere))


@pytest.mark.parametrize("coalesced", [[], ["all_gather"]])
def test_planned_is_launched(coalesced: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """What the operators launch as the graph runs is what was read from it, no more and no less."""
    launched: list[Move] = []

    def move(buffer: torch.Tensor, members: Sequence[torch.Tensor], layout: Layout, *, packing: bool) -> None:
        launched.append(Move(layout, buffer.dtype, frozenset(m.dtype for m in members), packing, buffer.device))
        if packing:
            buffer.copy_(plain.pack(members, layout, buffer.dtype))
        else:
            for member, value in zip(members, plain.unpack(buffer, layout, members[0].dtype), strict=True):
                member.copy_(value)

    monkeypatch.setattr(launch, "available", anywhere)
    monkeypatch.setattr(launch, "move", move)
    gm = mixed_precision(coalesced)
    run(gm, random_inputs(gm))
    assert set(launched) == set(moves_of(gm, anywhere)) and launched


def test_arguments_as_they_may_be_written() -> None:
    """By name, with defaults or without, and in a sub-graph."""

    def graph(*args: Any, **kwargs: Any) -> fx.GraphModule:
        b = Builder()
        buffer = b.placeholder("buffer", (12,))
        b.output(b.call(UNPACK, buffer, *args, **kwargs))
        return b.module()

    sizes = ([2, 4], [1, 1], [4, 8], 2)
    by_name = graph(*sizes[:2], lengths=sizes[2], rows=sizes[3], dtype=HALF)
    around = fx.Graph()
    around.output(around.call_module("body", (around.placeholder("buffer"),)))
    outer = fx.GraphModule({"body": by_name}, around)
    for gm, dtype in ((graph(*sizes), FULL), (graph(*sizes, None), FULL), (by_name, HALF), (outer, HALF)):
        assert kinds(list(moves_of(gm, anywhere))) == [(FULL, {dtype}, False, 2)]


def test_what_is_not_known_is_not_planned() -> None:
    """Symbolic sizes, and nodes that say nothing of their value."""
    def packing(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return pack([a, b], [8, 8], [1, 1], 1, FULL)

    halves = (torch.zeros(8, dtype=HALF), torch.zeros(2, 4, dtype=HALF))
    assert len(list(moves_of(make_fx(packing, tracing_mode="fake")(*halves), anywhere))) == 1
    assert not list(moves_of(make_fx(packing, tracing_mode="symbolic")(*halves), anywhere))
    b = Builder()
    member = b.placeholder("w", (8,), dtype=HALF)
    b.output(b.call(UNPACK, member, [8], [1], [8], 1))
    gm = b.module()
    assert len(list(moves_of(gm, anywhere))) == 1
    del member.meta["val"]
    assert not list(moves_of(gm, anywhere))


def test_a_fault_of_triton_does_not_stop_a_compile() -> None:
    class Broken(ModuleType):
        LOOKS = (32,)

        def get_ready(self) -> None:
            raise RuntimeError("0 active drivers")

    compile_kernels_of(mixed_precision(), runs=anywhere, kernels=Broken("kernels"))


class PretendedDevice:
    """What triton asks of a device's driver; launches nothing."""

    def __init__(self) -> None:
        self.launched: list[str] = []
        self.utils = self

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_device_properties(self, device: int) -> dict[str, int]:
        return {"max_shared_mem": 2**17}

    def load_binary(self, *args: Any) -> tuple[None, None, int, int, int]:
        return None, None, 0, 0, 1024

    def launcher_cls(self, source: Any, metadata: Any) -> Any:
        return lambda *args: self.launched.append(source.name)


@pytest.fixture
def device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[PretendedDevice]:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    pretended, before = PretendedDevice(), driver._active
    driver.set_active(pretended)
    yield pretended
    driver._active = before


@pytest.fixture
def kernels() -> ModuleType:
    """The module of the kernels with nothing compiled yet."""
    spec = importlib.util.find_spec(triton_kernels.__name__)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, bool]]:
    """What triton compiles from now on: the kernel, and whether without a launch."""
    found: list[tuple[str, bool]] = []

    def note(*, fn: Any, is_manual_warmup: bool, **rest: Any) -> None:
        found.append((fn.name, is_manual_warmup))

    monkeypatch.setattr(triton.knobs.runtime, "jit_post_compile_hook", note)
    return found


def launch_all(moves: Sequence[Move], kernels: ModuleType, start: int = 0) -> None:
    for one in moves:
        (kind,) = one.types
        buffer = torch.empty(start + one.layout.rows * one.layout.total, dtype=one.buffer)[start:]
        members = [torch.empty(length, dtype=kind) for length in one.layout.lengths]
        launch.move(buffer, members, one.layout, packing=one.packing, kernels=kernels)


def test_a_launch_finds_what_was_compiled_for_it(
    device: PretendedDevice, kernels: ModuleType, compiled: list[tuple[str, bool]]
) -> None:
    """Triton's own lookup, of a graph and of types that travel as integers: nothing is compiled by a launch."""
    gm = mixed_precision()
    compile_kernels_of(gm, runs=anywhere, kernels=kernels)
    layout, cpu = layout_of((4,) * 40, (1,) * 40, (8,) * 40, 2), torch.device("cpu")
    more = [Move(layout, kind, frozenset([kind]), True, cpu) for kind in (torch.int64, torch.bool, torch.float8_e5m2)]
    launch.compile_ahead(more, kernels=kernels)
    moves = [*moves_of(gm, anywhere), *more]
    launch_all(moves, kernels)
    assert device.launched.count("move_members") == len(moves) and "write_words" in device.launched
    assert all(ahead for _, ahead in compiled)
    # float8 and bool are the same bytes
    assert [name for name, _ in compiled].count("move_members") == len(moves) - 1 and len(compiled) == len(moves)


def test_a_launch_compiles_what_was_not(
    device: PretendedDevice, kernels: ModuleType, compiled: list[tuple[str, bool]]
) -> None:
    """All of it where nothing was planned; a variant more where a buffer is not aligned as those of torch are."""
    one = Move(layout_of((8,), (1,), (16,), 2), FULL, frozenset([HALF]), False, torch.device("cpu"))
    launch_all([one], kernels)
    assert [ahead for _, ahead in compiled] == [False, False]
    launch.compile_ahead([one], kernels=kernels)  # there is nothing left to do
    launch_all([one], kernels)
    assert len(compiled) == 2
    launch_all([one], kernels, start=1)
    assert len(compiled) == 3
