"""Which FX nodes launch a collective, and which wait for one? The only file that names the operators."""

from __future__ import annotations

import operator
from collections.abc import Iterator
from dataclasses import dataclass, replace
from enum import Enum
from types import MappingProxyType
from typing import Any, Final

import torch
from torch import fx

from . import compat


class Transport(str, Enum):
    """What a collective does on the wire, whatever form the operator takes."""

    ALL_GATHER = "all_gather"
    REDUCE_SCATTER = "reduce_scatter"
    ALL_REDUCE = "all_reduce"
    ALL_TO_ALL = "all_to_all"
    BROADCAST = "broadcast"
    POINT_TO_POINT = "point_to_point"

    def __str__(self) -> str:
        return self.value


@dataclass(frozen=True, slots=True)
class Launch:
    """A start node read: what it launches and on what.

    Attributes:
        transport: the base transport.
        form: ``"default"``, ``"out"``, ``"coalesced"``, ``"inplace"``, ``"autograd"``, ``"control_deps"`` or
            ``"low_contention"``.
        group: process-group name, None when the argument is a node that resolves to none.
        group_size: ranks in the group, None when neither the node nor the process knows.
        reduce_op: ``"sum"``, ``"avg"``, … as the operator spells it, None for transports without one.
        inputs: the tensors sent, in operator order; no output buffer, no group node, no ordering dependency.
    """

    transport: Transport
    form: str
    group: str | None
    group_size: int | None
    reduce_op: str | None
    inputs: tuple[fx.Node, ...]


_NS: Final = "_c10d_functional"
_AUTOGRAD: Final = "_c10d_functional_autograd"
_CONTROL_DEPS: Final = "control_deps"

# Every form of every transport, by qualified name: an operator this torch lacks simply never occurs.
# `symm_mem.fused_*` is compute and communication in one, so never a transport.
_STARTS: Final = MappingProxyType(
    {
        f"{_NS}::all_gather_into_tensor": (Transport.ALL_GATHER, "default"),
        f"{_NS}::all_gather_into_tensor_out": (Transport.ALL_GATHER, "out"),
        f"{_NS}::all_gather_into_tensor_coalesced": (Transport.ALL_GATHER, "coalesced"),
        f"{_NS}::reduce_scatter_tensor": (Transport.REDUCE_SCATTER, "default"),
        f"{_NS}::reduce_scatter_tensor_out": (Transport.REDUCE_SCATTER, "out"),
        f"{_NS}::reduce_scatter_tensor_coalesced": (Transport.REDUCE_SCATTER, "coalesced"),
        f"{_NS}::all_reduce": (Transport.ALL_REDUCE, "default"),
        f"{_NS}::all_reduce_": (Transport.ALL_REDUCE, "inplace"),
        f"{_NS}::all_reduce_coalesced": (Transport.ALL_REDUCE, "coalesced"),
        f"{_NS}::all_reduce_coalesced_": (Transport.ALL_REDUCE, "coalesced"),
        f"{_NS}::all_to_all_single": (Transport.ALL_TO_ALL, "default"),
        f"{_NS}::broadcast": (Transport.BROADCAST, "default"),
        f"{_NS}::broadcast_": (Transport.BROADCAST, "inplace"),
        f"{_NS}::isend": (Transport.POINT_TO_POINT, "default"),
        f"{_NS}::irecv": (Transport.POINT_TO_POINT, "default"),
        f"{_NS}::batch_p2p_ops": (Transport.POINT_TO_POINT, "coalesced"),
        f"{_AUTOGRAD}::all_gather_into_tensor": (Transport.ALL_GATHER, "autograd"),
        f"{_AUTOGRAD}::reduce_scatter_tensor": (Transport.REDUCE_SCATTER, "autograd"),
        f"{_AUTOGRAD}::all_to_all_single": (Transport.ALL_TO_ALL, "autograd"),
        "symm_mem::_low_contention_all_gather": (Transport.ALL_GATHER, "low_contention"),
        "symm_mem::_low_contention_reduce_scatter": (Transport.REDUCE_SCATTER, "low_contention"),
    }
)
_WAITS: Final = frozenset({f"{_NS}::wait_tensor"})
_DATA_ARGS: Final = ("input", "inputs", "tensor", "tensors")

_DEFAULTS: Final = MappingProxyType(
    {
        Transport.ALL_GATHER: f"{_NS}::all_gather_into_tensor",
        Transport.REDUCE_SCATTER: f"{_NS}::reduce_scatter_tensor",
        Transport.ALL_REDUCE: f"{_NS}::all_reduce",
        Transport.ALL_TO_ALL: f"{_NS}::all_to_all_single",
        Transport.BROADCAST: f"{_NS}::broadcast",
    }
)


def default_overload(transport: Transport) -> torch._ops.OpOverload:
    """The functional operator that passes build for a transport.

    Argument order (PyTorch ``torch/csrc/distributed/c10d/Functional.cpp``): all-gather ``(input, size,
    group)``, reduce-scatter ``(input, reduce_op, size, group)``, all-reduce ``(input, reduce_op, group)``.

    Raises:
        ValueError: the transport has no single functional operator, or this torch lacks it.
    """
    name = _DEFAULTS.get(transport)
    overload = compat.find_op(name) if name else None
    if overload is None:
        raise ValueError(
            f"expected a transport with a functional operator, found {transport.value} on torch "
            f"{torch.__version__}; build the node by hand"
        )
    return overload


WAIT: Final[torch._ops.OpOverload] = compat.find_op(f"{_NS}::wait_tensor")  # type: ignore[assignment]
"""The wait operator, for passes that build nodes."""


