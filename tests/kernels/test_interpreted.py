"""The kernels themselves, run by triton's interpreter on CPU memory, beside torch's operators."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from types import ModuleType
from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from hypothesis import given, settings
from hypothesis import strategies as st

from inductor_passes.kernels import Layout, launch, layout_of, plain
from tests.kernels.buckets import FLOATS, layouts, memory, same_bits

TILES = launch.Tuning(tile_bytes=64)
"""Small buckets are many tiles; a tile is one chunk."""

CHUNKS = launch.Tuning(tile_bytes=4096, warps=1, thread_bytes=16)
"""A tile is several chunks, of vectors as of single elements."""


@pytest.fixture(scope="module")
def kernels() -> ModuleType:
    """The module of the kernels, made while triton is told to interpret; the process's own copy is left alone."""
    spec = importlib.util.find_spec("inductor_passes.kernels.triton_kernels")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_INTERPRET", "1")
        spec.loader.exec_module(module)
    module.__dict__["range"] = range_of_tensors
    return module


def range_of_tensors(*bounds: Any) -> range:
    """`range` in an interpreted kernel: of triton 3.6 with numpy 2.4 the interpreter's tensors are no indices."""
    return range(*(bound if isinstance(bound, int) else bound.handle.data.item() for bound in bounds))


def write_found(found, tile, starts, members, FIND: tl.constexpr, LOOK: tl.constexpr):  # type: ignore[no-untyped-def]
    tl.store(found, FIND(tile, starts, members, LOOK))


def there_and_back(
    kernels: ModuleType, members: Sequence[torch.Tensor], layout: Layout, dtype: torch.dtype, start: int = 0,
    tuning: launch.Tuning = TILES,
) -> None:  # fmt: skip
    """Pack, compare with torch, unpack, compare with torch; the buffer `start` elements behind an aligned address."""
    count = layout.rows * layout.total
    buffer = memory(count, dtype, 99, start)
    expected = plain.pack(members, layout, dtype)
    launch.move(buffer, members, layout, packing=True, kernels=kernels, keep=False, tuning=tuning)
    assert same_bits(buffer, expected)
    kind = members[0].dtype
    back = [memory(length + 1, kind, i, start) for i, length in enumerate(layout.lengths)]
    behind = [one[-1].item() for one in back]
    launch.move(
        buffer, [one[:-1] for one in back], layout, packing=False, kernels=kernels, keep=False, tuning=tuning
    )
    assert all(same_bits(one[:-1], full) for one, full in zip(back, plain.unpack(buffer, layout, kind), strict=True))
    assert [one[-1].item() for one in back] == behind, "nothing is written behind the end"


@given(data=st.data())
@settings(max_examples=10)
def test_random_buckets(kernels: ModuleType, data: st.DataObject) -> None:
    layout = data.draw(layouts())
    dtype = data.draw(st.sampled_from((*FLOATS, torch.float8_e4m3fn, torch.int64, torch.bool)))
    sources = st.sampled_from(FLOATS if dtype in FLOATS else (dtype,))
    members = [
        memory(length, data.draw(sources), i, data.draw(st.integers(0, 1))) for i, length in enumerate(layout.lengths)
    ]
    there_and_back(kernels, members, layout, dtype, data.draw(st.integers(0, 1)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float8_e5m2, torch.complex64])
def test_vectors_and_single_elements_side_by_side(kernels: ModuleType, dtype: torch.dtype) -> None:
    """Of two members of many tiles, one is all multiples of 16 bytes, the other of nothing."""
    layout = layout_of((64, 37), (1, 1), (112, 73), 2)
    members = [memory(112, dtype, 0), memory(73, dtype, 1, 1)]
    there_and_back(kernels, members, layout, dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64])
def test_tiles_of_several_chunks(kernels: ModuleType, dtype: torch.dtype) -> None:
    """Padding, ends and a cast in the middle of a tile and in a later tile; one run and several."""
    layout = layout_of((2560, 1301, 1200), (1, 1, 3), (4800, 2599, 2385), 2)
    other = torch.float16 if dtype in FLOATS else dtype
    members = [memory(n, (dtype, other)[i % 2], i, i % 2) for i, n in enumerate(layout.lengths)]
    there_and_back(kernels, members, layout, dtype, tuning=CHUNKS)


def test_all_floats_in_one_bucket(kernels: ModuleType) -> None:
    layout = layout_of((16, 8, 3, 0, 8), (1, 1, 1, 1, 2), (32, 16, 5, 0, 14), 2)
    for dtype in FLOATS:
        members = [memory(n, FLOATS[i % 3], i) for i, n in enumerate(layout.lengths)]
        there_and_back(kernels, members, layout, dtype)


