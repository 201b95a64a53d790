"""Selective decomposition while the graph is traced, instead of by tracing it again.

In lite mode torch traces without decompositions, then traces the whole joint graph once more and decomposes the
marked nodes (torch/_functorch/_aot_autograd/graph_compile.py, ``aot_stage1_graph_capture``; read in torch 2.11.0
to 2.15.0). The second trace costs as much as the first, and drops every annotation unless
``trace.provenance_tracking_level`` is 1: then marked regions fall back like all others, and it crashes on some
higher-order operators. Here each entry of the table asks, when it is called, whether what is traced is marked, and
declines otherwise. The first trace keeps annotations at every level.

The backward of a marked operator is marked: its nodes get the annotation only after tracing, so the table looks
the gradient's sequence number up among the forward nodes that are there already.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import fx

from .. import upstream
from .lowering import LiteUnsupported
from .marks import KEY, is_marked
from .state import SWITCH, LiteState, lite_state

SELECTIVE = "selective_decompose"


def _dense_gradient(op: Callable[..., Any], gradient: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
    """The kernel copies a gradient that is not dense; the fake one promises that gradient's strides."""
    dense = gradient.contiguous()
    return NotImplemented if dense is gradient else op(dense, *args, **kwargs)  # asks the table again


def _masked(op: object, gradient: torch.Tensor, mask: torch.Tensor, scale: float) -> Any:
    """The kernel for the CPU is this product, with the gradient's strides; the fake one promises dense ones."""
    if gradient.device.type != "cpu" or gradient.is_contiguous():
        return NotImplemented
    return gradient * mask * scale  # in this order: rounded twice in half precision, as there


AS_THEIR_KERNELS: Mapping[Callable[..., Any], Callable[..., Any]] = MappingProxyType(
    {
        torch.ops.aten.native_layer_norm_backward.default: _dense_gradient,
        torch.ops.aten._log_softmax_backward_data.default: _dense_gradient,
        torch.ops.aten.native_dropout_backward.default: _masked,
    }
)
"""Operators whose fake kernel promises other strides for a transposed gradient than the real one gives, so that
Inductor's assertion fails; each said so that both agree, with the kernel's own results to the bit
(aten/src/ATen/native: layer_norm.cpp, SoftMax.cpp, Dropout.cpp; torch/_decomp/decompositions.py of 2.11 to 2.15)."""


class OneTraceTable(dict[Any, Callable[..., Any]]):
    """Inductor's decompositions, each for marked code only.

    Pickles to its name: what it does is in the version of this package and in the annotations, both of which
    belong into a cache key. A plain dictionary of functions would switch Inductor's cache off.
    """

    def __init__(self, table: Mapping[Any, Callable[..., Any]] | None = None) -> None:
        marks = _Marks()
        rows = upstream.decomposition_table() if table is None else table
        super().__init__({op: _Entry(op, function, marks) for op, function in rows.items()})

    def over(self, table: Mapping[Any, Callable[..., Any]]) -> OneTraceTable:
        """The same for another table; what that holds is in no name, so only with the caches off."""
        return OneTraceTable(table)

    def __reduce__(self) -> tuple[type[OneTraceTable], tuple[()]]:
        return (OneTraceTable, ())


class _Entry:
    """One decomposition; NotImplemented, which tells the tracer to go on without, where nothing is marked."""

    __slots__ = ("_function", "_marks", "_op")

    def __init__(self, op: Any, function: Callable[..., Any], marks: _Marks) -> None:
        self._op, self._function, self._marks = op, function, marks

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self._marks.here():
            return self._function(*args, **kwargs)
        as_its_kernel = AS_THEIR_KERNELS.get(self._op)
        return NotImplemented if as_its_kernel is None else as_its_kernel(self._op, *args, **kwargs)


class _Marks:
    """Is what is traced now marked? Remembers, per graph, the marked forward nodes that it has read."""

    def __init__(self) -> None:
        self._read: WeakKeyDictionary[fx.Graph, _Read] = WeakKeyDictionary()

    def here(self) -> bool:
        annotations, number, graph = upstream.traced_now()
        if number is None:
            return KEY in annotations
        if graph is None:
            return False
        read = self._read.get(graph)
        if read is None:
            read = self._read[graph] = _Read()
        read.catch_up(graph)
        return number in read.marked


@dataclass(slots=True)
class _Read:
    """Sequence numbers of one graph, each node read once."""

    known: set[int] = field(default_factory=set)
    marked: set[int] = field(default_factory=set)
    last: fx.Node | None = None

    def catch_up(self, graph: fx.Graph) -> None:
        """Read the nodes appended since the last call; the first node of a number is the forward one."""
        root = graph._root
        node = (self.last or root).next
        while node is not root:
            number = node.meta.get("seq_nr") if node.op == "call_function" else None
            if number is not None and number not in self.known:
                self.known.add(number)
                if is_marked(node):
                    self.marked.add(number)
            self.last, node = node, node.next


@dataclass(frozen=True, slots=True)
class Selection:
    """How Inductor is called for one graph.

    Attributes:
        options: Inductor's options for the compile. In lite mode all its switches are among them, with the values
            of the moment: a backward that compiles in another thread does not see the caller's ``config.patch``.
        table: the decompositions to use, None for Inductor's own.
    """

    options: Mapping[str, Any]
    table: OneTraceTable | None

    def state(self, gm: fx.GraphModule) -> LiteState:
        """The lite mode under which ``gm`` will be compiled."""
        names = [name for name in upstream.mode_options()["lite"] if name in self.options]
        with upstream.inductor_flags({name: self.options[name] for name in names}), self.as_asked():
            return lite_state(gm)

    def as_asked(self) -> AbstractContextManager[Any]:
        """The switch as the user set it, for the passes: ours is off only so that torch does not trace again."""
        return upstream.inductor_flags({} if self.table is None else {SELECTIVE: True})


def select(options: Mapping[str, Any]) -> Selection:
    """Decide from the options of this compile and the configuration of the moment.

    Raises:
        LiteUnsupported: decompositions for marked code alone, but no fallback for the rest.
    """

    def now(name: str) -> Any:
        return options[name] if name in options else upstream.inductor_flag(name)

    if not now(SWITCH):
        if now(SELECTIVE):
            raise LiteUnsupported(
                f"{SELECTIVE}=True expects {SWITCH}=True, found False: torch then has a fallback and a decomposition "
                'for one operator. Set both (mode="lite" does), or neither'
            )
        return Selection(options, None)
    switches = {name: now(name) for name in upstream.mode_options()["lite"]}
    if not switches[SELECTIVE]:
        return Selection({**options, **switches}, None)
    with upstream.inductor_flags({**options, **switches}):  # fallback_random picks one of torch's two tables
        table = OneTraceTable()
    return Selection({**options, **switches, SELECTIVE: False}, table)
