"""What runs on the device? One kernel that moves a bucket's members into or out of its buffer, one that writes tables.

The only file that names triton. Read: triton 3.6.0, 3.7.1, 3.8.0 (``do_not_specialize`` keeps an annotated integer
argument one type and one variant; ``multiple_of`` on a pointer counts bytes).
"""
# mypy: disallow_untyped_defs = false
from __future__ import annotations

import triton
import triton.language as tl

WORDS = 64
"""Words that one launch of `write_words` writes."""

_ARGUMENTS = [f"w{i}" for i in range(WORDS)]


@triton.jit(do_not_specialize=["start", "count", *_ARGUMENTS])
def write_words(
    table, start: tl.int64, count: tl.int64,
    w0: tl.int64, w1: tl.int64, w2: tl.int64, w3: tl.int64, w4: tl.int64, w5: tl.int64, w6: tl.int64, w7: tl.int64,
    w8: tl.int64, w9: tl.int64, w10: tl.int64, w11: tl.int64, w12: tl.int64, w13: tl.int64, w14: tl.int64,
    w15: tl.int64, w16: tl.int64, w17: tl.int64, w18: tl.int64, w19: tl.int64, w20: tl.int64, w21: tl.int64,
    w22: tl.int64, w23: tl.int64, w24: tl.int64, w25: tl.int64, w26: tl.int64, w27: tl.int64, w28: tl.int64,
    w29: tl.int64, w30: tl.int64, w31: tl.int64, w32: tl.int64, w33: tl.int64, w34: tl.int64, w35: tl.int64,
    w36: tl.int64, w37: tl.int64, w38: tl.int64, w39: tl.int64, w40: tl.int64, w41: tl.int64, w42: tl.int64,
    w43: tl.int64, w44: tl.int64, w45: tl.int64, w46: tl.int64, w47: tl.int64, w48: tl.int64, w49: tl.int64,
    w50: tl.int64, w51: tl.int64, w52: tl.int64, w53: tl.int64, w54: tl.int64, w55: tl.int64, w56: tl.int64,
    w57: tl.int64, w58: tl.int64, w59: tl.int64, w60: tl.int64, w61: tl.int64, w62: tl.int64, w63: tl.int64,
):  # fmt: skip
    """Write ``count`` arguments to ``table[start:]``: a table that the host made, without a copy from its memory."""
    words = (
        w0, w1, w2, w3, w4, w5, w6, w7, w8, w9, w10, w11, w12, w13, w14, w15, w16, w17, w18, w19, w20, w21, w22, w23,
        w24, w25, w26, w27, w28, w29, w30, w31, w32, w33, w34, w35, w36, w37, w38, w39, w40, w41, w42, w43, w44, w45,
        w46, w47, w48, w49, w50, w51, w52, w53, w54, w55, w56, w57, w58, w59, w60, w61, w62, w63,
    )  # fmt: skip
    for i in tl.static_range(64):
        tl.store(table + start + i, words[i], mask=i < count)


@triton.jit
def _member_elements(address, kind: tl.constexpr):
    """The address as a pointer to elements of that kind."""
    return address.to(tl.pointer_type(kind))


@triton.jit
def _move(
    buffer, member, row, total, offset, width, outer, span, fits, block,
    TILE: tl.constexpr, VECTOR: tl.constexpr, PACKING: tl.constexpr,
):  # fmt: skip
    """One tile of one row of one member, between its memory and the buffer; elements change type on the way."""
    if fits:
        _move_vectors(buffer, member, row, total, offset, width, span, block, TILE, VECTOR, PACKING)
    else:
        _move_elements(buffer, member, row, total, offset, width, outer, span, block, TILE, PACKING)


@triton.jit
def _move_vectors(
    buffer, member, row, total, offset, width, span, block,
    TILE: tl.constexpr, VECTOR: tl.constexpr, PACKING: tl.constexpr,
):  # fmt: skip
    """One run, everything a multiple of VECTOR: 16 bytes at a time."""
    places = block * TILE + tl.arange(0, TILE)
    width = width // VECTOR * VECTOR  # the same number, now known to be a multiple: a hint on an argument gets lost
    in_buffer = buffer + tl.multiple_of(row * total + offset, VECTOR) + places
    in_member = tl.multiple_of(member + row * width, 16) + places
    left = tl.multiple_of(tl.minimum(width, span - row * width), VECTOR)
    if PACKING:
        value = tl.load(in_member, mask=places < left, other=0)
        tl.store(in_buffer, _converted(value, buffer.dtype.element_ty), mask=places < width)
    else:
        value = tl.load(in_buffer, mask=places < left, other=0)
        tl.store(in_member, _converted(value, member.dtype.element_ty), mask=places < left)


