"""Which collectives may share a bucket without the graph turning into a ring?"""

from __future__ import annotations

from collections.abc import Sequence


def depths(
    before: Sequence[Sequence[int]], counted: Sequence[bool], late: Sequence[bool]
) -> list[int]:
    """A level for every counted node, such that along any path levels strictly increase.

    Merging counted nodes of one level, however many such merges are made at once, leaves the graph acyclic:
    a ring in the merged graph would have to pass through a merged node (the graph itself has no ring), every
    way out of it leads to nodes of higher levels only, and so never back. No pairwise path search is needed.

    A gather gets the lowest level it can have, the number of counted nodes on the longest path that leads to
    it. A reduction (``late``) gets the highest: the weight gradient of a last layer, which needs no
    re-gathered parameter, then has the level of its unit's other gradients, which do.

    Args:
        before: for each node of a topological order the positions of what must run before it.
        counted: whether the node takes part.
        late: whether it takes the highest level instead of the lowest; read for counted nodes only.

    Returns:
        One level per node, 0 or more; for a node that is not counted the number is meaningless. Two linear
        sweeps over nodes and edges.
    """
    size = len(before)
    low = [0] * size
    reach = [0] * size
    for i in range(size):
        level = 0
        for p in before[i]:
            if reach[p] > level:
                level = reach[p]
        low[i] = level
        reach[i] = level + 1 if counted[i] else level
    ceiling = max((low[i] for i in range(size) if counted[i]), default=0) + 1
    levels = low
    limit = [ceiling] * size
    for i in range(size - 1, -1, -1):
        bound = limit[i]
        if counted[i]:
            if late[i]:
                levels[i] = bound - 1
            bound = levels[i]
        for p in before[i]:
            if limit[p] > bound:
                limit[p] = bound
    return levels
