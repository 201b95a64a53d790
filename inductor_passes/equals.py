"""Which collectives will AOTAutograd take for one, and what may that one carry? Settled on the joint graph.

Torch's min-cut partitioner removes common subexpressions before it splits the joint graph (PyTorch 2.11-2.15
``_functorch/partitioners.py``, ``config.cse``), and keeps whichever of two equal collectives came first, with its
metadata. A look at the graph beforehand finds the sets that would become one; where their identities differ, each of
the set is given what the contract gives the one that stays. Only metadata changes, in every mode; nothing, where
another partitioner runs (the strict preset's, or the user's own).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from torch import fx

from collective_identity import Identity, plan_normalization, store
from collective_identity.merge import merge_outcome
from collective_identity.transports import Launch, launches

from . import upstream

CSE = "fx_graph_cse"
"""The producer of what equal collectives are given, and the pass that a loss names."""

_MARK = "collective_identity.equals"


def settle_equal_collectives(gm: fx.GraphModule, *, inductor: bool = True) -> int:
    """Give collectives of this graph that become one, and say different things, one identity or one loss.

    Linear in nodes and edges.

    Args:
        gm: the joint graph, before it is partitioned.
        inductor: Inductor partitions it, with the configuration of the moment; else torch's min-cut partitioner.

    Returns:
        How many collectives were written to.
    """
    found = launches(gm)
    if len(found) < 2 or not upstream.removes_common_subexpressions(inductor=inductor):
        return 0
    plan = plan_normalization(gm)
    identities = {n: store.verdict_for(n, launch, plan.payloads_at(n)).identity for n, launch in found.items()}
    classes = [one for one in _equal(gm.graph, found) if len({_said(n, identities[n]) for n in one}) > 1]
    written = 0
    for several in _merged(gm.graph, classes):
        outcome = merge_outcome([identities[node] for node in several], producer=CSE)
        lost = next((loss for node in several if (loss := store.dropped_of(node)) is not None), None)
        for node in several:
            if outcome.identity is not None:
                store.stamp(node, outcome.identity)
            elif outcome.code is not None:
                store.drop(node, outcome.code, CSE, outcome.detail)
            elif lost is not None and lost.code is not None:
                store.drop(node, lost.code, lost.pass_name or CSE, lost.detail)
        written += len(several)
    return written


def _said(node: fx.Node, identity: Identity | None) -> object:
    return store.dropped_of(node) if identity is None else identity


def _equal(graph: fx.Graph, found: dict[fx.Node, Launch]) -> list[list[fx.Node]]:
    """Collectives that compute the same, in classes of two or more: at least those that torch finds equal."""
    number: dict[fx.Node, int] = {}
    known: dict[object, int] = {}
    classes: dict[int, list[fx.Node]] = {}
    for i, node in enumerate(graph.nodes):
        number[node] = i
        if node.op != "call_function":
            continue
        try:
            number[node] = known.setdefault((node.target, _key((node.args, node.kwargs), number)), i)
        except TypeError:  # an argument without a hash; torch finds no such node equal to another either
            continue
        if node in found:
            classes.setdefault(number[node], []).append(node)
    return [several for several in classes.values() if len(several) > 1]


def _key(value: Any, number: dict[fx.Node, int]) -> object:
    if isinstance(value, fx.Node):
        return _MARK, number[value]
    if isinstance(value, (list, tuple)):
        return tuple([_key(one, number) for one in value])
    if isinstance(value, dict):
        return tuple([(name, _key(one, number)) for name, one in value.items()])
    if isinstance(value, slice):
        return _key((value.start, value.stop, value.step), number)
    return (type(value), str(value)) if upstream.is_symbolic(value) else (type(value), value)


def _merged(graph: fx.Graph, classes: Iterable[list[fx.Node]]) -> Iterator[list[fx.Node]]:
    """The sets that torch does make one, by what its own function leaves; asked only where classes need it."""
    classes = list(classes)
    if not classes:
        return
    asked = {node: i for i, node in enumerate(node for several in classes for node in several)}
    for node, i in asked.items():
        node.meta[_MARK] = i
    try:
        left = {node.meta.get(_MARK) for node in upstream.without_common_subexpressions(graph).nodes}
    finally:
        for node in asked:
            node.meta.pop(_MARK, None)
    for several in classes:
        into: list[list[fx.Node]] = []
        for node in several:
            if asked[node] in left or not into:
                into.append([])
            into[-1].append(node)
        yield from (one for one in into if len(one) > 1)
