"""Which new collective does the work of an erased one? Seen through FX's own node hooks, while any pass runs.

A pass that knows nothing of identities still creates nodes, replaces uses and erases nodes. From these three events
follows who took over from whom. FX calls the hooks of the module that owns the graph (PyTorch 2.11-2.15
``torch/fx/graph_module.py`` ``_register_create_node_hook`` and its two siblings).
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from typing import Any, Final

from torch import fx

from . import compat
from .transports import Launch, is_wait, launch_of

_LOOK_BACK: Final = 256  # new nodes looked through for one that was renamed
_HEIRS: Final = 32  # nodes that may take over from one erased node, as far as we follow


@dataclass(frozen=True, slots=True)
class Takeover:
    """An erased start node and what took over.

    Attributes:
        erased: the start node; it keeps its metadata, not its arguments.
        launch: what it launched, on what.
        by: start nodes that now do its work, nearest first; empty when none does.
        opaque: the operator that swallowed it, compute and communication in one, or None.
        dead: nobody used its result, and it went as dead code.
        pass_name: who erased it.
        stack: the Python stack that did, ``file:line function``, innermost first.
    """

    erased: fx.Node
    launch: Launch
    by: tuple[fx.Node, ...]
    opaque: fx.Node | None
    dead: bool
    pass_name: str
    stack: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Step:
    """What happened from one settled state of the graph to the next.

    Attributes:
        takeovers: one for each erased start node, in order.
        fresh: nodes created and still there, in order of creation.
        starts: those of them that launch a collective.
    """

    takeovers: tuple[Takeover, ...]
    fresh: tuple[fx.Node, ...]
    starts: tuple[fx.Node, ...]


@dataclass(slots=True)
class _Erasure:
    node: fx.Node
    launch: Launch
    heirs: tuple[fx.Node, ...]
    pass_name: str
    stack: tuple[str, ...]


class Watch:
    """Follows one graph while passes run on it. Linear in events.

    A *step* ends when the first node is created after a start node was erased, and when the watch ends: a pass
    creates, replaces, then erases, one bucket after the other.
    """

    def __init__(
        self,
        gm: fx.GraphModule,
        on_step: Callable[[Step], None],
        *,
        name: Callable[[], str],
        stack: Callable[[], tuple[str, ...]] | None = None,
        on_create: Callable[[fx.Node], None] | None = None,
        on_rebuilt: Callable[[Mapping[fx.Node, fx.Node]], None] | None = None,
    ) -> None:
        """
        Args:
            gm: the module whose graph is watched, sub-graphs not included.
            on_step: called at the end of each step in which a node was created or a start node erased.
            name: the pass at work, asked when a start node is erased.
            stack: the Python stack, asked then too.
            on_create: called with each new node of this graph.
            on_rebuilt: called when the module was given another graph, with old node → new node of that name.
        """
        self._gm, self._on_step, self._name, self._stack = gm, on_step, name, stack
        self._on_create, self._on_rebuilt = on_create, on_rebuilt
        self._graph = gm.graph
        self._names = {node.name: node for node in gm.graph.nodes}
        self._fresh: dict[fx.Node, None] = {}
        self._replaced: dict[fx.Node, fx.Node] = {}
        self._inherited: dict[fx.Node, dict[fx.Node, None]] = {}
        self._heirs: dict[fx.Node, tuple[fx.Node, ...]] = {}
        self._erased: list[_Erasure] = []

    @contextmanager
    def watching(self) -> Iterator[Watch]:
        """Hooks are on while open and gone afterwards, from copies made meanwhile as well."""
        gm = self._gm
        hooks = (_Hook(self._create), _Hook(self._replace), _Hook(self._erase))
        copied = _Hook(lambda copy: _unhook(copy, hooks, copied))
        _hook(gm, hooks, copied)
        try:
            yield self
        finally:
            _unhook(gm, hooks, copied)
        self._follow()
        self.settle()

    def settle(self) -> None:
        """End the step: say who took over from the start nodes erased in it."""
        if self._erased or self._fresh:
            fresh = tuple(self._fresh)
            takeovers = tuple(map(self._takeover, self._erased))
            starts = tuple(node for node in fresh if launch_of(node) is not None)
            self._fresh, self._inherited, self._heirs, self._erased = {}, {}, {}, []
            self._on_step(Step(takeovers, fresh, starts))

    def _mine(self, node: fx.Node) -> bool:
        self._follow()
        return node.graph is self._graph  # bodies of wrapped operators name the same owner

    def _follow(self) -> None:
        """Go on with a copied graph, if the module was given one: copying calls no hook, and keeps names."""
        if self._gm.graph is self._graph:
            return
        self.settle()
        new = {node.name: node for node in self._gm.graph.nodes}
        same = {old: new[name] for name, old in self._names.items() if name in new}
        self._replaced = {same[a]: same[b] for a, b in self._replaced.items() if a in same and b in same}
        self._graph, self._names = self._gm.graph, new
        if self._on_rebuilt is not None:
            self._on_rebuilt(same)

    def _create(self, node: fx.Node) -> None:
        if self._mine(node):
            if self._erased:
                self.settle()
            self._fresh[node] = None
            self._names[node.name] = node
            if self._on_create is not None:
                self._on_create(node)

    def _replace(self, old: fx.Node, new: str, user: fx.Node) -> None:
        if self._mine(user):
            found = self._names.get(new)
            if found is None or found.name != new:  # renamed since: a new node, or none that we can tell
                found = next((n for n in islice(reversed(self._fresh), _LOOK_BACK) if n.name == new), None)
            if found is not None and found is not old:
                self._replaced[old] = found

    def _erase(self, node: fx.Node) -> None:
        if not self._mine(node):
            return
        own = self._replaced.pop(node, None)
        inherited = self._inherited.pop(node, None)
        heirs = (own,) if own is not None else tuple(inherited or ())
        self._heirs[node] = heirs
        self._fresh.pop(node, None)
        for source in node.all_input_nodes if heirs else ():
            left = self._inherited.setdefault(source, {})
            if len(left) < _HEIRS:
                left.update(dict.fromkeys(heirs))
        launch = launch_of(node)
        if launch is not None:
            self._erased.append(_Erasure(node, launch, heirs, self._name(), self._stack() if self._stack else ()))

    def _takeover(self, erasure: _Erasure) -> Takeover:
        by: dict[fx.Node, None] = {}
        opaque: fx.Node | None = None
        seen: set[fx.Node] = set()
        level, root = list(erasure.heirs), True
        while level:
            below: list[fx.Node] = []
            for node in level:
                if node in seen:
                    continue
                seen.add(node)
                if node in self._heirs:
                    below += self._heirs[node]
                elif (launch := launch_of(node)) is not None:
                    if node in self._fresh or launch == erasure.launch:  # new, or found equal
                        by[node] = None
                elif node in self._fresh or (root and _passes_on(node)):
                    if opaque is None and is_opaque(node):
                        opaque = node
                    below += node.all_input_nodes
            level, root = below, False
        nearest = tuple(by)
        return Takeover(
            erasure.node,
            erasure.launch,
            nearest,
            None if nearest else opaque,
            not erasure.heirs,
            erasure.pass_name,
            erasure.stack,
        )


def is_opaque(node: fx.Node) -> bool:
    """Whether the node computes and communicates in one operator (``symm_mem.fused_*``)."""
    return (compat.op_name(node.target) or "").startswith("symm_mem::fused_")


def _passes_on(node: fx.Node) -> bool:
    return is_wait(node) or node.target is operator.getitem


class _Hook:
    """One hook; a copied module gets the same object, so that it can be taken off again."""

    def __init__(self, call: Callable[..., None]) -> None:
        self._call = call

    def __call__(self, *args: Any, **kwargs: Any) -> None:
        self._call(*args, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> _Hook:
        return self


def _hook(gm: fx.GraphModule, hooks: tuple[_Hook, _Hook, _Hook], copied: _Hook) -> None:
    create, replace, erase = hooks
    gm._register_create_node_hook(create)
    gm._register_replace_node_hook(replace)
    gm._register_erase_node_hook(erase)
    gm._register_deepcopy_hook(copied)


def _unhook(gm: fx.GraphModule, hooks: tuple[_Hook, _Hook, _Hook], copied: _Hook) -> None:
    """Only what is there: `__copy__` and other makers of modules drop hooks."""
    lists: tuple[list[Any], ...] = (gm._create_node_hooks, gm._replace_hooks, gm._erase_node_hooks, gm._deepcopy_hooks)
    for registered, hook in zip(lists, (*hooks, copied), strict=True):
        if hook in registered:
            registered.remove(hook)
