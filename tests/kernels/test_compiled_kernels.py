"""The kernels compile for sm_90 down to machine code, with no GPU, and use 16-byte loads and stores."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import CUDABackend
from triton.compiler import ASTSource
from triton.runtime.jit import create_function_from_signature

from inductor_passes.kernels import triton_kernels

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
    return triton.compile(source, target=TARGET, options={"num_warps": 4})


@pytest.mark.parametrize("packing", [True, False])
def test_members_move_by_16_bytes(packing: bool) -> None:
    """bfloat16 beside float32 members: 8 elements a thread are one access of 16 bytes and two of them."""
    buffer, table = torch.empty(8, dtype=torch.bfloat16), torch.empty(8, dtype=torch.int64)
    made = compiled(
        triton_kernels.move_members, buffer, table, table, 2, 2**40, 3, SAME=True, FLOAT32=True, BFLOAT16=False,
        FLOAT16=False, TILE=1024, VECTOR=8, PACKING=packing,
    )  # fmt: skip
    assert made.asm["cubin"]
    text = made.asm["ptx"]
    counted = Counter(re.findall(r"(?:ld|st)\.global\.v4\.b32", text))
    members, buffers = ("ld", "st") if packing else ("st", "ld")
    assert counted == {f"{members}.global.v4.b32": 1 + 2, f"{buffers}.global.v4.b32": 1 + 1}
    if packing:
        assert "cvt.rn.bf16" in text and not re.search(r"cvt\.r[zmp]\.bf16", text), "rounds to nearest, as torch does"


def test_tables_are_written_by_one_variant() -> None:
    """Whatever the words are, small or addresses, equal to 1 or a multiple of 16: nothing is compiled again."""
    table, kernel = torch.empty(64, dtype=torch.int64), triton_kernels.write_words
    few, many = [1, 16] * 32, [2**47 + i for i in range(64)]
    assert specialised(kernel, table, 0, 64, *few) == specialised(kernel, table, 64, 1, *many)
    made = compiled(kernel, table, 0, 64, *few)
    assert made.asm["cubin"] and len(re.findall(r"st\.global\.b64", made.asm["ptx"])) == triton_kernels.WORDS


def test_numbers_of_a_bucket_make_no_variant() -> None:
    buffer, table = torch.empty(8), torch.empty(8, dtype=torch.int64)
    flags = {"SAME": True, "FLOAT32": False, "BFLOAT16": False, "FLOAT16": False, "PACKING": True}
    flags |= {"TILE": 4096, "VECTOR": 4}
    kernel = triton_kernels.move_members
    assert specialised(kernel, buffer, table, table, 1, 16, 1, **flags) == specialised(
        kernel, buffer, table, table, 8, 2**40 + 1, 1000, **flags
    )