@triton.jit
def _move_elements(
    buffer, member, row, total, offset, width, outer, span, block, TILE: tl.constexpr, PACKING: tl.constexpr
):
    """Any sizes, addresses and number of runs: one element at a time."""
    places = block * TILE + tl.arange(0, TILE)
    inner = (width // outer).to(tl.int32)
    run = places * 0
    if outer > 1:
        run = places // inner
    here = row * inner + (places - run * inner)
    in_buffer = buffer + (row * total + offset) + places
    in_member = member + run.to(tl.int64) * span + here
    held = places < width
    there = held & (here < span)
    if PACKING:
        value = tl.load(in_member, mask=there, other=0)
        tl.store(in_buffer, _converted(value, buffer.dtype.element_ty), mask=held)
    else:
        value = tl.load(in_buffer, mask=there, other=0)
        tl.store(in_member, _converted(value, member.dtype.element_ty), mask=there)


@triton.jit
def _converted(value, kind: tl.constexpr):
    """The value in another type, by way of float32 as torch converts 16-bit types into each other; bits if the same."""
    if value.dtype == kind:
        return value
    else:
        return value.to(tl.float32).to(kind)


@triton.jit(do_not_specialize=["rows", "total", "members"])
def move_members(
    buffer, addresses, layout, rows: tl.int64, total: tl.int64, members: tl.int64,
    SAME: tl.constexpr, FLOAT32: tl.constexpr, BFLOAT16: tl.constexpr, FLOAT16: tl.constexpr,
    TILE: tl.constexpr, VECTOR: tl.constexpr, PACKING: tl.constexpr,
):  # fmt: skip
    """Pack members into ``buffer``, or unpack them out of it. One program a tile.

    Args:
        buffer: ``rows * total`` elements.
        addresses: two int64 words a member: place and type (0 the buffer's, 1 float32, 2 bfloat16, 3 float16).
        layout: the words of `Layout.table`.
        rows, total, members: the buffer's rows, elements of a row, and members.
        SAME, FLOAT32, BFLOAT16, FLOAT16: which types there are.
        TILE, VECTOR: as `Layout.table` was given them; TILE is a power of two.
        PACKING: the direction.
    """
    tile = tl.program_id(0).to(tl.int64)
    low = tile * 0
    high = members
    while high - low > 1:  # the last member that starts at this tile or before; empty ones start where the next does
        middle = (low + high) // 2
        if tl.load(layout + middle * 6) <= tile:
            low = middle
        else:
            high = middle
    words = layout + low * 6
    offset = tl.load(words + 1)
    width = tl.load(words + 2)
    outer = tl.load(words + 3)
    span = tl.load(words + 4)
    tile -= tl.load(words)
    tiles = (width + TILE - 1) // TILE
    row = tile // tiles
    block = (tile - row * tiles).to(tl.int32)
    address = tl.load(addresses + low * 2)
    kind = tl.load(addresses + low * 2 + 1)
    fits = (tl.load(words + 5) == 1) & (address % 16 == 0)
    if SAME:
        if kind == 0:
            _move(
                buffer, _member_elements(address, buffer.dtype.element_ty), row, total, offset, width, outer, span,
                fits, block, TILE, VECTOR, PACKING,
            )  # fmt: skip
    if FLOAT32:
        if kind == 1:
            _move(
                buffer, _member_elements(address, tl.float32), row, total, offset, width, outer, span, fits, block,
                TILE, VECTOR, PACKING,
            )  # fmt: skip
    if BFLOAT16:
        if kind == 2:
            _move(
                buffer, _member_elements(address, tl.bfloat16), row, total, offset, width, outer, span, fits, block,
                TILE, VECTOR, PACKING,
            )  # fmt: skip
    if FLOAT16:
        if kind == 3:
            _move(
                buffer, _member_elements(address, tl.float16), row, total, offset, width, outer, span, fits, block,
                TILE, VECTOR, PACKING,
            )  # fmt: skip
