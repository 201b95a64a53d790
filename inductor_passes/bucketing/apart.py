"""Which members of one parameter group are needed, or ready, too far apart to wait for each other?

The root of a model holds what comes first and what comes last: gathered together, the head lies around from the
beginning, and the head's gradient waits for the embedding's to be reduced, when nothing is left to hide it behind.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import chain, groupby

from torch import fx

from collective_identity.transports import Transport, waits_of

from ..uses import Inputs, first_use, packing, ready, unpacking
from .plan import MIB
from .survey import Candidate

SMALL = 4 * MIB
"""Bytes below which a part is not worth a collective of its own: about 20 us of launch at 200 GB/s, as measured on two
H200 (docs/results.md)."""


def apart(candidates: Sequence[Candidate], index: Mapping[fx.Node, int]) -> dict[fx.Node, int]:
    """The part of its unit that each candidate belongs to, numbered from 0; linear but for sorting.

    A part ends where a collective of another unit, of the same role, transport and half of the step, is needed in
    between: a gather where its result is first used, a reduction where its gradient is there. A small part joins the
    one before it (gathers) or after it (reductions), so that nothing comes later than it is needed.
    """
    found: dict[fx.Node, int] = {}
    inputs = Inputs()
    streams: dict[tuple[object, ...], list[tuple[int, int, Candidate]]] = {}
    for c in candidates:
        if c.launch.transport is Transport.ALL_GATHER:
            need = first_use(unpacking(*waits_of(c.node), inputs=inputs), index, default=c.position)
        else:
            need = ready(c.node, packing(c.node), index)
        streams.setdefault((*c.family, c.phase), []).append((need, c.position, c))
    for stream in streams.values():
        runs: dict[str | None, list[list[Candidate]]] = {}
        for unit, run in groupby((c for *_, c in sorted(stream, key=lambda one: one[:2])), _unit):
            runs.setdefault(unit, []).append(list(run))
        for unit, parts in runs.items():
            for number, part in enumerate([list(chain.from_iterable(parts))] if unit is None else _joined(parts)):
                found.update((c.node, number) for c in part)
    return found


def _unit(c: Candidate) -> str | None:
    return c.identity.param_group


def _joined(parts: list[list[Candidate]]) -> list[list[Candidate]]:
    gathers = parts[0][0].launch.transport is Transport.ALL_GATHER
    joined: list[list[Candidate]] = []
    sizes: list[int] = []
    for part in parts if gathers else reversed(parts):
        size = sum(c.nbytes for c in part)
        if joined and (size < SMALL or (len(joined) == 1 and sizes[0] < SMALL)):
            joined[-1] += part
            sizes[-1] += size
        else:
            joined.append([*part])
            sizes.append(size)
    return joined
