"""The operators: what they mean, what they refuse, and that a compiled graph may hold them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from inductor_passes.kernels import choice, layout_of, pack, plain, unpack
from tests.kernels.buckets import FLOATS, layouts, memory, reference_pack, same_bits


@given(data=st.data())
@settings(max_examples=60)
def test_plain_operators_do_what_the_layout_says(data: st.DataObject) -> None:
    layout = data.draw(layouts())
    dtype = data.draw(st.sampled_from((*FLOATS, torch.float8_e4m3fn, torch.int64, torch.bool)))
    sources = FLOATS if dtype in FLOATS else (dtype,)
    members = [memory(n, data.draw(st.sampled_from(sources)), i) for i, n in enumerate(layout.lengths)]
    buffer = pack(members, layout.widths, layout.outers, layout.rows, dtype)
    assert buffer.dtype is dtype and buffer.tolist() == reference_pack(members, layout, dtype)
    back = unpack(buffer, layout.widths, layout.outers, layout.lengths, layout.rows, members[0].dtype)
    assert all(same_bits(one, member.to(members[0].dtype)) for one, member in zip(back, members, strict=True))
    memories = [one.untyped_storage().data_ptr() for one in (*back, buffer, *members) if one.numel()]
    assert len(set(memories)) == len(memories), "no output shares memory"


def test_torchs_own_operators_mean_the_same() -> None:
    shapes, rows = [(7, 3), (8,), (2, 5), (12, 2)], 4
    members = [memory(torch.Size(shape).numel(), torch.float32, i).view(shape) for i, shape in enumerate(shapes)]
    widths = [-(-m.shape[0] // rows) * (m.numel() // m.shape[0]) for m in members]
    buffer = pack(members, widths, [1] * 4, rows, torch.float32)
    assert torch.equal(buffer.view(rows, -1), torch._chunk_cat(members, 0, rows))
    flat = [m.numel() for m in members]
    assert torch.equal(pack(members, flat, [1] * 4, 1, torch.float32), torch.cat([m.flatten() for m in members]))
    full = [rows * width for width in widths]
    parts = torch.split_with_sizes_copy(buffer.view(rows, -1), widths, 1)
    back = unpack(buffer, widths, [1] * 4, full, rows)
    assert all(torch.equal(one, part.flatten()) for one, part in zip(back, parts, strict=True))


@pytest.mark.parametrize("dim", [0, 1, 2])
def test_shards_of_a_later_dimension(dim: int) -> None:
    """What a rank gets is its chunk of that dimension, and gathered chunks are the tensor again."""
    full, rows = memory(4 * 6 * 10, torch.float32, 0).view(4, 6, 10), 2
    outer = torch.Size(full.shape[:dim]).numel()
    buffer = pack([full, full], [full.numel() // rows] * 2, [outer] * 2, rows, torch.bfloat16)
    for row, chunk in zip(buffer.view(rows, 2, -1), full.chunk(rows, dim), strict=True):
        assert torch.equal(row, chunk.flatten().bfloat16().expand(2, -1))
    back = unpack(buffer, [full.numel() // rows] * 2, [outer] * 2, [full.numel()] * 2, rows, torch.float32)
    assert all(torch.equal(one.view_as(full), full) for one in back)


def test_any_strides() -> None:
    member = memory(24, torch.float32, 0).view(4, 6)
    odd = [member.t(), member[:, ::2], torch._neg_view(member), member[1], member.expand(2, 4, 6)]
    buffer = pack(odd, [m.numel() for m in odd], [1] * 5, 1, torch.float32)
    assert torch.equal(buffer, torch.cat([m.flatten() for m in odd]))
    (back,) = unpack(member.t(), [24], [1], [24], 1)
    assert torch.equal(back, member.t().flatten())


@pytest.mark.parametrize(
    ("widths", "outers", "rows", "what"),
    [
        ([12, 2], [1, 1], 1, "expected member 1 of a bucket to fit into 1 rows, found 3 elements"),
        ([12], [1], 1, "found 1 widths, 1 numbers of runs and 2 lengths"),
        ([12, 3], [5, 1], 1, "expected member 0 of a bucket to fit"),
        ([12, 3], [1, 0], 1, "expected member 1 of a bucket to fit"),
        ([12, 3], [1, 1], 0, "expected a bucket of one row or more, found 0"),
        ([], [], 1, "found 0 widths"),
    ],
)
def test_layouts_that_contradict_themselves(widths: list[int], outers: list[int], rows: int, what: str) -> None:
    members = [torch.ones(3, 4), torch.ones(3)]
    with pytest.raises(ValueError, match=what):
        pack(members, widths, outers, rows, torch.float32)


def test_a_buffer_of_another_size() -> None:
    with pytest.raises(ValueError, match="expected a buffer of 2 rows of 3 elements, found 7 elements"):
        unpack(torch.ones(7), [3], [1], [6], 2)


def test_torch_finds_nothing_wrong_with_the_operators() -> None:
    members = [torch.randn(4, 3), torch.randn(2).bfloat16()]
    packing: tuple[Any, ...] = (members, [6, 1], [1, 1], 2, torch.bfloat16)
    torch.library.opcheck(torch.ops.inductor_passes.pack.default, packing)
    torch.library.opcheck(torch.ops.inductor_passes.unpack.default, (torch.randn(14), [6, 1], [1, 1], [12, 2], 2))


@pytest.mark.parametrize("lite", [False, True])
def test_inductor_compiles_them(lite: bool) -> None:
    """As calls, with what is around them fused or not; lite mode hands every operator on anyway."""

    def program(a: torch.Tensor, b: torch.Tensor) -> list[torch.Tensor]:
        buffer = torch.ops.inductor_passes.pack.default([a, b.t()], [6, 4], [1, 1], 2, torch.bfloat16)
        back = torch.ops.inductor_passes.unpack.default(buffer, [6, 4], [1, 1], [11, 8], 2)
        return [back[0] + 1, back[1].view(4, 2) * 2]

    inputs = (memory(11, torch.float32, 0), memory(8, torch.float32, 1).view(2, 4))
    options = {"mode": "lite"} if lite else {}
    assert all(map(torch.equal, torch.compile(program, fullgraph=True, **options)(*inputs), program(*inputs)))


def test_a_layout_that_takes_part_of_a_buffer_is_plain() -> None:
    layout = layout_of((2, 3), (1, 1), (4, 5), 2)
    assert (layout.offsets, layout.total) == ((0, 2), 5)
    assert plain.unpack(torch.arange(10.0), layout, torch.float32)[1].tolist() == [2.0, 3.0, 4.0, 7.0, 8.0]


@pytest.mark.parametrize(
    ("widths", "outers", "lengths", "rows", "types", "way"),
    [
        ((4, 3), (1, 1), (4, 3), 1, {torch.float32}, "cat"),
        ((4, 6), (2, 3), (4, 6), 1, {torch.float32}, "cat"),
        ((4, 3), (1, 1), (4, 2), 1, {torch.float32}, "kernel"),
        ((4, 3), (1, 1), (4, 3), 1, {torch.bfloat16}, "kernel"),
        ((4, 3), (1, 1), (4, 3), 1, {torch.float32, torch.bfloat16}, "kernel"),
        ((4, 3), (1, 1), (8, 6), 2, {torch.float32}, "kernel"),
        ((4, 3), (1, 1), (4, 3), 1, {torch.int32}, "plain"),
    ],
)
def test_what_packs_a_bucket(
    widths: tuple[int, ...], outers: tuple[int, ...], lengths: tuple[int, ...], rows: int, types: set[torch.dtype],
    way: str,
) -> None:  # fmt: skip
    """`cat` where the buffer is just that, a kernel for the rest where there is one and it knows the types."""
    layout = layout_of(widths, outers, lengths, rows)
    assert choice.way_to_pack(layout, types, torch.float32, kernels=True) == way
    assert choice.way_to_pack(layout, types, torch.float32, kernels=False) == ("cat" if way == "cat" else "plain")
    below = "plain" if way == "plain" else "kernel"
    assert choice.way_to_unpack(layout, types, torch.float32, kernels=True) == below
    assert choice.way_to_unpack(layout, types, torch.float32, kernels=False) == "plain"


@pytest.mark.parametrize("dtype", [torch.float32, torch.float8_e5m2, torch.complex64, torch.bool, torch.int64])
def test_joining_as_it_is_keeps_bits(dtype: torch.dtype) -> None:
    """Whatever bits there are, NaN with a payload among them; and a strided, an empty and a lone member."""
    generator = torch.Generator().manual_seed(0)
    words = torch.randint(0, 2 if dtype is torch.bool else 256, (16 * 24,), dtype=torch.uint8, generator=generator)
    full = words.view(dtype)[:24].view(4, 6)
    members = [full, full.t(), full[:0], full[1:, ::2]]
    sizes = [m.numel() for m in members]
    buffer = pack(members, sizes, [1] * 4, 1, dtype)
    expected = b"".join(m.contiguous().view(torch.uint8).numpy().tobytes() for m in members)
    assert buffer.view(torch.uint8).numpy().tobytes() == expected
    alone = pack([full], [24], [1], 1, dtype)
    assert same_bits(alone, full.flatten()) and alone.data_ptr() != full.data_ptr()
