"""How does a fused operator look in the graph? Builds it, and records the identity that ends there."""

from __future__ import annotations

import operator
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

import torch
from torch import fx

from collective_identity import store
from collective_identity.transports import Transport, launch_of

from .. import symmetric
from ..bucketing.node_builder import NodeBuilder, mode_of
from ..decomposition import replaced
from .match import GatherMatmul, MatmulScatter, flattened, gather_matmul, matmul_scatter
from .plan import Fusion, FusionPlan

PASS_NAME: Final = "fusion"
"""The pass named in the records of what was lost."""

_HANDED_ON: Final = ("stack_trace", "nn_module_stack", "partitioner_tag", "autograd_backward")
_ATEN: Final = torch.ops.aten


def apply_fusions(gm: fx.GraphModule, plan: FusionPlan) -> bool:
    """Carry out a plan; True if the graph changed. Its code is not generated again: call `gm.recompile()`.

    The fused operator carries no role: it is no ordinary collective. The identity that it swallows is recorded on
    it as dropped (opaque), and its provenance record names the collective.

    Raises:
        ValueError: the plan is not of this graph.
    """
    if not plan.fusions:
        return False
    present = set(gm.graph.nodes)
    stranger = next((f.match.start for f in plan.fusions if f.match.start not in present), None)
    if stranger is not None:
        raise ValueError(f"expected a plan of this graph, found {stranger.name!r} not in it; plan again after any "
                         "change to the graph")
    with _output_apart(gm.graph):
        for fusion in plan.fusions:
            match = _again(fusion.match.start)
            if isinstance(match, GatherMatmul):
                _gather(gm.graph, fusion, match)
            else:
                _scatter(gm.graph, fusion, match)
    return True


@contextmanager
def _output_apart(graph: fx.Graph) -> Iterator[None]:
    """Each value that the graph returns has one user of its own there: replacing it does not write the whole output,
    which may return every product (forward keeps them for backward)."""
    output = next(iter(reversed(graph.nodes)))
    with graph.inserting_before(output):
        apart = {node: graph.call_function(_returned, (node,)) for node in output.all_input_nodes}
    output.args = fx.map_arg(output.args, lambda node: apart[node])
    try:
        yield
    finally:
        output.args = fx.map_arg(output.args, lambda node: node.args[0])
        for node in apart.values():
            graph.erase_node(node)


def _returned(value: Any) -> Any:
    return value


def _again(start: fx.Node) -> GatherMatmul | MatmulScatter:
    """The match as it is now: an operand may be the result of a fusion made before."""
    launch = launch_of(start)
    assert launch is not None
    gathers = launch.transport is Transport.ALL_GATHER
    found = gather_matmul(start, launch) if gathers else matmul_scatter(start, launch)
    if found is None or isinstance(found, str):
        raise ValueError(f"expected {start.name!r} to be fused as planned, found the graph changed; plan again")
    return found


def _gather(graph: fx.Graph, fusion: Fusion, match: GatherMatmul) -> None:
    start, gathered, products = match.start, match.gathered, match.products
    sent = start.args[0]
    assert isinstance(sent, fx.Node)
    rights: list[fx.Node] = [p.args[1] for p in products]  # type: ignore[misc]
    for node in match.raised:
        match.first.prepend(node)
    build = _builder(graph, start, [sent, *rights])
    shape = tuple(gathered.meta["val"].shape)
    flat = flattened(match)
    kept = any(user not in products and user not in flat for user in gathered.users)
    with graph.inserting_before(match.first):
        values = [build.laid_out((*shape[:-1], r.meta["val"].shape[1]), match.dim, r) for r in rights]
        whole = build.laid_out(shape, match.dim, sent) if kept else None
        fused = build.call(
            symmetric.gather_matmul(), (sent, rights, match.dim, fusion.group), [],
            (whole, values), return_A=kept,
        )
        _record(fused, fusion)
        if kept:
            first: fx.Node = build.call(operator.getitem, (fused, 0), [], whole)
            if match.dim:  # the operator gives a view with another order of strides
                first = build.call(_ATEN.clone.default, (first,), [], memory_format=torch.contiguous_format)
        results = build.call(operator.getitem, (fused, 1), [], values)
        outputs = []
        for number, product in enumerate(products):
            one = build.call(operator.getitem, (results, number), [], values[number])
            outputs.append(build.reshape(one, list(product.meta["val"].shape), []))
    for product, output in zip(products, outputs, strict=True):
        product.replace_all_uses_with(output)
        graph.erase_node(product)
    for node in flat:
        graph.erase_node(node)
    if kept:
        gathered.replace_all_uses_with(first)
    _erase_unused(graph, [start, next(iter(start.users)), *match.through, gathered])


def _scatter(graph: fx.Graph, fusion: Fusion, match: MatmulScatter) -> None:
    right = match.product.args[1]
    assert isinstance(right, fx.Node)
    build = _builder(graph, match.start, [match.left, right])
    with graph.inserting_before(match.start):
        left = build.reshape(match.left, list(match.shape), [])
        fused = build.call(
            symmetric.matmul_scatter(),
            (left, right, fusion.reduce_op, match.dim, fusion.group), [], match.wait.meta["val"],
        )
        _record(fused, fusion)
    match.wait.replace_all_uses_with(fused)
    _erase_unused(graph, [match.product, *match.through, match.start, match.wait])


def _record(fused: fx.Node, fusion: Fusion) -> None:
    start = fusion.match.start
    store.set_members(fused, store.BucketRecord(PASS_NAME, (store.Member(start.name, fusion.identity),)))
    replaced(start, fused, pass_name=PASS_NAME, identity=fusion.identity)


def _builder(graph: fx.Graph, start: fx.Node, inputs: list[fx.Node]) -> NodeBuilder:
    handed_on: dict[str, Any] = {k: start.meta[k] for k in _HANDED_ON if k in start.meta}
    return NodeBuilder(graph, mode_of(inputs), handed_on)


def _erase_unused(graph: fx.Graph, nodes: list[fx.Node]) -> None:
    for node in sorted(set(nodes), reverse=True):
        if not node.users:
            graph.erase_node(node)
