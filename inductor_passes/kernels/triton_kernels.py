"""What runs on the device? One kernel that moves a bucket's members into or out of its buffer, one that writes tables.

The only file that names triton. Read: triton 3.6.0, 3.7.1, 3.8.0 (``do_not_specialize`` keeps an annotated integer
argument one type and one variant; ``multiple_of`` on a pointer counts bytes; ``warmup`` keeps what it compiles where a
launch looks, and takes an element type for a tensor that is aligned).
"""
# mypy: disallow_untyped_defs = false
from __future__ import annotations

import triton
import triton.language as tl
from triton.runtime import driver

WORDS = 64
"""Words that one launch of `write_words` writes."""

LOOKS = (32, 128, 1024)
"""How many members a program may look at in one load; a variant each. More members: halved down to the last."""

_MOST = tl.constexpr(LOOKS[-1])
_NEVER = tl.constexpr(2**62)
_ARGUMENTS = [f"w{i}" for i in range(WORDS)]


def get_ready():
    """Have triton make the device's driver now, in this thread: it does not look whether another one makes it too."""
    return driver.active.launcher_cls


def compile_only(kernel, *arguments, **options):
    """Compile what a launch with these would, for the current device, and launch nothing.

    The host's part as well: up to 3.6 it is C, which a compiler turns into a file of triton's cache.
    """
    made = kernel.warmup(*arguments, grid=(1,), **options)
    if made is not None:  # an interpreted kernel is not compiled
        driver.active.launcher_cls(made.src, made.metadata)


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
def _member_elements(word, kind: tl.constexpr):
    """The word's address as a pointer to elements of that kind."""
    return (word >> 2).to(tl.pointer_type(kind))


@triton.jit
def _plus(one, other):
    """What `tl.sum` adds with; that one is compiled even where this file is interpreted."""
    return one + other


@triton.jit
def _member_of(tile, starts, members, LOOK: tl.constexpr):
    """The last member that starts at this tile or before, by one load of up to LOOK starts; empty ones start where the
    next does."""
    low = tile * 0
    if LOOK == _MOST:
        high = members
        while high - low > LOOK:
            middle = (low + high) // 2
            if tl.load(starts + middle) <= tile:
                low = middle
            else:
                high = middle
    places = low + tl.arange(0, LOOK)
    found = tl.load(starts + places, mask=places < members, other=_NEVER)
    return low + tl.reduce((found <= tile).to(tl.int32), 0, _plus) - 1


@triton.jit
def _move(
    buffer, member, row, total, offset, width, outer, span, fits, first, tile,
    CHUNK: tl.constexpr, FEW: tl.constexpr, VECTOR: tl.constexpr, PACKING: tl.constexpr,
):  # fmt: skip
    """One tile of one row of one member, between its memory and the buffer; elements change type on the way."""
    if fits:
        _move_vectors(buffer, member, row, total, offset, width, span, first, tile, CHUNK, VECTOR, PACKING)
    else:
        _move_elements(buffer, member, row, total, offset, width, outer, span, first, tile, FEW, PACKING)


@triton.jit
def _move_vectors(
    buffer, member, row, total, offset, width, span, first, tile,
    CHUNK: tl.constexpr, VECTOR: tl.constexpr, PACKING: tl.constexpr,
):  # fmt: skip
    """One run, everything a multiple of VECTOR: 16 bytes at a time, a chunk read before any of it is written."""
    width = width // VECTOR * VECTOR  # the same number, now known to be a multiple: a hint on an argument gets lost
    first = first // VECTOR * VECTOR
    in_buffer = buffer + tl.multiple_of(row * total + offset, VECTOR) + first
    in_member = tl.multiple_of(member + row * width, 16) + first
    held = tl.multiple_of(tl.minimum(width - first, tile).to(tl.int32), VECTOR)
    left = tl.maximum(span - row * width - first, 0)
    there = tl.multiple_of(tl.minimum(left, held).to(tl.int32), VECTOR)
    if PACKING:
        for start in range(0, held, CHUNK):
            places = start + tl.arange(0, CHUNK)
            value = tl.load(in_member + places, mask=places < there, other=0)
            tl.store(in_buffer + places, _converted(value, buffer.dtype.element_ty), mask=places < held)
    else:
        for start in range(0, there, CHUNK):
            places = start + tl.arange(0, CHUNK)
            value = tl.load(in_buffer + places, mask=places < there, other=0)
            tl.store(in_member + places, _converted(value, member.dtype.element_ty), mask=places < there)


