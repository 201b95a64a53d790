"""Where does each element of a bucket lie? The layout that the operators state, as values and as the kernels' table."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True, eq=False)
class Layout:
    """A buffer of `rows` equal rows, each holding the same part of every member.

    A member of ``lengths[i]`` elements counts as ``outers[i]`` runs of ``span`` elements. Row ``r`` holds, of each run,
    its elements ``r * inner`` to ``(r + 1) * inner``, with ``inner = widths[i] / outers[i]``; what lies behind the end
    of a run is padding. One run: shards of dimension 0, equal or not. Several: shards of a later dimension.

    Attributes:
        widths: elements of each member in a row, padding included.
        outers: runs of each member.
        lengths: elements of each member, without padding.
        rows: ranks that the buffer is scattered to or gathered from; 1 for neither.
        offsets: where each member starts in a row.
        total: elements of a row.
        widest: the largest of the widths.
    """

    widths: tuple[int, ...]
    outers: tuple[int, ...]
    lengths: tuple[int, ...]
    rows: int
    offsets: tuple[int, ...] = field(init=False)
    total: int = field(init=False)
    widest: int = field(init=False)

    def __post_init__(self) -> None:
        _check(self.widths, self.outers, self.lengths, self.rows)
        starts = tuple(itertools.accumulate(self.widths, initial=0))
        object.__setattr__(self, "offsets", starts[:-1])
        object.__setattr__(self, "total", starts[-1])
        object.__setattr__(self, "widest", max(self.widths))

    def table(self, tile: int, vector: int) -> tuple[tuple[int, ...], int]:
        """The table of the kernels and the number of tiles.

        The first tile of each member, so that one load reads them all; then three words a member: its offset, its
        width and (from bit 32 on) outer, and whether vectors fit (bit 0) and its span.

        Args:
            tile: elements that one program handles.
            vector: elements that one load or store should take; what is no multiple of it is handled one by one.
        """
        firsts: list[int] = []
        words: list[int] = []
        first = 0
        for offset, width, outer, length in zip(self.offsets, self.widths, self.outers, self.lengths, strict=True):
            even = (offset, width, length, *((self.total,) if self.rows > 1 else ()))
            fits = outer == 1 and all(size % vector == 0 for size in even)
            firsts.append(first)
            words += (offset, width | outer << 32, length // outer << 1 | int(fits))
            first += self.rows * -(-width // tile)
        return (*firsts, *words), first


@functools.lru_cache(maxsize=1024)
def layout_of(
    widths: tuple[int, ...], outers: tuple[int, ...], lengths: tuple[int, ...], rows: int
) -> Layout:
    """The layout of these numbers, one object for equal ones: see `Layout`.

    Raises:
        ValueError: the numbers contradict each other.
    """
    return Layout(widths, outers, lengths, rows)


def _check(widths: Sequence[int], outers: Sequence[int], lengths: Sequence[int], rows: int) -> None:
    if not len(widths) == len(outers) == len(lengths) or not widths:
        raise ValueError("expected a width, a number of runs and a length of each member of a bucket, found "
                         f"{len(widths)} widths, {len(outers)} numbers of runs and {len(lengths)} lengths")
    if rows < 1:
        raise ValueError(f"expected a bucket of one row or more, found {rows}")
    for place, (width, outer, length) in enumerate(zip(widths, outers, lengths, strict=True)):
        if outer < 1 or width < 0 or width % outer or length % outer or rows * width < length:
            raise ValueError(f"expected member {place} of a bucket to fit into {rows} rows, found {length} elements in "
                             f"{outer} runs and a width of {width} in each row")
