"""The producers: who says why a collective was emitted.

``install`` makes a ``fully_shard`` model capturable by ``torch.compile`` with every FSDP collective in the graph
and an explicit role on each; ``data_parallel`` does the same for a plain model.
"""

from __future__ import annotations

from .data_parallel import data_parallel, undo_data_parallel
from .errors import InstallError, UnsupportedOption
from .expected import expected_collectives
from .installation import install, uninstall

__all__ = [
    "InstallError",
    "UnsupportedOption",
    "data_parallel",
    "expected_collectives",
    "install",
    "undo_data_parallel",
    "uninstall",
]
