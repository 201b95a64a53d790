"""How does a profile say why a collective ran? A range with role and parameters around each launch.

The range is a ``user_annotation`` of `torch.profiler`, so Perfetto shows it over the launch, and on a GPU over the
kernels launched inside. Without a running profiler a mark costs one look at a flag.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import fx

from . import compat
from .identity import Identity
from .store import identity_of
from .subgraphs import graph_modules
from .transports import start_nodes


def label_of(role: str, params: tuple[str, ...] | None, param_group: str | None) -> str:
    """The name of a range: the role, the parameter, or of several the unit and how many: ``"fsdp.param_unshard a.w"``,
    ``"fsdp.param_unshard layers.0 (7 parameters)"``."""
    if params is not None and len(params) == 1:
        return f"{role} {params[0]}"
    where = param_group or (params[0] + ", ..." if params else "")
    return " ".join(part for part in (role, where, f"({len(params)} parameters)" if params else "") if part)


def label(identity: Identity) -> str:
    """The name of the range around a collective of this identity."""
    return label_of(identity.role, identity.params, identity.param_group)


def begin(name: str) -> Any:
    """Open a range if a profiler runs; what `end` takes. Also called by compiled code."""
    if not torch.autograd._profiler_enabled():
        return None
    scope = torch.autograd.profiler.record_function(name)
    scope.__enter__()
    return scope


def end(scope: Any) -> None:
    """Close what `begin` opened."""
    if scope is not None:
        scope.__exit__(None, None, None)


@contextmanager
def marked(name: str) -> Iterator[None]:
    """A range around eager code; none while a graph is traced, where it would become part of it."""
    scope = None if compat.tracing() else begin(name)
    try:
        yield
    finally:
        end(scope)


def mark_graph(gm: fx.GraphModule) -> int:
    """Put a range around every collective with an identity in a graph that is run as it is.

    For the last step before a graph runs: no pass should see the ranges. A graph that Inductor compiles needs none of
    this, the backend marks its code.

    Returns:
        The number of collectives marked.
    """
    marks = 0
    for module in graph_modules(gm):
        for node in start_nodes(module):
            identity = identity_of(node)
            if identity is None:
                continue
            with module.graph.inserting_before(node):
                scope = module.graph.call_function(begin, (label(identity),))
            with module.graph.inserting_after(node):
                module.graph.call_function(end, (scope,))
            marks += 1
        module.recompile()
    return marks
