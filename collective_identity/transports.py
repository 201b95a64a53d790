"""Which FX nodes launch a collective, and which wait for one? The only file that names the operators."""

from __future__ import annotations

import functools
import operator
from collections.abc import Container, Iterable
from dataclasses import dataclass, replace
from enum import Enum
from types import MappingProxyType
from typing import Any, Final, TypeAlias

import torch
from torch import fx

from . import compat
from .subgraphs import CONTROL_DEPS, named, wrapped_body


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

_Kind: TypeAlias = "_Operator | str | None"

_DEFAULTS: Final = MappingProxyType(
    {
        Transport.ALL_GATHER: f"{_NS}::all_gather_into_tensor",
        Transport.REDUCE_SCATTER: f"{_NS}::reduce_scatter_tensor",
        Transport.ALL_REDUCE: f"{_NS}::all_reduce",
        Transport.ALL_TO_ALL: f"{_NS}::all_to_all_single",
        Transport.BROADCAST: f"{_NS}::broadcast",
    }
)

_COALESCED: Final = MappingProxyType(
    {
        Transport.ALL_GATHER: f"{_NS}::all_gather_into_tensor_coalesced",
        Transport.REDUCE_SCATTER: f"{_NS}::reduce_scatter_tensor_coalesced",
        Transport.ALL_REDUCE: f"{_NS}::all_reduce_coalesced",
    }
)


def default_overload(transport: Transport) -> torch._ops.OpOverload:
    """The functional operator that passes build for a transport.

    Argument order (PyTorch ``torch/csrc/distributed/c10d/Functional.cpp``): all-gather ``(input, size,
    group)``, reduce-scatter ``(input, reduce_op, size, group)``, all-reduce ``(input, reduce_op, group)``.

    Raises:
        ValueError: the transport has no single functional operator, or this torch lacks it.
    """
    return _overload(_DEFAULTS.get(transport), transport, "a functional operator")


def coalesced_overload(transport: Transport) -> torch._ops.OpOverload:
    """The functional operator of a transport for a list of tensors; arguments as in `default_overload`.

    Raises:
        ValueError: the transport has none, or this torch lacks it.
    """
    return _overload(_COALESCED.get(transport), transport, "a coalesced operator")


def _overload(name: str | None, transport: Transport, what: str) -> torch._ops.OpOverload:
    overload = compat.find_op(name) if name else None
    if overload is None:
        raise ValueError(
            f"expected a transport with {what}, found {transport.value} on torch {torch.__version__}; "
            "build the node by hand"
        )
    return overload


WAIT: Final[torch._ops.OpOverload] = compat.find_op(f"{_NS}::wait_tensor")  # type: ignore[assignment]
"""The wait operator, for passes that build nodes."""


def launch_of(node: fx.Node) -> Launch | None:
    """What ``node`` launches, or None when it is no start node. Reads, never writes; never raises."""
    if node.op != "call_function":
        return None
    kind = _kind(node.target)
    if kind is None:
        return None
    return _read_wrapped(node) if isinstance(kind, str) else _read(node, kind)


def launches(gm: fx.GraphModule) -> dict[fx.Node, Launch]:
    """What every start node of this graph launches, in graph order."""
    return launches_among(gm.graph.nodes)


def launches_among(nodes: Iterable[fx.Node]) -> dict[fx.Node, Launch]:
    """What each of these nodes that is a start node launches, in their order; each target is looked up once."""
    kinds: dict[int, _Kind] = {}  # by id: hashing an operator is a Python call
    found: dict[fx.Node, Launch] = {}
    for node in nodes:
        if node.op != "call_function":
            continue
        target = node.target
        try:
            kind = kinds[id(target)]
        except KeyError:
            kind = kinds[id(target)] = _kind(target)
        if kind is not None:
            launch = _read_wrapped(node) if isinstance(kind, str) else _read(node, kind)
            if launch is not None:
                found[node] = launch
    return found


def is_launch_operator(target: object) -> bool:
    """Whether an operator, by itself, launches a collective."""
    overload = compat.op_overload_of(target)
    return overload is not None and _operator(overload) is not None


def is_start(node: fx.Node) -> bool:
    """Whether ``node`` launches a collective, in whatever form."""
    return launch_of(node) is not None


