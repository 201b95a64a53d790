"""Normalisation over every form a collective takes: each operator, groups as nodes, several waits, sub-graphs."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory  # registers the symm_mem operators
from torch import fx

from collective_identity import (
    GRAD_REDUCE_SHARD,
    GRAD_REPLICATE_REDUCE,
    PARAM_UNSHARD,
    classify,
    codes,
    identity_of,
    launch_of,
    normalize,
    plan_normalization,
    role_scope,
    start_nodes,
    store,
)
from collective_identity.compat import find_op
from collective_identity.subgraphs import graph_modules, wrapped_body
from collective_identity.transports import WAIT, waits_of
from tests.graphs import Builder, annotate, aten, identity, payload

C = torch.ops._c10d_functional
A = torch.ops._c10d_functional_autograd

Args = Callable[[fx.Node, Any], tuple[Any, ...]]


def gather(x: fx.Node, g: Any) -> tuple[Any, ...]:
    return x, 2, g


def scatter(x: fx.Node, g: Any) -> tuple[Any, ...]:
    return x, "avg", 2, g


def reduce(x: fx.Node, g: Any) -> tuple[Any, ...]:
    return x, "sum", g


def several(args: Args) -> Args:
    return lambda x, g: ([x, x], *args(x, g)[1:])


FORMS: Mapping[str, tuple[Any, Args, str]] = {
    "gather": (C.all_gather_into_tensor.default, gather, PARAM_UNSHARD),
    "gather packet": (C.all_gather_into_tensor, gather, PARAM_UNSHARD),
    "gather out": (C.all_gather_into_tensor_out.default, gather, PARAM_UNSHARD),
    "gather coalesced": (C.all_gather_into_tensor_coalesced.default, several(gather), PARAM_UNSHARD),
    "gather autograd": (A.all_gather_into_tensor.default, gather, PARAM_UNSHARD),
    "gather low contention": (find_op("symm_mem::_low_contention_all_gather"), lambda x, g: (x, g), PARAM_UNSHARD),
    "scatter": (C.reduce_scatter_tensor.default, scatter, GRAD_REDUCE_SHARD),
    "scatter out": (C.reduce_scatter_tensor_out.default, scatter, GRAD_REDUCE_SHARD),
    "scatter coalesced": (C.reduce_scatter_tensor_coalesced.default, several(scatter), GRAD_REDUCE_SHARD),
    "scatter autograd": (A.reduce_scatter_tensor.default, scatter, GRAD_REDUCE_SHARD),
    "scatter low contention": (find_op("symm_mem::_low_contention_reduce_scatter"), reduce, GRAD_REDUCE_SHARD),
    "reduce": (C.all_reduce.default, reduce, GRAD_REPLICATE_REDUCE),
    "reduce in place": (C.all_reduce_.default, reduce, GRAD_REPLICATE_REDUCE),
    "reduce coalesced": (C.all_reduce_coalesced.default, several(reduce), GRAD_REPLICATE_REDUCE),
    "reduce coalesced in place": (C.all_reduce_coalesced_.default, several(reduce), GRAD_REPLICATE_REDUCE),
    "all to all": (C.all_to_all_single.default, lambda x, g: (x, [2, 2], [2, 2], g), "ep.token_exchange"),
    "all to all autograd": (A.all_to_all_single.default, lambda x, g: (x, [2, 2], [2, 2], g), "ep.token_exchange"),
    "broadcast": (C.broadcast.default, lambda x, g: (x, 0, g), "user.initial_weights"),
    "broadcast in place": (C.broadcast_.default, lambda x, g: (x, 0, g), "user.initial_weights"),
}
WRAPPED = ("gather", "scatter", "reduce", "all to all")


class Form:
    """placeholder → cast → collective → two waits (per result) → view → output, a payload to be put anywhere."""

    def __init__(self, kind: str, group: Any = "dp", *, builder: Builder | None = None, wrapped: bool = False) -> None:
        target, args, self.role = FORMS[kind]
        b = builder if builder is not None else Builder()
        self.cast = b.cast(b.placeholder("w"), torch.bfloat16)
        kwargs = {"out": b.placeholder("buffer")} if kind.endswith("out") else {}
        self.start = b.graph.call_function(target, args(self.cast, group), kwargs)
        results = [self.start]
        if "coalesced" in kind:
            results = [b.graph.call_function(operator.getitem, (self.start, i)) for i in (0, 1)]
        self.waits = [b.graph.call_function(WAIT, (result,)) for result in results for _ in range(2)]
        self.view = b.graph.call_function(aten.view.default, (self.waits[-1], [32]))
        b.output(*self.waits, self.view)
        self.module = b.module()
        if wrapped:
            self._wrap()

    def _wrap(self) -> None:
        from torch._inductor.fx_passes.control_dependencies import preserve_node_ordering
        from torch.utils._ordered_set import OrderedSet

        first = next(iter(self.module.graph.nodes))
        names = [self.start.name, *(wait.name for wait in self.waits)]
        order = {node: OrderedSet([first]) for node in (self.start, *self.waits)}
        preserve_node_ordering(self.module.graph, order)
        found = {node.name: node for node in self.module.graph.nodes}
        self.start, *self.waits = (found[name] for name in names)

    def check(self, group: str | None = "dp", **fields: Any) -> None:
        """From each place beside it the payload gets to the start node, and nowhere else."""
        said = payload(self.role, **fields)
        for place in (self.cast, *self.waits, self.view):
            annotate(place, said)
            plan = plan_normalization(self.module)
            assert [(m.origin, m.target) for m in plan.moves] == [(place, self.start)], place
            assert normalize(self.module) and not normalize(self.module)
            assert identity_of(self.start) == identity(self.role, **fields)
            assert [n for n in self.module.graph.nodes if store.has_payload(n)] == [self.start]
            assert [i and i.role for i in classify(self.module).values()] == [self.role]
            store.clear(self.start)
        for place in (self.cast, *self.waits, self.view):
            annotate(place, said)
        assert len(plan_normalization(self.module).moves) == 1, "equal payloads move as one"
        launch = launch_of(self.start)
        assert launch is not None and launch.group == group


@pytest.mark.parametrize("kind", FORMS)
def test_every_form(kind: str) -> None:
    form = Form(kind)
    assert waits_of(form.start) == form.waits and start_nodes(form.module) == [form.start]
    form.check()


@pytest.mark.parametrize("kind", WRAPPED)
def test_wrapped_for_ordering(kind: str) -> None:
    form = Form(kind, wrapped=True)
    launch = launch_of(form.start)
    assert launch is not None and launch.form == "control_deps" and launch.inputs == (form.cast,)
    assert waits_of(form.start) == form.waits
    form.check()


@pytest.mark.parametrize("kind", [kind for kind in FORMS if "coalesced" not in kind])
@pytest.mark.parametrize("how", ["input", "attribute", "unknown"])
def test_a_group_behind_a_node(kind: str, how: str, new_group: Callable[[list[int]], str]) -> None:
    name = new_group([0, 1])
    b = Builder()
    if how == "attribute":
        b.root.group = dist.distributed_c10d._resolve_process_group(name)
        group = b.graph.get_attr("group")
    else:
        group = b.graph.placeholder("group")
        if how == "input":
            group.meta["val"] = dist.distributed_c10d._resolve_process_group(name)
    form = Form(kind, group, builder=b)
    form.check(group=None if how == "unknown" else name)
    if how != "unknown":
        annotate(form.cast, payload(form.role, group="another"))
        (removal,) = [r for r in plan_normalization(form.module).removals if r.node is form.cast]
        assert codes.GROUP_MISMATCH.id in removal.detail


def test_a_group_node_given_to_a_wrapped_collective(new_group: Callable[[list[int]], str]) -> None:
    """The body of the wrapper sees the group as an input of its own."""
    name = new_group([0, 1])
    b = Builder()
    group = b.graph.placeholder("group")
    group.meta["val"] = dist.distributed_c10d._resolve_process_group(name)
    form = Form("reduce", group, builder=b, wrapped=True)
    launch = launch_of(form.start)
    assert launch is not None and (launch.group, launch.group_size, launch.inputs) == (name, 2, (form.cast,))
    form.check(group=name)


def test_wrapped_for_another_reason() -> None:
    """An ordinary operator in the same wrapper is no collective and carries nothing."""
    from torch._inductor.fx_passes.control_dependencies import preserve_node_ordering
    from torch.utils._ordered_set import OrderedSet

    b = Builder()
    w = b.placeholder("w")
    relu = b.call(aten.relu.default, w)
    b.output(relu)
    gm = b.module()
    preserve_node_ordering(gm.graph, {relu: OrderedSet([w])})
    wrapped = next(n for n in gm.graph.nodes if n.op == "call_function")
    annotate(wrapped, payload(PARAM_UNSHARD))
    assert start_nodes(gm) == [] and launch_of(wrapped) is None
    assert normalize(gm) and not store.has_payload(wrapped)


def _inner(node: fx.Node, op: str = "call_function") -> fx.Node:
    body = wrapped_body(node)
    assert body is not None
    return next(n for n in body.graph.nodes if n.op == op)


@pytest.mark.parametrize("kind", WRAPPED)
@pytest.mark.parametrize("where", ["collective", "its input", "its wait"])
def test_a_payload_inside_the_wrapper_is_its_nodes(kind: str, where: str) -> None:
    form = Form(kind, wrapped=True)
    places = {
        "collective": lambda: _inner(form.start),
        "its input": lambda: _inner(form.start, "placeholder"),
        "its wait": lambda: _inner(form.waits[0]),
    }
    inside = places[where]()
    annotate(inside, payload(form.role))
    assert normalize(form.module) and not normalize(form.module)
    found = identity_of(form.start)
    assert found is not None and found.role == form.role and not store.has_payload(inside)

    annotate(inside, payload("tp.other"))
    (removal,) = plan_normalization(form.module).removals
    assert removal.node is inside and "a payload of its own" in removal.detail
    assert normalize(form.module) and identity_of(form.start) == found

    store.clear(form.start)
    annotate(inside, payload(form.role) | {"group": "another"})
    (removal,) = plan_normalization(form.module).removals
    assert codes.GROUP_MISMATCH.id in removal.detail
    assert normalize(form.module) and identity_of(form.start) is None and not store.has_payload(inside)


@pytest.mark.parametrize("kind", WRAPPED)
def test_what_wrapping_copied_by_reference_is_told_apart(kind: str) -> None:
    form = Form(kind, wrapped=False)
    annotate(form.start, payload(form.role))
    form.start.meta["custom"]["mine"] = 1
    form._wrap()
    inside = _inner(form.start)
    assert store.has_payload(inside), "torch copies the metadata inwards"
    assert normalize(form.module) and not normalize(form.module)
    found = identity_of(form.start)
    assert found is not None and found.role == form.role and not store.has_payload(inside)
    assert inside.meta["custom"] == {"mine": 1} and form.start.meta["custom"]["mine"] == 1


def test_a_body_two_nodes_run_belongs_to_neither() -> None:
    form = Form("gather", wrapped=True)
    with form.module.graph.inserting_after(form.start):
        twin = form.module.graph.call_function(form.start.target, form.start.args)
    annotate(_inner(form.start), payload(form.role))
    (removal,) = plan_normalization(form.module).removals
    assert removal.code is codes.AMBIGUOUS_PAYLOAD
    assert normalize(form.module) and identity_of(form.start) is None and identity_of(twin) is None


# --- sub-graphs ------------------------------------------------------------------------------------------


def _gather(w: torch.Tensor) -> torch.Tensor:
    group = dist.group.WORLD.group_name  # type: ignore[union-attr]
    with role_scope(PARAM_UNSHARD, producer="test", params=["w"]):
        return C.wait_tensor(C.all_gather_into_tensor(w.bfloat16(), 4, group))[:4].float()


def checkpointed(w: torch.Tensor) -> torch.Tensor:
    from torch.utils.checkpoint import checkpoint

    return checkpoint(lambda w: _gather(w).sin(), w, use_reentrant=False).sum()


def conditional(w: torch.Tensor) -> torch.Tensor:
    return torch.cond(w.sum() > 0, lambda w: _gather(w).sum(), lambda w: _gather(w).sum() * 2, (w,))


def repeated(w: torch.Tensor) -> torch.Tensor:
    from torch._higher_order_ops.while_loop import while_loop

    start = (torch.tensor(0), w)
    return while_loop(lambda i, a: i < 3, lambda i, a: (i + 1, a + _gather(a).mean(0)), start)[1].sum()


@torch.compiler.nested_compile_region
def region(w: torch.Tensor) -> torch.Tensor:
    return _gather(w).sin()


def regional(w: torch.Tensor) -> torch.Tensor:
    return region(w).sum() + region(w * 2).sum()


@pytest.mark.parametrize(("step", "collectives"), [(checkpointed, 1), (conditional, 2), (repeated, 1), (regional, 1)])
def test_the_sub_graphs_that_dynamo_makes(step: Callable[..., Any], collectives: int, fake_world: int) -> None:
    captured: list[fx.GraphModule] = []

    def backend(gm: fx.GraphModule, _: Any) -> Any:
        captured.append(gm)
        return gm.forward

    torch._dynamo.reset()
    torch.compile(step, backend=backend, fullgraph=True)(torch.ones(4, 8))
    (gm,) = captured
    inner = list(graph_modules(gm))[1:]
    assert inner and not start_nodes(gm), "the collectives are below"
    strays = [n for sub in inner for n in sub.graph.nodes if store.has_payload(n)]
    assert len(strays) >= 3 * collectives, "the whole region is annotated"
    assert normalize(gm) and not normalize(gm)
    starts = [n for sub in inner for n in start_nodes(sub)]
    assert [n for sub in inner for n in sub.graph.nodes if store.has_payload(n)] == starts
    assert [identity_of(n) for n in starts] == [identity(PARAM_UNSHARD, params=("w",))] * collectives
    assert list(classify(gm)) == starts


def _calling(op: Any, *bodies: fx.GraphModule) -> fx.GraphModule:
    """A graph that runs each body under a higher-order operator."""
    root, graph = torch.nn.Module(), fx.Graph()
    x = graph.placeholder("x")
    calls = []
    for number, body in enumerate(bodies):
        setattr(root, f"body_{number}", body)
        calls.append(graph.call_function(op, (graph.get_attr(f"body_{number}"), f"body_{number}", x)))
    graph.output(tuple(calls))
    return fx.GraphModule(root, graph)


def test_nested_regions_are_reached_once_and_outer_first() -> None:
    innermost = Form("scatter")
    op = torch.ops.higher_order.invoke_subgraph
    middle = _calling(op, innermost.module, innermost.module)
    outer = _calling(op, middle, Form("gather").module)
    found = list(graph_modules(outer))
    assert len(found) == 4 and found[0] is outer and found[1] is outer.body_0
    inside = [n for sub in found[1:] for n in sub.graph.nodes if n.name == innermost.waits[0].name]
    for node in inside:
        role = PARAM_UNSHARD if node.graph is found[2].graph else GRAD_REDUCE_SHARD
        annotate(node, payload(role))
    assert normalize(outer)
    assert [i and i.role for i in classify(outer).values()] == [PARAM_UNSHARD, GRAD_REDUCE_SHARD]


def test_a_payload_does_not_leave_its_sub_graph() -> None:
    """The call of a sub-graph is no carrier: its payload names no one collective inside or outside."""
    gm = _calling(torch.ops.higher_order.invoke_subgraph, Form("gather").module)
    call = next(n for n in gm.graph.nodes if n.op == "call_function")
    annotate(call, payload(PARAM_UNSHARD))
    annotate(next(n for n in gm.graph.nodes if n.op == "placeholder"), payload(PARAM_UNSHARD))
    assert [r.code for r in plan_normalization(gm).removals] == [codes.REMOVED_PAYLOAD] * 2
    assert normalize(gm)
    assert [identity_of(n) for sub in graph_modules(gm) for n in start_nodes(sub)] == [None]


def test_a_module_that_is_called() -> None:
    body = Form("gather")
    root, graph = torch.nn.Module(), fx.Graph()
    root.layer = body.module
    graph.output(graph.call_module("layer", (graph.placeholder("x"),)))
    gm = fx.GraphModule(root, graph)
    annotate(next(n for n in gm.layer.graph.nodes if n.name == body.cast.name), payload(PARAM_UNSHARD))
    assert normalize(gm) and [i and i.role for i in classify(gm).values()] == [PARAM_UNSHARD]
