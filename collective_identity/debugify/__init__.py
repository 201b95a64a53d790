"""Does a pass keep identities? Stamp synthetic ones, run it, and say what became of each and who did it.

After LLVM's debugify, which does the same for debug locations.
"""

from __future__ import annotations

from .findings import FAULTS, Finding, Kind
from .report import DebugifyFault, DebugifyReport, PassReport
from .run import DebugifyError, debugify
from .stamps import STAMPS

__all__ = [
    "FAULTS",
    "STAMPS",
    "DebugifyError",
    "DebugifyFault",
    "DebugifyReport",
    "Finding",
    "Kind",
    "PassReport",
    "debugify",
]
