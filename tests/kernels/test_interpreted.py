"""The kernels themselves, run by triton's interpreter on CPU memory, beside torch's operators."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from types import ModuleType

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from inductor_passes.kernels import Layout, launch, layout_of, plain
from tests.kernels.buckets import FLOATS, layouts, memory, same_bits

TILE_BYTES = 64


@pytest.fixture(scope="module")
def kernels() -> ModuleType:
    """The module of the kernels, made while triton is told to interpret; the process's own copy is left alone."""
    spec = importlib.util.find_spec("inductor_passes.kernels.triton_kernels")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_INTERPRET", "1")
        spec.loader.exec_module(module)
    return module


def there_and_back(
    kernels: ModuleType, members: Sequence[torch.Tensor], layout: Layout, dtype: torch.dtype, start: int = 0
) -> None:
    """Pack, compare with torch, unpack, compare with torch; the buffer `start` elements behind an aligned address."""
    count = layout.rows * layout.total
    buffer = memory(count, dtype, 99, start)
    expected = plain.pack(members, layout, dtype)
    launch.move(buffer, members, layout, packing=True, kernels=kernels, keep=False, tile_bytes=TILE_BYTES)
    assert same_bits(buffer, expected)
    kind = members[0].dtype
    back = [memory(length + 1, kind, i, start) for i, length in enumerate(layout.lengths)]
    behind = [one[-1].item() for one in back]
    launch.move(
        buffer, [one[:-1] for one in back], layout, packing=False, kernels=kernels, keep=False, tile_bytes=TILE_BYTES
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


def test_all_floats_in_one_bucket(kernels: ModuleType) -> None:
    layout = layout_of((16, 8, 3, 0, 8), (1, 1, 1, 1, 2), (32, 16, 5, 0, 14), 2)
    for dtype in FLOATS:
        members = [memory(n, FLOATS[i % 3], i) for i, n in enumerate(layout.lengths)]
        there_and_back(kernels, members, layout, dtype)


def test_more_members_than_one_launch_writes_addresses(kernels: ModuleType) -> None:
    layout = layout_of((2,) * 70, (1,) * 70, (2,) * 70, 1)
    members = [memory(2, torch.float32, i) for i in range(70)]
    buffer = torch.empty(140)
    launch.move(buffer, members, layout, packing=True, kernels=kernels, keep=False)
    assert torch.equal(buffer, torch.cat(members))


def test_nothing_to_move_is_no_launch() -> None:
    layout = layout_of((0, 0), (1, 1), (0, 0), 2)
    launch.move(torch.empty(0), [torch.empty(0)] * 2, layout, packing=True, kernels=ModuleType("none"))


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
    counted.__dict__.update(WORDS=kernels.WORDS, move_members=kernels.move_members, write_words=Counted())
    layout, buffer = layout_of((4, 4), (1, 1), (4, 4), 1), torch.empty(8)
    first, second = memory(4, torch.float32, 0), memory(4, torch.float32, 1)

    def packed(keep: bool, *members: torch.Tensor) -> list[int]:
        written.clear()
        launch.move(buffer, members, layout, packing=True, kernels=counted, keep=keep)
        assert torch.equal(buffer, torch.cat(members))
        return list(written)

    assert packed(True, first, second) == [12, 4]
    assert packed(True, first, second) == []
    assert packed(True, second, first) == [4], "other addresses, the same layout"
    assert packed(False, first, second) == [12, 4]


def test_what_the_kernels_move() -> None:
    layout = layout_of((4,), (1,), (4,), 1)
    assert launch.can_move([torch.float32, torch.float16], torch.bfloat16, layout)
    assert launch.can_move([torch.float8_e4m3fn], torch.float8_e4m3fn, layout)
    assert not launch.can_move([torch.float32], torch.float8_e4m3fn, layout)
    assert not launch.can_move([torch.float64], torch.float32, layout)
    assert not launch.can_move([torch.complex128], torch.complex128, layout)
    assert not launch.can_move([torch.uint8], torch.uint8, layout_of((2**31,), (1,), (5,), 1))
    assert not launch.available(torch.device("cpu"))
