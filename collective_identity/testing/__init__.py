"""For test suites that need several ranks: run a function on real processes, and ask what became of its roles.

`pytest` finds the fixture ``run_on_ranks`` and the marker ``on_ranks`` by themselves (docs/diagnostics.md).
"""

from __future__ import annotations

from .asserts import assert_nothing_lost, assert_roles
from .ranks import RankOutcome, RanksFailed, RanksRun, run_on_ranks

__all__ = ["RankOutcome", "RanksFailed", "RanksRun", "assert_nothing_lost", "assert_roles", "run_on_ranks"]
