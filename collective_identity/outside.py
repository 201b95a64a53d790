"""Which FSDP2 modules communicate outside every graph? Those whose own hooks are still on."""

from __future__ import annotations

from collections.abc import Sequence

from . import compat
from .codes import NOT_CAPTURED, NOTHING_COMPILED
from .ledger import Ledger
from .reporting.records import CapturedRecord, ExpectedRecord, GraphRecord

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
    that an exception ended may have been about to: then only models that could not have been captured are said.
    """
    if any(isinstance(record, (GraphRecord, ExpectedRecord)) for record in ledger.records()):
        return
    names = sorted(compat.eager_fsdp_modules(running=False))
    if names or not failed:
        ledger.event(NOTHING_COMPILED, detail=f"not installed: {_hooks(names)}" if names else "")


def _hooks(names: Sequence[str]) -> str:
    more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    return f"eager FSDP2 modules {', '.join(names[:_NAMED])}{more}: their collectives run in FSDP2's hooks"
