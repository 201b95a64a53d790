"""Which FSDP2 modules communicate outside every graph? Those whose own hooks are still on."""

from __future__ import annotations

from collections.abc import Sequence

from . import compat
from .codes import EAGER_ROLES, NOT_CAPTURED, NOTHING_COMPILED
from .ledger import Ledger
from .reporting.records import CapturedRecord, EventRecord, ExpectedRecord, GraphRecord

_NAMED = 12


def say_eager_modules(ledger: Ledger) -> None:
    """Record, once per set of modules, the FSDP2 modules in whose eager forward a graph is about to run.

    Their all-gathers and reduce-scatters run in FSDP2's hooks, which no graph holds since torch 2.12. A module whose
    unit some captured collective names is left out: it was traced as a whole step.
    """
    eager = compat.eager_fsdp_modules()
    if not eager:
        return
    seen = {row.param_group for r in ledger.records() if isinstance(r, CapturedRecord) for row in r.rows}
    names = sorted(name for name in eager if name not in seen)
    if names:
        ledger.event(NOT_CAPTURED, detail=_hooks(names))


def say_nothing_compiled(ledger: Ledger, *, failed: bool) -> None:
    """At the end of a session: record that it holds no graph, and the models that nobody has installed.

    Not where a producer has declared a model: the report says of each that it is not captured. One
    that an exception ended may have been about to: then only models that could not have been captured are said. Eager
    FSDP2 that says its roles itself has nothing to compile.
    """
    records = ledger.records()
    if any(isinstance(record, (GraphRecord, ExpectedRecord)) for record in records):
        return
    if labelled := sorted(compat.eager_fsdp_modules(running=False, labelled=True)):
        say_eager_roles(ledger, labelled)
    if labelled or any(isinstance(r, EventRecord) and r.code == EAGER_ROLES.id for r in records):
        return
    names = sorted(compat.eager_fsdp_modules(running=False))
    if names or not failed:
        ledger.event(NOTHING_COMPILED, detail=f"not installed: {_hooks(names)}" if names else "")


def say_eager_roles(ledger: Ledger, names: Sequence[str]) -> None:
    """Record that the collectives of these eager FSDP2 modules carry their roles without a graph of ours."""
    ledger.event(EAGER_ROLES, detail=f"eager FSDP2 modules {_some(names)}")


def _hooks(names: Sequence[str]) -> str:
    return f"eager FSDP2 modules {_some(names)}: their collectives run in FSDP2's hooks"


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:_NAMED]) + (f" and {len(names) - _NAMED} more" if len(names) > _NAMED else "")
