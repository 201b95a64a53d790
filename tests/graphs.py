"""Small FX graphs made by hand, with fake tensors as ``meta["val"]``, the way post-grad passes see them.

b = Builder()
w = b.placeholder("w", (4, 8))
gathered = b.all_gather(w, group="dp", size=2)        # Collective(start, wait)
b.output(gathered.wait)
gm = b.module()
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode

import collective_identity
from collective_identity.identity import Identity, Source
from collective_identity.store import stamp
from collective_identity.transports import WAIT, Transport, default_overload

aten = torch.ops.aten
PAYLOAD_KEY = "distributed.comm_semantics"
BACKWARD_PAYLOAD_KEY = "distributed.comm_semantics.backward"


@dataclass(frozen=True)
class Collective:
    """A start node and its wait."""

    start: fx.Node
    wait: fx.Node


def payload(role: str, **fields: Any) -> dict[str, Any]:
    """A valid raw payload; ``fields`` add to it or replace what is there."""
    return {"version": 1, "role": role, "source": "explicit", "producer": "test"} | fields


def identity(role: str, **fields: Any) -> Identity:
    """A valid identity, explicit unless ``source`` says otherwise."""
    given: dict[str, Any] = {"version": 1, "source": Source.EXPLICIT, "producer": "test"} | fields
    return Identity(role=role, **given)


def annotate(node: fx.Node, raw: object, *, backward: object = None) -> fx.Node:
    """Put a raw payload (and a backward one) under ``meta["custom"]`` as a producer would."""
    custom = dict(node.meta.get("custom") or {})
    custom[PAYLOAD_KEY] = raw
    if backward is not None:
        custom[BACKWARD_PAYLOAD_KEY] = backward
    node.meta["custom"] = custom
    return node


@contextmanager
def counting_edges() -> Iterator[Callable[[], int]]:
    """Count how often a node's inputs or users are read while open; a cost that no machine load changes."""
    reads = 0

    def counted(node: Any, name: str) -> Any:
        nonlocal reads
        reads += name in ("users", "all_input_nodes")
        return object.__getattribute__(node, name)

    fx.Node.__getattribute__ = counted  # type: ignore[method-assign, assignment]
    try:
        yield lambda: reads
    finally:
        del fx.Node.__getattribute__


@contextmanager
def counting_work() -> Iterator[Callable[[], int]]:
    """Count the Python instructions of `collective_identity` while open; what C loops over inside one is not seen."""
    done, package, before = 0, str(Path(collective_identity.__file__).parent), sys.gettrace()

    def enter(frame: FrameType, event: str, given: Any) -> Any:
        if not frame.f_code.co_filename.startswith(package):
            return None
        frame.f_trace_lines, frame.f_trace_opcodes = False, True
        return each

    def each(frame: FrameType, event: str, given: Any) -> Any:
        nonlocal done
        done += event == "opcode"
        return each

    sys.settrace(enter)
    try:
        yield lambda: done
    finally:
        sys.settrace(before)


class Builder:
    """Builds one graph; every method returns the node it made."""

    def __init__(self, root: torch.nn.Module | None = None) -> None:
        self.fake = FakeTensorMode(allow_non_fake_inputs=True)
        self.graph = fx.Graph()
        self.root = root if root is not None else torch.nn.Module()

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype = torch.float32, device: str = "cpu") -> Any:
        """A fake tensor; ``device="cuda:0"`` needs no GPU."""
        with self.fake:
            return torch.empty(shape, dtype=dtype, device=device)

    def placeholder(
        self,
        name: str,
        shape: tuple[int, ...] = (4, 8),
        *,
        dtype: torch.dtype = torch.float32,
        device: str = "cpu",
    ) -> fx.Node:
        node = self.graph.placeholder(name)
        node.meta["val"] = self.empty(shape, dtype, device)
        return node

    def parameter(self, name: str, shape: tuple[int, ...] = (4, 8), *, dtype: torch.dtype = torch.float32) -> fx.Node:
        """A ``get_attr`` of a real parameter that lives in the module."""
        tensor = torch.zeros(shape, dtype=dtype)
        setattr(self.root, name, torch.nn.Parameter(tensor, requires_grad=dtype.is_floating_point))
        node = self.graph.get_attr(name)
        node.meta["val"] = self.empty(shape, dtype)
        return node

    def call(self, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        """Any operator; its fake value is computed from the inputs' fake values."""
        node = self.graph.call_function(target, args, kwargs)
        unfake = lambda a: a.meta["val"] if isinstance(a, fx.Node) else a  # noqa: E731
        with self.fake:
            node.meta["val"] = target(*fx.map_arg(args, unfake), **fx.map_arg(kwargs, unfake))
        return node

    def cast(self, node: fx.Node, dtype: torch.dtype) -> fx.Node:
        return self.call(torch.ops.prims.convert_element_type.default, node, dtype)

    def view(self, node: fx.Node, shape: list[int]) -> fx.Node:
        return self.call(aten.view.default, node, shape)

    def slice(self, node: fx.Node, start: int, end: int, dim: int = 0) -> fx.Node:
        return self.call(aten.slice.Tensor, node, dim, start, end)

    def pad(self, node: fx.Node, amount: list[int]) -> fx.Node:
        return self.call(aten.constant_pad_nd.default, node, amount)

    def cat(self, nodes: list[fx.Node], dim: int = 0) -> fx.Node:
        node = self.graph.call_function(aten.cat.default, (nodes, dim))
        with self.fake:
            node.meta["val"] = torch.cat([n.meta["val"] for n in nodes], dim)
        return node

    def all_gather(
        self, node: fx.Node, *, group: Any = "dp", size: int = 2, role: str | None = None, **fields: Any
    ) -> Collective:
        shape = tuple(node.meta["val"].shape)
        full = (shape[0] * size, *shape[1:])
        return self._collective(Transport.ALL_GATHER, (node, size, group), full, node, role, fields)

    def reduce_scatter(
        self,
        node: fx.Node,
        *,
        group: Any = "dp",
        size: int = 2,
        op: str = "avg",
        role: str | None = None,
        **fields: Any,
    ) -> Collective:
        shape = tuple(node.meta["val"].shape)
        shard = (shape[0] // size, *shape[1:])
        return self._collective(Transport.REDUCE_SCATTER, (node, op, size, group), shard, node, role, fields)

    def all_reduce(
        self, node: fx.Node, *, group: Any = "dp", op: str = "sum", role: str | None = None, **fields: Any
    ) -> Collective:
        shape = tuple(node.meta["val"].shape)
        return self._collective(Transport.ALL_REDUCE, (node, op, group), shape, node, role, fields)

    def wait(self, start: fx.Node) -> fx.Node:
        """A (further) wait on a start node."""
        node = self.graph.call_function(WAIT, (start,))
        node.meta["val"] = start.meta["val"]
        return node

    def output(self, *nodes: fx.Node) -> fx.Node:
        return self.graph.output(tuple(nodes))

    def module(self) -> fx.GraphModule:
        gm = fx.GraphModule(self.root, self.graph)
        gm.graph.lint()
        return gm

    def _collective(
        self,
        transport: Transport,
        args: tuple[Any, ...],
        shape: tuple[int, ...],
        like: fx.Node,
        role: str | None,
        fields: dict[str, Any],
    ) -> Collective:
        start = self.graph.call_function(default_overload(transport), args)
        value = like.meta["val"]
        start.meta["val"] = self.empty(shape, value.dtype, str(value.device))
        if role is not None:
            stamp(start, identity(role, **fields))
        return Collective(start, self.wait(start))
