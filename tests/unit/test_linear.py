"""Ten times the nodes take about ten times the seconds, whatever the shape: a quadratic rule would take a hundred.

Processor seconds, the best of several runs; ``python -m benchmarks classify`` goes up to a million nodes.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import Any

import pytest
from torch import fx

from collective_identity import PARAM_UNSHARD, classify_report, digest, normalize, stamp, start_nodes
from collective_identity.digest import collective_table, payload_digest
from collective_identity.losses import record_losses, snapshot
from collective_identity.structure import structural_roles
from collective_identity.subgraphs import graph_modules
from collective_identity.transports import launch_of
from collective_identity.view import build_view
from tests.graphs import annotate, counting_work, identity, payload
from tests.shapes import MORE_SHAPES, SHAPES, C, Nodes, built, chain, one_of_each

SMALL, LARGE, AT_MOST = 250, 2500, 25


def growth(shape: Callable[[Nodes, int], list[fx.Node]], run: Callable[[fx.GraphModule], Any]) -> float:
    def seconds(size: int) -> float:
        gm = built(shape, size)
        return best_of_four(lambda: run(gm))

    return least_growth(seconds)


def least_growth(seconds: Callable[[int], float]) -> float:
    """Of up to three looks, since another process may slow any one of them; a quadratic rule is far over in all."""
    found = math.inf
    for _ in range(3):
        found = min(found, seconds(LARGE) / seconds(SMALL))
        if found < AT_MOST:
            break
    return found


def best_of_four(run: Callable[[], Any]) -> float:
    found = []
    for _ in range(4):
        start = time.process_time()
        run()
        found.append(time.process_time() - start)
    return min(found)


@pytest.mark.parametrize("rules", ["extended", "compatible"])
@pytest.mark.parametrize("shape", SHAPES, ids=lambda f: f.__name__)
def test_structure(shape: Callable[..., Any], rules: Any) -> None:
    assert growth(shape, lambda gm: classify_report(gm, rules=rules)) < AT_MOST


@pytest.mark.parametrize("rules", ["extended", "compatible"])
def test_the_groups_of_many_subgraphs(rules: Any) -> None:
    """What is known of the groups costs the same for each sub-graph, however many there are."""

    def seconds(size: int) -> float:
        views = []
        for i in range(size):
            g = Nodes()
            one_of_each(g, f"group{i}")
            views.append(build_view({node: launch for node in g.graph.nodes if (launch := launch_of(node))}, rules))
        return best_of_four(lambda: structural_roles(views, rules, fsdp_groups=[f"said{i}" for i in range(size)]))

    assert least_growth(seconds) < AT_MOST


@pytest.mark.parametrize("shape", SHAPES, ids=lambda f: f.__name__)
def test_strays(shape: Callable[..., Any]) -> None:
    """A payload on every node but the collectives', as annotated regions leave it."""

    def strays(g: Nodes, size: int) -> list[fx.Node]:
        out = shape(g, size)
        for node in g.graph.nodes:
            annotate(node, payload(PARAM_UNSHARD))
        return out

    assert growth(strays, classify_report) < AT_MOST


def test_explicit() -> None:
    def stamped(g: Nodes, size: int) -> list[fx.Node]:
        out = chain(g, size)
        for node in g.graph.nodes:
            if node.target is C.all_gather_into_tensor.default:
                stamp(node, identity(PARAM_UNSHARD))
        return out

    assert growth(stamped, lambda gm: (normalize(gm), classify_report(gm))) < AT_MOST
    gm = built(stamped, SMALL)
    assert len(start_nodes(gm)) == SMALL and not classify_report(gm).structure_built


def extended(gm: fx.GraphModule) -> object:
    return classify_report(gm)


def compatible(gm: fx.GraphModule) -> object:
    return classify_report(gm, rules="compatible")


def losses(gm: fx.GraphModule) -> object:
    return record_losses(snapshot(gm), gm, pass_name="p")


ASKED = (extended, compatible, digest, payload_digest, collective_table, losses, normalize)


def annotated(gm: fx.GraphModule) -> None:
    """A payload on every other node that launches nothing, as annotated regions leave it."""
    for module in graph_modules(gm):
        for node in list(module.graph.nodes)[::2]:
            if node.op != "output" and launch_of(node) is None:
                annotate(node, payload(PARAM_UNSHARD))


def work(run: Callable[[], Any]) -> int:
    with counting_work() as done:
        run()
    return done()


@pytest.mark.parametrize("shape", [*SHAPES, *MORE_SHAPES], ids=lambda f: f.__name__)
def test_work(shape: Callable[..., Any]) -> None:
    """Ten times the nodes take at most twelve times the instructions, whatever is asked."""
    small, large = built(shape, 30), built(shape, 300)
    for gm in (small, large):
        annotated(gm)
    for asked in ASKED:
        first, second = work(lambda asked=asked: asked(small)), work(lambda asked=asked: asked(large))
        assert second <= 12 * first, f"{asked.__name__}: {second / first:.1f} times the work for ten times the nodes"


@pytest.mark.parametrize("becomes", ["as many", "one", "none"])
def test_losses(becomes: str) -> None:
    """Every collective loses its identity: to another each, all to one, or with nothing left."""

    def lost(size: int) -> int:
        before, after = Nodes(), Nodes()
        kept = {"as many": size, "one": 1, "none": 0}[becomes]
        outs = [before.gathered(before.placeholder("w")) for _ in range(size)]
        for out in outs:
            stamp(out.all_input_nodes[0], identity(PARAM_UNSHARD))
        seen = snapshot(before.module(*outs))
        left = [after.gathered(after.placeholder("w")) for _ in range(kept)]
        for out in left if becomes == "one" else ():
            out.all_input_nodes[0].name = "merged"
        gm = after.module(*left)
        found: list[Any] = []
        counted = work(lambda: found.extend(record_losses(seen, gm, pass_name="p")))
        assert len(found) == size and len({loss.node for loss in found}) == max(kept, 1)
        return counted

    assert lost(400) <= 12 * lost(40)
