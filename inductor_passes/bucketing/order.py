"""In which order do the nodes of the merged graph stand?"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Sequence

_LAST = float("inf")


class RingError(ValueError):
    """The items wait for each other in a ring; `items` are the positions that never became free."""

    def __init__(self, items: Sequence[int]) -> None:
        super().__init__(f"{len(items)} items wait for each other in a ring")
        self.items = tuple(items)


def stable_order(
    before: Sequence[Sequence[int]], priority: Sequence[float], hoisted: Iterable[int]
) -> list[int]:
    """A topological order that keeps to the priorities as closely as it may. O(n log n) in items and edges.

    Of the items whose predecessors have all been placed, the one of lowest priority comes next (then the one
    of lowest position). An item that waits for a late one is therefore placed as soon as that one is; an
    item before a hoisted one inherits its priority, so that the hoisted item really gets its place.

    Args:
        before: for each item the positions of the items that must precede it; repeats do no harm.
        priority: the place each item would like to have, e.g. its index in the graph before.
        hoisted: items whose priority is handed on to everything they depend on.

    Raises:
        RingError: no such order exists.
    """
    size = len(before)
    after: list[list[int]] = [[] for _ in range(size)]
    for item, earlier in enumerate(before):
        for p in earlier:
            after[p].append(item)
    any_order = _any_order(before, after)
    wanted = list(priority)
    inherited: list[float] = [_LAST] * size
    for item in hoisted:
        inherited[item] = priority[item]
    for item in reversed(any_order):
        handed_on = inherited[item]
        if handed_on == _LAST:
            continue
        if handed_on < wanted[item]:
            wanted[item] = handed_on
        for p in before[item]:
            if handed_on < inherited[p]:
                inherited[p] = handed_on
    missing = [len(earlier) for earlier in before]
    heap = [(wanted[i], i) for i in range(size) if missing[i] == 0]
    heapq.heapify(heap)
    placed: list[int] = []
    while heap:
        _, item = heapq.heappop(heap)
        placed.append(item)
        for following in after[item]:
            missing[following] -= 1
            if missing[following] == 0:
                heapq.heappush(heap, (wanted[following], following))
    return placed


def _any_order(before: Sequence[Sequence[int]], after: Sequence[Sequence[int]]) -> list[int]:
    missing = [len(earlier) for earlier in before]
    placed = [i for i, count in enumerate(missing) if count == 0]
    for item in placed:  # grows while it is read
        for following in after[item]:
            missing[following] -= 1
            if missing[following] == 0:
                placed.append(following)
    if len(placed) < len(before):
        raise RingError([i for i, count in enumerate(missing) if count > 0])
    return placed
