"""What a pass declares before it runs, and what it is given when it runs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from types import MappingProxyType
from typing import Any, Protocol

from torch import fx

from collective_identity.ledger import GraphKind, GraphLog

from .lite_mode import LiteState
from .options import BackendOptions


class LiteBehaviour(str, Enum):
    """What a pass does when Inductor's lite mode is on for the graph."""

    SKIP = "skip"
    """It optimises: it does not run."""
    READ_ONLY = "read_only"
    """It looks and reports, and writes nothing."""
    CAPTURE = "capture"
    """It belongs to capture, not to optimisation, and runs as always (recompute marks)."""


@dataclass(frozen=True, slots=True)
class PassContract:
    """Name, needs and promises of a pass; the manager checks a schedule of these before anything runs."""

    name: str
    lite: LiteBehaviour
    requires: frozenset[str] = frozenset()
    provides: frozenset[str] = frozenset()
    stage: str = "graph"
    """``"joint"``: the joint graph before partitioning; ``"graph"``: one forward, backward or inference graph."""


@dataclass(frozen=True, slots=True)
class PassContext:
    """What a pass may look at besides its graph."""

    kind: GraphKind
    """``"joint"``, ``"forward"``, ``"backward"``, ``"inference"`` or ``"step"``."""
    lite: LiteState
    observe: bool
    """True in an observe session: no graph may change, except by passes whose lite behaviour is CAPTURE."""
    options: BackendOptions
    log: GraphLog | None

    @property
    def read_only(self) -> bool:
        """No optimisation and no write to the graph is allowed."""
        return self.observe or self.lite is not LiteState.OFF


@dataclass(frozen=True, slots=True)
class PassOutcome:
    """What a pass did: whether the graph changed, and facts for the report (JSON values only)."""

    changed: bool
    summary: Mapping[str, Any] = field(default_factory=lambda: MappingProxyType({}))


class GraphPass(Protocol):
    """A pass over one FX graph."""

    @property
    def contract(self) -> PassContract:
        """What it declares."""
        ...

    def __call__(self, gm: fx.GraphModule, context: PassContext) -> PassOutcome:
        """Run on ``gm`` in place."""
        ...