def is_wait(node: fx.Node) -> bool:
    """Whether ``node`` waits for a collective."""
    if node.op != "call_function":
        return False
    name = compat.op_name(node.target)
    if name is not None:
        return name in _WAITS
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
    return list(launches(gm))


def group_name(value: object) -> str | None:
    """Name of a group argument: a str constant, or a graph node that stands for a group; else None."""
    if isinstance(value, fx.Node):
        if "val" in value.meta:
            return compat.group_name_of(value.meta["val"])
        return compat.group_name_of(named(value)) if value.op == "get_attr" else None
    return compat.group_name_of(value)


def waited_start(wait: fx.Node, starts: Container[fx.Node]) -> fx.Node | None:
    """The one of ``starts`` that ``wait`` waits for, directly or through ``getitem``; None for any other node."""
    if not is_wait(wait):
        return None
    waited = _waited(wait)
    if isinstance(waited, fx.Node) and waited not in starts and waited.target is operator.getitem:
        waited = waited.args[0]
    return waited if isinstance(waited, fx.Node) and waited in starts else None


def _waited(wait: fx.Node) -> object:
    """The node a wait waits for: its tensor argument, past the ordering dependencies of a wrapped one."""
    if wrapped_body(wait) is not None:
        return wait.args[2] if len(wait.args) > 2 else None
    return wait.args[0] if wait.args else next(iter(wait.kwargs.values()), None)


@dataclass(frozen=True, slots=True)
class _Operator:
    """How to read a call of a collective: its arguments' names, the positions of those that count, -1 for none."""

    names: tuple[str, ...]
    transport: Transport
    form: str
    data: int
    group: int
    size: int
    reduce_op: int
    needed: int


def _kind(target: object) -> _Kind:
    """How to read a call of ``target``; a str where its body has to be looked at; None for no start."""
    overload = compat.op_overload_of(target)
    if overload is not None:
        return _operator(overload)
    return CONTROL_DEPS if compat.higher_order_name(target) == CONTROL_DEPS else None


@functools.lru_cache(maxsize=4096)
def _operator(overload: torch._ops.OpOverload) -> _Operator | None:
    known = _STARTS.get(compat.op_name(overload) or "")
    if known is None:
        return None
    names = compat.argument_names(overload)
    at = {name: position for position, name in enumerate(names)}
    data = next((at[name] for name in _DATA_ARGS if name in at), -1)
    places = (data, at.get("group_name", -1), at.get("group_size", -1), at.get("reduce_op", -1))
    return _Operator(names, *known, *places, needed=max(places) + 1)


def _read_wrapped(node: fx.Node) -> Launch | None:
    """The launch in the body of a ``control_deps`` node, in terms of the nodes given to it."""
    body = wrapped_body(node)
    if body is None:
        return None
    placeholders = [n for n in body.graph.nodes if n.op == "placeholder"]
    outer = dict(zip(placeholders, node.args[2:], strict=False))
    for inner in body.graph.nodes:
        launch = launch_of(inner)
        if launch is None:
            continue
        inputs = [outer.get(i) for i in launch.inputs]
        group = launch.group
        given = compat.arguments(inner).get("group_name")
        if group is None and isinstance(given, fx.Node):
            group = group_name(outer.get(given))
        size = launch.group_size
        if size is None and group is not None:
            size = compat.group_size_of(group)
        inputs_given = tuple(i for i in inputs if isinstance(i, fx.Node))
        return replace(launch, form=CONTROL_DEPS, group=group, group_size=size, inputs=inputs_given)
    return None


def _read(node: fx.Node, call: _Operator) -> Launch:
    args, kwargs = node.args, node.kwargs
    if kwargs or len(args) < call.needed:
        given = compat.arguments(node)
        args = tuple([given.get(name) for name in call.names])  # type: ignore[misc]
    data = args[call.data] if call.data >= 0 else ()
    group = group_name(args[call.group]) if call.group >= 0 else None
    size = args[call.size] if call.size >= 0 else None
    if not isinstance(size, int):
        size = compat.group_size_of(group) if group is not None else None
    reduce_op = args[call.reduce_op] if call.reduce_op >= 0 else None
    inputs: tuple[Any, ...] = (data,) if isinstance(data, fx.Node) else ()
    if isinstance(data, (list, tuple)):
        inputs = tuple([n for n in data if isinstance(n, fx.Node)])
    return Launch(call.transport, call.form, group, size, reduce_op if isinstance(reduce_op, str) else None, inputs)
