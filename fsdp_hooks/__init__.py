"""The producers: who says why a collective was emitted.

``install`` makes a ``fully_shard`` model capturable by ``torch.compile`` with every FSDP collective in the graph
and an explicit role on each.
"""

from __future__ import annotations

from .errors import InstallError, UnsupportedOption
from .expected import expected_collectives
from .installation import install, uninstall

__all__ = ["InstallError", "UnsupportedOption", "expected_collectives", "install", "uninstall"]
