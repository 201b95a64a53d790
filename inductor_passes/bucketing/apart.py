"""Which members of one parameter group are needed, or ready, too far apart to wait for each other?

The root of a model holds what comes first and what comes last: gathered together, the head lies around from the
beginning, and the head's gradient waits for the embedding's to be reduced, when nothing is left to hide it behind.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate, groupby, pairwise

from torch import fx

from collective_identity.transports import Transport, waits_of

from ..uses import Inputs, first_use, multiplies, packing, ready, unpacking
from .plan import MIB
from .survey import Candidate

SMALL = 4 * MIB
"""Bytes below which a part is not worth a collective of its own: about 20 us of launch at 200 GB/s, as measured on two
H200 (docs/results.md)."""

ENDS = 2
"""So many parts have nothing before them, in forward, or behind them, in backward, to hide behind but themselves."""

SHARE = 0.4
"""Of a part that is cut, what may be left without anything to hide behind."""

LIGHT = MIB // 16
"""Bytes below which a member costs nothing wherever it goes: a norm's weight, a bias."""

Needed = tuple[int, int, Candidate]
"""Where a gather is first used or a reduction's gradient is there, its own position, and the collective."""


def apart(candidates: Sequence[Candidate], index: Mapping[fx.Node, int]) -> dict[fx.Node, int]:
    """The part of its unit that each candidate belongs to, numbered from 0; linear but for sorting.

    A part ends where a collective of another unit, of the same role, transport and half of the step, is needed in
    between: a gather where its result is first used, a reduction where its gradient is there. A small part joins the
    one before it (gathers) or after it (reductions), so that nothing comes later than it is needed.

    The first parts that are gathered in forward and the last that are reduced are cut in two, where products are
    computed between their members: neither what is needed first nor what is there first has to wait for the rest.
    """
    found: dict[fx.Node, int] = {}
    inputs = Inputs()
    streams: dict[tuple[object, ...], list[Needed]] = {}
    for c in candidates:
        if c.launch.transport is Transport.ALL_GATHER:
            need = first_use(unpacking(*waits_of(c.node), inputs=inputs), index, default=c.position)
        else:
            need = ready(c.node, packing(c.node), index)
        streams.setdefault((*c.family, c.phase), []).append((need, c.position, c))
    products = _products(index)
    for stream in streams.values():
        runs: dict[str | None, list[list[Needed]]] = {}
        for unit, run in groupby(sorted(stream, key=_needed), _unit):
            runs.setdefault(unit, []).append(list(run))
        without, named = runs.pop(None, []), [part for parts in runs.values() for part in _joined(parts)]
        found.update((c.node, 0) for part in without for *_, c in part)
        for number, part in enumerate(_cut_at_end(named, products)):
            found.update((c.node, number) for *_, c in part)
    return found


def _needed(one: Needed) -> tuple[int, int]:
    return one[:2]


def _unit(one: Needed) -> str | None:
    return one[2].identity.param_group


def _gathers(part: Sequence[Needed]) -> bool:
    return part[0][2].launch.transport is Transport.ALL_GATHER


def _light(one: Needed) -> bool:
    return one[2].nbytes < LIGHT


def _bytes(part: Sequence[Needed]) -> int:
    return sum(c.nbytes for *_, c in part)


def _joined(parts: list[list[Needed]]) -> list[list[Needed]]:
    joined: list[list[Needed]] = []
    sizes: list[int] = []
    for part in parts if _gathers(parts[0]) else reversed(parts):
        size = _bytes(part)
        if joined and (size < SMALL or (len(joined) == 1 and sizes[0] < SMALL)):
            joined[-1] += part
            sizes[-1] += size
        else:
            joined.append([*part])
            sizes.append(size)
    return joined


def _products(index: Mapping[fx.Node, int]) -> list[int]:
    """How many products and attentions stand before each position."""
    return [0, *accumulate(map(multiplies, index))]


def _cut_at_end(parts: list[list[Needed]], products: Sequence[int]) -> Iterator[list[Needed]]:
    if not parts:
        return
    gathers = _gathers(parts[0])
    parts = sorted((sorted(part, key=_needed) for part in parts), key=lambda part: _needed(part[0 if gathers else -1]))
    if not gathers:
        ends = range(len(parts) - ENDS, len(parts))
    else:
        ends = range(ENDS if parts[0][0][2].phase == "forward" else 0)
    for place, part in enumerate(parts):
        cut = _cut(part, products) if place in ends else 0
        first, rest = part[:cut], part[cut:]
        if not gathers:  # Inductor computes the gradients of norms together, which is late for the first
            first, rest = [m for m in first if not _light(m)], [*filter(_light, first), *rest]
        yield from (first, rest) if first else (rest,)


def _cut(part: Sequence[Needed], products: Sequence[int]) -> int:
    """How many members come before the cut; 0: there is no place where anything is multiplied between two of them.

    What nothing hides, the first members of a gather and the last of a reduction, is as much as `SHARE` allows: of an
    attention and its feed-forward the one that is smaller. Less would leave Inductor less room: it joins kernels of
    what comes after, and runs all that they need before.
    """
    gathers, whole = _gathers(part), _bytes(part)
    before = most = cut = 0
    for place, ((need, _, member), (following, *_)) in enumerate(pairwise(part), start=1):
        before += member.nbytes
        bare = before if gathers else whole - before
        if SMALL <= bare <= SHARE * whole and bare > most and products[following] > products[need]:
            most, cut = bare, place
    return cut
