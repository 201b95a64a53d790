"""Which graphs does a graph run? Sub-graphs of higher-order operators, and the bodies of wrapped collectives."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import Any, Final

from torch import fx

from . import compat

CONTROL_DEPS: Final = "control_deps"
"""The higher-order operator that orders one wrapped operator behind others."""


def graph_modules(gm: fx.GraphModule) -> Iterator[fx.GraphModule]:
    """``gm``, then every sub-graph that a higher-order operator of it runs, once each, outer before inner.

    The one-operator bodies of ``control_deps`` are left out: their node is the collective.
    """
    seen: set[int] = set()
    queue = deque([gm])
    while queue:
        current = queue.popleft()
        if id(current) not in seen:
            seen.add(id(current))
            yield current
            queue += _called(current)


def wrapped_bodies(gm: fx.GraphModule) -> Iterator[tuple[fx.GraphModule, tuple[fx.Node, ...]]]:
    """Every ``control_deps`` body of this graph alone, with the nodes that run it."""
    for node in gm.graph.find_nodes(op="get_attr"):
        inner = submodule_of(node)
        if inner is not None and _only_wrapped(node):
            yield inner, tuple(node.users)


def _only_wrapped(node: fx.Node) -> bool:
    return bool(node.users) and all(compat.higher_order_name(user.target) == CONTROL_DEPS for user in node.users)


def _called(gm: fx.GraphModule) -> Iterator[fx.GraphModule]:
    for node in gm.graph.find_nodes(op="get_attr"):
        inner = submodule_of(node)
        if inner is not None and not _only_wrapped(node):
            yield inner
    for node in gm.graph.find_nodes(op="call_module"):
        inner = named(node)
        if isinstance(inner, fx.GraphModule):
            yield inner


def wrapped_body(node: fx.Node) -> fx.GraphModule | None:
    """The sub-graph a ``control_deps`` node runs, None for any other node.

    PyTorch 2.11–2.15 ``torch/_inductor/fx_passes/control_dependencies.py``:
    ``control_deps(dependencies, subgraph, *inputs)``, the sub-graph behind a ``get_attr`` or given itself.
    """
    if compat.higher_order_name(node.target) != CONTROL_DEPS or len(node.args) < 2:
        return None
    return submodule_of(node.args[1])


def submodule_of(value: object) -> fx.GraphModule | None:
    """The GraphModule that an argument is, or that a ``get_attr`` node names, else None."""
    if isinstance(value, fx.Node) and value.op == "get_attr":
        value = named(value)
    return value if isinstance(value, fx.GraphModule) else None


def named(node: fx.Node) -> Any:
    """What a ``get_attr`` or ``call_module`` node names in its module, None when it is not there."""
    found: Any = node.graph.owning_module
    for part in str(node.target).split("."):
        found = getattr(found, part, None)
    return found