@pytest.mark.parametrize("count", [31, 33, 128, 129, 1024, 1025, 2500])
def test_members_are_found(kernels: ModuleType, count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """One load of starts for up to 1024 members, halved down to that for more; empty members are never found."""
    sizes = tuple(0 if i % 7 == 3 else 1 for i in range(count))
    where = torch.tensor(layout_of(sizes, (1,) * count, sizes, 1).table(1, 1)[0][:count])
    look = next((look for look in kernels.LOOKS if look >= count), kernels.LOOKS[-1])
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    find = triton.jit(write_found)
    full = [i for i, size in enumerate(sizes) if size]
    for tile in (0, 1, 2, 3, len(full) // 2, len(full) - 1):
        found = torch.full((1,), -1)
        find[(1,)](found, tile, where, count, FIND=kernels._member_of, LOOK=look)
        assert found.item() == full[tile]


def test_more_members_than_one_launch_writes_addresses(kernels: ModuleType) -> None:
    layout = layout_of((2,) * 70, (1,) * 70, (2,) * 70, 1)
    members = [memory(2, torch.float32, i) for i in range(70)]
    buffer = torch.empty(140)
    launch.move(buffer, members, layout, packing=True, kernels=kernels, keep=False)
    assert torch.equal(buffer, torch.cat(members))


def test_nothing_to_move_is_no_launch() -> None:
    layout, none = layout_of((0, 0), (1, 1), (0, 0), 2), ModuleType("none")
    none.__dict__["LOOKS"] = (32,)
    launch.move(torch.empty(0), [torch.empty(0)] * 2, layout, packing=True, kernels=none)


def test_tables_are_kept_by_what_they_say(kernels: ModuleType) -> None:
    """The second bucket at the same addresses writes no table; one at another address does."""
    written: list[int] = []

    class Counted:
        def __getitem__(self, grid: object) -> object:
            def write(table: torch.Tensor, start: int, count: int, *words: int, **options: int) -> None:
                written.append(count)
                kernels.write_words[grid](table, start, count, *words, **options)

            return write

    counted = ModuleType("counted")
    counted.__dict__.update(vars(kernels) | {"write_words": Counted()})
    layout, buffer = layout_of((4, 4), (1, 1), (4, 4), 1), torch.empty(8)
    first, second = memory(4, torch.float32, 0), memory(4, torch.float32, 1)

    def packed(keep: bool, *members: torch.Tensor) -> list[int]:
        written.clear()
        launch.move(buffer, members, layout, packing=True, kernels=counted, keep=keep)
        assert torch.equal(buffer, torch.cat(members))
        return list(written)

    assert packed(True, first, second) == [8, 2]
    assert packed(True, first, second) == []
    assert packed(True, second, first) == [2], "other addresses, the same layout"
    assert packed(False, first, second) == [8, 2]


def test_what_the_kernels_move() -> None:
    layout = layout_of((4,), (1,), (4,), 1)
    assert launch.can_move([torch.float32, torch.float16], torch.bfloat16, layout)
    assert launch.can_move([torch.float8_e4m3fn], torch.float8_e4m3fn, layout)
    assert not launch.can_move([torch.float32], torch.float8_e4m3fn, layout)
    assert not launch.can_move([torch.float64], torch.float32, layout)
    assert not launch.can_move([torch.complex128], torch.complex128, layout)
    assert not launch.can_move([torch.uint8], torch.uint8, layout_of((2**31,), (1,), (5,), 1))
    assert not launch.available(torch.device("cpu"))


def test_nothing_interpreted_is_compiled_ahead(kernels: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """A launch that was planned runs as any other, and triton is asked for no device's driver by its compile."""
    monkeypatch.setattr(kernels, "get_ready", lambda: None)
    layout = layout_of((8,), (1,), (16,), 2)
    one = launch.Move(layout, torch.float32, frozenset([torch.bfloat16]), True, torch.device("cpu"))
    launch.compile_ahead([one], kernels=kernels)
    buffer, member = torch.empty(16), memory(16, torch.bfloat16, 0)
    launch.move(buffer, [member], layout, packing=True, kernels=kernels)
    assert torch.equal(buffer, member.float())
    kernels.compile_only(kernels.write_words, torch.int64, *(0,) * (2 + kernels.WORDS), num_warps=1)