@triton.jit
def _move_elements(
    buffer, member, row, total, offset, width, outer, span, first, tile, FEW: tl.constexpr, PACKING: tl.constexpr
):
    """Any sizes, addresses and number of runs: one element at a time, few before a store so that registers suffice."""
    inner = (width // outer).to(tl.int32)
    in_buffer = buffer + (row * total + offset)
    for start in range(first, first + tl.minimum(width - first, tile).to(tl.int32), FEW):
        places = start + tl.arange(0, FEW)
        run = places * 0
        if outer > 1:
            run = places // inner
        here = row * inner + (places - run * inner)
        in_member = member + run.to(tl.int64) * span + here
        held = places < width
        there = held & (here < span)
        if PACKING:
            value = tl.load(in_member, mask=there, other=0)
            tl.store(in_buffer + places, _converted(value, buffer.dtype.element_ty), mask=held)
        else:
            value = tl.load(in_buffer + places, mask=there, other=0)
            tl.store(in_member, _converted(value, member.dtype.element_ty), mask=there)


@triton.jit
def _converted(value, kind: tl.constexpr):
    """The value in another type, by way of float32 as torch converts 16-bit types into each other; bits if the same."""
    if value.dtype == kind:
        return value
    else:
        return value.to(tl.float32).to(kind)


@triton.jit(do_not_specialize=["total", "members", "shift"])
def move_members(
    buffer, addresses, layout, total: tl.int64, members: tl.int32, shift: tl.int32,
    KINDS: tl.constexpr, LOOK: tl.constexpr, CHUNK: tl.constexpr, FEW: tl.constexpr, VECTOR: tl.constexpr,
    PACKING: tl.constexpr,
):  # fmt: skip
    """Pack members into ``buffer``, or unpack them out of it. One program a tile.

    What a program has to know comes in two rounds of loads: the starts of all members, then the words of its own.

    Args:
        buffer: rows of ``total`` elements.
        addresses: an int64 word a member: its address times 4, and its type (0 the buffer's, 1 float32, 2 bfloat16, 3
            float16).
        layout: the words of `Layout.table`.
        total, members: elements of a row, and members.
        shift: a tile has 2 to the power of that many elements, as `Layout.table` was told.
        KINDS: which types there are, a bit each.
        LOOK: one of `LOOKS`, the first that is not less than ``members``, or the last.
        CHUNK: elements that are loaded before any of them is stored, a power of two; where vectors fit.
        FEW: the same where they do not.
        VECTOR: as `Layout.table` was told.
        PACKING: the direction.
    """
    tile = tl.program_id(0)
    index = _member_of(tile, layout, members, LOOK)
    words = layout + members + index * 3
    offset = tl.load(words)
    sizes = tl.load(words + 1)
    ends = tl.load(words + 2)
    word = tl.load(addresses + index)
    tile -= tl.load(layout + index).to(tl.int32)
    width = sizes & 0xFFFFFFFF
    outer = sizes >> 32
    span = ends >> 1
    kind = word & 3
    fits = ((ends & 1) == 1) & ((word >> 2) % 16 == 0)
    size = tl.full((), 1, tl.int32) << shift
    tiles = ((width + size - 1) >> shift).to(tl.int32)
    row = (tile // tiles).to(tl.int64)
    first = (tile - tile // tiles * tiles) << shift
    if KINDS & 1:
        if kind == 0:
            _move(
                buffer, _member_elements(word, buffer.dtype.element_ty), row, total, offset, width, outer, span, fits,
                first, size, CHUNK, FEW, VECTOR, PACKING,
            )  # fmt: skip
    if KINDS & 2:
        if kind == 1:
            _move(
                buffer, _member_elements(word, tl.float32), row, total, offset, width, outer, span, fits,
                first, size, CHUNK, FEW, VECTOR, PACKING,
            )  # fmt: skip
    if KINDS & 4:
        if kind == 2:
            _move(
                buffer, _member_elements(word, tl.bfloat16), row, total, offset, width, outer, span, fits,
                first, size, CHUNK, FEW, VECTOR, PACKING,
            )  # fmt: skip
    if KINDS & 8:
        if kind == 3:
            _move(
                buffer, _member_elements(word, tl.float16), row, total, offset, width, outer, span, fits,
                first, size, CHUNK, FEW, VECTOR, PACKING,
            )  # fmt: skip
