"""The guard around every pass in lite mode: what the pass left must be what it was given.

A snapshot holds the very objects of the graph (so no id is used twice) and, of ``meta["custom"]``, which is a
dictionary that passes share, a copy. Comparing again costs one identity test per field. What is inserted and then
removed leaves no trace in the graph: torch's create and erase hooks see it. What one pass left unchanged is what the
next one is given, so a row of passes shares one snapshot (``python -m benchmarks lite``). Of a module: its tensors
(storage, place in it, version), its sub-modules, ``meta`` and ``forward``, and its graph's code generator.

Not seen: elements written below autograd (``.data.add_``, through numpy), which move no version; a fake value, or a
list of them, edited in place; arguments written past fx's immutable containers; names, types and users of nodes; other
keys of a node's ``meta``; objects in ``custom`` that are no container and no tensor; other attributes and hooks of a
module, and its class; and what is set back to the very same object before the pass ends.

A mark for recompute is a change as well, except by the passes of ``EXEMPT``: those marks belong to capture.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from types import MappingProxyType

import torch
from torch import fx

from .snapshot import Snapshot

EXEMPT: Mapping[str, frozenset[str]] = MappingProxyType({"reshard": frozenset({"recompute"})})
"""By the name of a pass, what it alone may write."""

_SHOWN = 3


class LiteViolation(RuntimeError):
    """A pass changed a graph that may not change; the message names the pass and the first differences."""


def guarded(
    parts: Iterable[fx.GraphModule], pass_name: str, *, why: str = "lite mode"
) -> AbstractContextManager[None]:
    """Run one pass inside; nothing of ``parts`` may change (`Guard.around`)."""
    return Guard().around(parts, pass_name, why=why)


class Guard:
    """Guards passes that run one after the other; a change between two of them is the second one's."""

    def __init__(self) -> None:
        self._left: dict[fx.GraphModule, Snapshot] = {}

    @contextmanager
    def around(
        self, parts: Iterable[fx.GraphModule], pass_name: str, *, why: str = "lite mode", exempt: bool = True
    ) -> Iterator[None]:
        """Run a pass inside; nothing of ``parts`` may change.

        Args:
            parts: graph modules, sub-graphs listed as well.
            pass_name: named in the error; the names in ``EXEMPT`` may write what is listed there.
            why: what forbids the change, for the error.
            exempt: False for a user's pass, whose name may be any.

        Raises:
            LiteViolation: something changed, or was changed and changed back by inserting and removing a node.
        """
        watched = tuple(parts)
        before = [self._left.get(part) or Snapshot(part) for part in watched]
        self._left = {}  # what is not guarded now may change
        allowed = EXEMPT.get(pass_name, frozenset()) if exempt else frozenset()
        with _seen(watched) as seen:
            yield
        differences = [line for one in before for line in one.differences(allowed)] or seen
        if differences:
            more = f", and {len(differences) - _SHOWN} more" if len(differences) > _SHOWN else ""
            found = "; ".join(differences[:_SHOWN]) + more
            raise LiteViolation(
                f"pass {pass_name!r} must not change the graph in {why}, found {found}: "
                "have the pass return early when context.read_only, or declare LiteBehaviour.SKIP"
            )
        if not allowed:
            self._left = dict(zip(watched, before, strict=True))


@contextmanager
def _seen(watched: tuple[fx.GraphModule, ...]) -> Iterator[list[str]]:
    """What is inserted and removed meanwhile, also where both leave no trace."""
    seen: list[str] = []

    def created(node: fx.Node) -> None:
        seen.append(f"node {node.name} was inserted")

    def erased(node: fx.Node) -> None:
        seen.append(f"node {node.name} was removed")

    for part in watched:
        part._register_create_node_hook(created)
        part._register_erase_node_hook(erased)
    try:
        yield seen
    finally:
        for part in watched:
            part._unregister_create_node_hook(created)
            part._unregister_erase_node_hook(erased)


def check_result(result: object, gm: fx.GraphModule, pass_name: str, *, why: str = "lite mode") -> None:
    """A pass that answers with another module wants it to be used instead.

    Raises:
        LiteViolation: ``result`` is a module other than ``gm``.
    """
    if isinstance(result, torch.nn.Module) and result is not gm:
        raise LiteViolation(
            f"pass {pass_name!r} must not change the graph in {why}, found that it returned a new "
            f"{type(result).__name__}: have it work on the module that it is given"
        )
