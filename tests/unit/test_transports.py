"""Which nodes launch, which wait, in every form."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import fx

from collective_identity import Transport, launch_of, start_nodes
from collective_identity.compat import find_op, group_order, group_size_of
from collective_identity.subgraphs import graph_modules
from collective_identity.transports import (
    WAIT,
    default_overload,
    is_start,
    is_wait,
    waits_of,
)
from tests.graphs import Builder, aten

C = torch.ops._c10d_functional
A = torch.ops._c10d_functional_autograd
AG, RS, AR = Transport.ALL_GATHER, Transport.REDUCE_SCATTER, Transport.ALL_REDUCE


def _form(target: Any, args: Callable[[fx.Node, fx.Node], tuple[Any, ...]], **kwargs: Any) -> fx.Node:
    graph = fx.Graph()
    a, b = graph.placeholder("a"), graph.placeholder("b")
    out = {k: b if v == "b" else v for k, v in kwargs.items()}
    return graph.call_function(target, args(a, b), out)


@pytest.mark.parametrize(
    ("target", "args", "kwargs", "transport", "form", "sent", "reduce_op"),
    [
        (C.all_gather_into_tensor.default, lambda a, b: (a, 2, "g"), {}, AG, "default", "a", None),
        (C.all_gather_into_tensor_out.default, lambda a, b: (a, 2, "g"), {"out": "b"}, AG, "out", "a", None),
        (C.all_gather_into_tensor_coalesced.default, lambda a, b: ([a, b], 2, "g"), {}, AG, "coalesced", "ab", None),
        (C.reduce_scatter_tensor.default, lambda a, b: (a, "avg", 2, "g"), {}, RS, "default", "a", "avg"),
        (C.reduce_scatter_tensor_out.default, lambda a, b: (a, "avg", 2, "g"), {"out": "b"}, RS, "out", "a", "avg"),
        (
            C.reduce_scatter_tensor_coalesced.default,
            lambda a, b: ([a, b], "sum", 2, "g"),
            {},
            RS,
            "coalesced",
            "ab",
            "sum",
        ),
        (C.all_reduce.default, lambda a, b: (a, "sum", "g"), {}, AR, "default", "a", "sum"),
        (C.all_reduce_.default, lambda a, b: (a, "max", "g"), {}, AR, "inplace", "a", "max"),
        (C.all_reduce_coalesced.default, lambda a, b: ([a, b], "sum", "g"), {}, AR, "coalesced", "ab", "sum"),
        (C.all_to_all_single.default, lambda a, b: (a, [1], [1], "g"), {}, Transport.ALL_TO_ALL, "default", "a", None),
        (C.broadcast.default, lambda a, b: (a, 0, "g"), {}, Transport.BROADCAST, "default", "a", None),
        (A.all_gather_into_tensor.default, lambda a, b: (a, 2, "g"), {}, AG, "autograd", "a", None),
        (A.reduce_scatter_tensor.default, lambda a, b: (a, "avg", 2, "g"), {}, RS, "autograd", "a", "avg"),
        (C.all_gather_into_tensor, lambda a, b: (a, 2, "g"), {}, AG, "default", "a", None),  # Dynamo keeps packets
    ],
)
def test_forms(
    target: Any, args: Any, kwargs: dict[str, Any], transport: Transport, form: str, sent: str, reduce_op: str | None
) -> None:
    node = _form(target, args, **kwargs)
    launch = launch_of(node)
    assert launch is not None and is_start(node) and not is_wait(node)
    assert (launch.transport, launch.form, launch.group, launch.reduce_op) == (transport, form, "g", reduce_op)
    assert "".join(n.name for n in launch.inputs) == sent
    assert launch.group_size == (2 if transport in (AG, RS) else None)


def test_arguments_by_keyword() -> None:
    node = _form(C.reduce_scatter_tensor.default, lambda a, b: (a,), reduce_op="avg", group_size=4, group_name="g")
    launch = launch_of(node)
    assert launch is not None and (launch.reduce_op, launch.group_size, launch.group) == ("avg", 4, "g")


@pytest.mark.parametrize("name", ["_low_contention_all_gather", "_low_contention_reduce_scatter"])
def test_low_contention_counts_as_its_base_transport(name: str) -> None:
    import torch.distributed._symmetric_memory  # noqa: F401  registers the operators

    op = find_op(f"symm_mem::{name}")
    args = (lambda a, b: (a, "g")) if "gather" in name else (lambda a, b: (a, "sum", "g"))
    launch = launch_of(_form(op, args))
    assert launch is not None and launch.form == "low_contention" and launch.group == "g"
    assert launch.transport is (AG if "gather" in name else RS)


@pytest.mark.parametrize("name", ["fused_all_gather_matmul", "fused_matmul_reduce_scatter"])
def test_fused_operators_are_no_transport(name: str) -> None:
    import torch.distributed._symmetric_memory  # noqa: F401

    node = _form(find_op(f"symm_mem::{name}"), lambda a, b: (a, [b], 0, "g"))
    assert launch_of(node) is None and not is_start(node)


def test_an_operator_this_torch_lacks() -> None:
    assert find_op("_c10d_functional::teleport") is None
    assert find_op("no_such_namespace_at_all::x") is None
    assert default_overload(AG) is C.all_gather_into_tensor.default
    assert default_overload(RS) is C.reduce_scatter_tensor.default
    assert default_overload(AR) is C.all_reduce.default
    with pytest.raises(ValueError, match="point_to_point"):
        default_overload(Transport.POINT_TO_POINT)


def test_waits() -> None:
    b = Builder()
    gathered = b.all_gather(b.placeholder("w"))
    second = b.wait(gathered.start)
    of_wait = b.wait(second)
    b.output(gathered.wait, of_wait)
    gm = b.module()
    assert waits_of(gathered.start) == [gathered.wait, second]
    assert is_wait(of_wait) and waits_of(second) == [of_wait]
    assert start_nodes(gm) == [gathered.start]


def test_coalesced_waits_go_through_getitem() -> None:
    b = Builder()
    w0, w1 = b.placeholder("w0"), b.placeholder("w1")
    start = b.graph.call_function(C.all_gather_into_tensor_coalesced.default, ([w0, w1], 2, "g"))
    items = [b.graph.call_function(operator.getitem, (start, i)) for i in (0, 1)]
    waits = [b.graph.call_function(WAIT, (i,)) for i in items]
    b.output(*waits)
    assert waits_of(start) == waits


def _wrapped(gm: fx.GraphModule, node: fx.Node, after: fx.Node) -> fx.Node:
    from torch._inductor.fx_passes.control_dependencies import preserve_node_ordering
    from torch.utils._ordered_set import OrderedSet

    name = node.name
    preserve_node_ordering(gm.graph, {node: OrderedSet([after])})
    gm.recompile()
    return next(n for n in gm.graph.nodes if n.name == name)


def test_control_deps_counts_as_what_it_wraps() -> None:
    b = Builder()
    w, x = b.placeholder("w"), b.placeholder("x")
    other = b.call(aten.relu.default, x)
    gathered = b.all_gather(w, group="dp", size=2)
    scattered = b.reduce_scatter(other, group="dp", size=2, op="avg")
    b.output(gathered.wait, scattered.wait)
    gm = b.module()
    ag = _wrapped(gm, gathered.start, other)
    rs = _wrapped(gm, scattered.start, ag)
    wait = _wrapped(gm, next(n for n in gm.graph.nodes if is_wait(n)), rs)
    launch = launch_of(ag)
    assert launch is not None
    assert (launch.transport, launch.form, launch.group, launch.group_size) == (AG, "control_deps", "dp", 2)
    assert launch.inputs == (w,), "ordering dependencies are no data"
    scatter = launch_of(rs)
    assert scatter is not None and (scatter.transport, scatter.reduce_op, scatter.inputs) == (RS, "avg", (other,))
    assert start_nodes(gm) == [ag, rs]
    assert is_wait(wait) and waits_of(ag) == [wait] and launch_of(wait) is None
    assert list(graph_modules(gm)) == [gm], "the body of a wrapped collective is no graph of its own"


def test_a_group_behind_a_node(new_group: Callable[[list[int]], str]) -> None:
    name = new_group([0, 1])
    b = Builder()
    group = b.graph.placeholder("group")
    group.meta["val"] = dist.distributed_c10d._resolve_process_group(name)
    unknown = b.graph.placeholder("unknown")
    gathered = b.all_gather(b.placeholder("w"), group=group)
    reduced = b.all_reduce(b.placeholder("x"), group=unknown)
    named = b.all_reduce(b.placeholder("y"), group=name)
    b.output(gathered.wait, reduced.wait, named.wait)
    launches = [launch_of(c.start) for c in (gathered, reduced, named)]
    assert [launch and launch.group for launch in launches] == [name, None, name]
    assert [launch and launch.group_size for launch in launches] == [2, None, 2]
    assert launches[0] is not None and [n.name for n in launches[0].inputs] == ["w"]


def test_groups_of_this_process(new_group: Callable[[list[int]], str]) -> None:
    first, second = new_group([0, 1]), new_group([0, 2, 3])
    assert (group_size_of(first), group_size_of(second), group_size_of("nowhere")) == (2, 3, None)
    orders = [group_order(first), group_order(second)]
    assert orders == sorted(o for o in orders if o is not None) and group_order("nowhere") is None


def test_other_nodes_launch_nothing() -> None:
    b = Builder()
    x = b.placeholder("x")
    y = b.call(aten.relu.default, x)
    out = b.output(y)
    assert [launch_of(n) for n in (x, y, out)] == [None, None, None]
