"""Which FSDP2 modules communicate outside every graph? Those whose own hooks are still on."""

from __future__ import annotations

from . import compat
from .codes import NOT_CAPTURED
from .ledger import Ledger
from .reporting.records import CapturedRecord

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
        more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
        ledger.event(
            NOT_CAPTURED,
            detail=f"eager FSDP2 modules {', '.join(names[:_NAMED])}{more}: their collectives run in FSDP2's hooks",
        )
