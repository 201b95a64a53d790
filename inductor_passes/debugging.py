"""`debugify` for this package's own passes as well: a `GraphPass` or a `Pipeline` is run as in an optimize session."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import fx

from collective_identity.debugify import STAMPS, DebugifyReport
from collective_identity.debugify import debugify as run

from .contract import PassContext
from .lite_mode import LiteState
from .manager import Pipeline
from .options import BackendOptions
from .passes import graph_passes


def debugify(passes: Any, gm: fx.GraphModule, *, stamps: Sequence[str] = tuple(STAMPS)) -> DebugifyReport:
    """As `collective_identity.debugify.debugify`; ``passes`` may also be a `Pipeline` or passes with a contract."""
    if isinstance(passes, Pipeline):
        passes = passes.passes
    if isinstance(passes, (list, tuple)):
        passes = [_callable(one) for one in passes]
    elif hasattr(passes, "contract"):
        passes = [_callable(passes)]
    return run(passes, gm, stamps=stamps)


def _callable(one: Any) -> Any:
    contract = getattr(one, "contract", None)
    if contract is None:
        return one
    context = PassContext(kind="forward", lite=LiteState.OFF, observe=False, options=BackendOptions(), log=None)
    call: Callable[[fx.GraphModule], None] = lambda gm: one(gm, context) and None  # noqa: E731
    return contract.name, call


def backend_passes(gm: fx.GraphModule) -> None:
    """What the backend does to a graph by default, as one callable: the pass of `collective-identity debugify`."""
    context = PassContext(kind="forward", lite=LiteState.OFF, observe=False, options=BackendOptions(), log=None)
    Pipeline(graph_passes(context.options)).run(gm, context)