def launch_of(node: fx.Node) -> Launch | None:
    """What ``node`` launches, or None when it is no start node. Reads, never writes; never raises."""
    if node.op != "call_function":
        return None
    known = _STARTS.get(compat.op_name(node.target) or "")
    if known is not None:
        return _read(node, *known)
    body = wrapped_body(node)
    if body is None:
        return None
    outer = _outer_of(node, body)
    for inner in body.graph.nodes:
        launch = launch_of(inner)
        if launch is not None:
            inputs = tuple(outer[i] for i in launch.inputs if i in outer)
            return replace(launch, form="control_deps", inputs=inputs)
    return None


def is_start(node: fx.Node) -> bool:
    """Whether ``node`` launches a collective, in whatever form."""
    if node.op != "call_function":
        return False
    if compat.op_name(node.target) in _STARTS:
        return True
    body = wrapped_body(node)
    return body is not None and any(is_start(inner) for inner in body.graph.nodes)


def is_wait(node: fx.Node) -> bool:
    """Whether ``node`` waits for a collective."""
    if node.op != "call_function":
        return False
    if compat.op_name(node.target) in _WAITS:
        return True
    body = wrapped_body(node)
    return body is not None and any(is_wait(inner) for inner in body.graph.nodes)


def waits_of(start: fx.Node) -> list[fx.Node]:
    """The wait nodes of a start node, directly or through ``getitem`` (coalesced forms), in use order."""
    waits: list[fx.Node] = []
    for user in start.users:
        if user.op == "call_function" and user.target is operator.getitem:
            waits += [u for u in user.users if is_wait(u) and _waited(u) is user]
        elif is_wait(user) and _waited(user) is start:
            waits.append(user)
    return waits


def start_nodes(gm: fx.GraphModule) -> list[fx.Node]:
    """The start nodes of this graph, in graph order; sub-graphs are graphs of their own (`graph_modules`)."""
    return [node for node in gm.graph.nodes if is_start(node)]


def wrapped_body(node: fx.Node) -> fx.GraphModule | None:
    """The sub-graph a ``control_deps`` node runs, None for any other node.

    PyTorch 2.11–2.15 ``torch/_inductor/fx_passes/control_dependencies.py``:
    ``control_deps(dependencies, subgraph, *inputs)``, the sub-graph behind a ``get_attr`` or given itself.
    """
    if compat.higher_order_name(node.target) != _CONTROL_DEPS or len(node.args) < 2:
        return None
    return submodule_of(node.args[1])


def submodule_of(value: object) -> fx.GraphModule | None:
    """The GraphModule that an argument is, or that a ``get_attr`` node names, else None."""
    if isinstance(value, fx.Node) and value.op == "get_attr":
        module: Any = value.graph.owning_module
        for part in str(value.target).split("."):
            module = getattr(module, part, None)
        value = module
    return value if isinstance(value, fx.GraphModule) else None


def graph_modules(gm: fx.GraphModule) -> Iterator[fx.GraphModule]:
    """``gm``, then every sub-graph that a higher-order operator of it runs, once each, outer before inner.

    The one-operator bodies of ``control_deps`` are left out: their node is the collective.
    """
    seen: set[int] = set()
    queue = [gm]
    while queue:
        current = queue.pop(0)
        if id(current) in seen:
            continue
        seen.add(id(current))
        yield current
        for node in current.graph.nodes:
            if node.op == "get_attr":
                inner = submodule_of(node)
                wraps = node.users and all(
                    compat.higher_order_name(user.target) == _CONTROL_DEPS for user in node.users
                )
                if inner is not None and not wraps:
                    queue.append(inner)
            elif node.op == "call_module" and node.graph.owning_module is not None:
                called = node.graph.owning_module.get_submodule(str(node.target))
                if isinstance(called, fx.GraphModule):
                    queue.append(called)


def group_name(value: object) -> str | None:
    """Name of a group argument: a str constant, or a graph node that stands for a group; else None."""
    if isinstance(value, fx.Node):
        if "val" in value.meta:
            return compat.group_name_of(value.meta["val"])
        if value.op == "get_attr":
            module: Any = value.graph.owning_module
            for part in str(value.target).split("."):
                module = getattr(module, part, None)
            return compat.group_name_of(module)
        return None
    return compat.group_name_of(value)


def _waited(wait: fx.Node) -> object:
    """The node a wait waits for: its tensor argument, past the ordering dependencies of a wrapped one."""
    if wrapped_body(wait) is not None:
        return wait.args[2] if len(wait.args) > 2 else None
    return wait.args[0] if wait.args else next(iter(wait.kwargs.values()), None)


def _outer_of(node: fx.Node, body: fx.GraphModule) -> dict[fx.Node, fx.Node]:
    """Placeholder of a wrapped body → the node given for it."""
    inner = [n for n in body.graph.nodes if n.op == "placeholder"]
    return {p: a for p, a in zip(inner, node.args[2:], strict=False) if isinstance(a, fx.Node)}


def _read(node: fx.Node, transport: Transport, form: str) -> Launch:
    given = compat.arguments(node)
    group = group_name(given.get("group_name"))
    size = given.get("group_size")
    if not isinstance(size, int):
        size = compat.group_size_of(group) if group is not None else None
    reduce_op = given.get("reduce_op")
    data = next((given[k] for k in _DATA_ARGS if k in given), ())
    flat = data if isinstance(data, (list, tuple)) else (data,)
    return Launch(
        transport=transport,
        form=form,
        group=group,
        group_size=size,
        reduce_op=reduce_op if isinstance(reduce_op, str) else None,
        inputs=tuple(n for n in flat if isinstance(n, fx.Node)),
    )
