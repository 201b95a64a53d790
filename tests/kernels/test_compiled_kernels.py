"""The kernels compile for sm_90 down to machine code, with no GPU, and use 16-byte loads and stores."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from subprocess import run
from tempfile import NamedTemporaryFile
from typing import Any

import pytest
import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import CUDABackend
from triton.compiler import ASTSource
from triton.runtime.jit import create_function_from_signature

from inductor_passes.kernels import launch, layout_of, triton_kernels

TARGET = GPUTarget("cuda", 90, 32)


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    yield


def specialised(kernel: Any, *args: Any, **kwargs: Any) -> list[tuple[str, Any]]:
    """What triton's own launcher makes of arguments: a type, and what the compiled variant takes for granted."""
    bind = create_function_from_signature(kernel.signature, kernel.params, CUDABackend(TARGET))
    return list(bind(*args, **kwargs)[1])


def compiled(kernel: Any, *args: Any, **kwargs: Any) -> Any:
    """The variant that a launch with these arguments would compile."""
    found = specialised(kernel, *args, **kwargs)
    constants = {(i,): value for i, (kind, value) in enumerate(found) if kind == "constexpr"}
    aligned = {(i,): [["tt.divisibility", 16]] for i, (_, value) in enumerate(found) if value == "D"}
    signature = dict(zip(kernel.arg_names, (kind for kind, _ in found), strict=True))
    source = ASTSource(fn=kernel, signature=signature, constexprs=constants, attrs=aligned)
    return triton.compile(source, target=TARGET, options={"num_warps": launch.TUNING.warps})


def launched(packing: bool, kinds: int, members: int = 3) -> Any:
    """The variant of a bfloat16 buffer with members of its type (1), of float32 (2) or of both (3)."""
    layout = layout_of((4096,) * members, (1,) * members, (4096,) * members, 1)
    types = frozenset(dtype for bit, dtype in ((1, torch.bfloat16), (2, torch.float32)) if kinds & bit)
    work = launch.work_of(layout, torch.bfloat16, types, packing, triton_kernels.LOOKS, launch.TUNING)
    options = {name: value for name, value in work.options.items() if name != "num_warps"}
    assert options["KINDS"] == kinds and work.options["num_warps"] == launch.TUNING.warps, "what `compiled` takes"
    table = torch.empty(8, dtype=torch.int64)
    buffer = torch.empty(8, dtype=torch.bfloat16)
    return compiled(triton_kernels.move_members, buffer, table, table, 2**40, members, work.shift, **options)


@pytest.mark.parametrize("packing", [True, False])
def test_members_move_by_16_bytes(packing: bool) -> None:
    """bfloat16 beside float32 members: of 8 elements, one access of 16 bytes and two; 64 bytes a thread in flight."""
    made = launched(packing, 3)
    assert made.asm["cubin"]
    text = made.asm["ptx"]
    counted = Counter(re.findall(r"(?:ld|st)\.global\.v4\.b32", text))
    members, buffers = ("ld", "st") if packing else ("st", "ld")
    assert counted == {f"{members}.global.v4.b32": 2 + 4, f"{buffers}.global.v4.b32": 2 + 2}
    if packing:
        assert "cvt.rn.bf16" in text and not re.search(r"cvt\.r[zmp]\.bf16", text), "rounds to nearest, as torch does"


@pytest.mark.parametrize("members", [3, 2000])
@pytest.mark.parametrize("kinds", [1, 2, 3])
@pytest.mark.parametrize("packing", [True, False])
def test_programs_leave_room_for_others(packing: bool, kinds: int, members: int) -> None:
    """At most 48 registers a thread and none in memory, 64 where members of two types meet: 1280 or 1024 threads of a
    multiprocessor at once, or more.

    With all of a tile in registers, single elements and their addresses took 255, and 256 threads filled it.
    """
    used = registers(launched(packing, kinds, members).asm["cubin"])
    assert used["REG"] <= (64 if kinds == 3 else 48) and used["STACK"] == 0


def registers(cubin: bytes) -> dict[str, int]:
    """What a kernel takes of a multiprocessor, as the tool that comes with triton reads it from the machine code."""
    with NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        text = run(
            [triton.knobs.nvidia.cuobjdump.path, "-res-usage", file.name], check=True, capture_output=True, text=True
        ).stdout
    return {name: int(number) for name, number in re.findall(r"(\w+):(\d+)", text)}


def test_tables_are_written_by_one_variant() -> None:
    """Whatever the words are, small or addresses, equal to 1 or a multiple of 16: nothing is compiled again."""
    table, kernel = torch.empty(64, dtype=torch.int64), triton_kernels.write_words
    few, many = [1, 16] * 32, [2**47 + i for i in range(64)]
    assert specialised(kernel, table, 0, 64, *few) == specialised(kernel, table, 64, 1, *many)
    made = compiled(kernel, table, 0, 64, *few)
    assert made.asm["cubin"] and len(re.findall(r"st\.global\.b64", made.asm["ptx"])) == triton_kernels.WORDS


def test_numbers_of_a_bucket_make_few_variants() -> None:
    """Neither addresses nor sizes make one. The number of members makes three."""
    buffer, table = torch.empty(8), torch.empty(8, dtype=torch.int64)

    def variant(members: int, width: int) -> list[tuple[str, Any]]:
        layout, types = layout_of((width,) * members, (1,) * members, (width,) * members, 8), frozenset([torch.float32])
        work = launch.work_of(layout, torch.float32, types, True, triton_kernels.LOOKS, launch.TUNING)
        return specialised(
            triton_kernels.move_members, buffer, table, table, layout.total, members, work.shift, **work.options
        )

    few, some, many = (variant(members, 16) for members in (1, 33, 129))
    assert variant(32, 2**20 + 1) == few and variant(128, 2**30) == some and variant(5000, 1) == many
    assert few != some != many != few and len(triton_kernels.LOOKS) == 3
