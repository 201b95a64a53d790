"""How does Inductor's code say in a profile why it communicates? Lines around the call of each collective."""

from __future__ import annotations

from typing import Any

from torch import fx

from collective_identity import identity_of, launch_of, profiling
from collective_identity.transports import is_launch_operator

from . import upstream

_IMPORT = "from collective_identity.profiling import begin as _identity_begin, end as _identity_end"
_SCOPE = "_identity_scope"


def mark_kernel(kernel: Any, origins: list[fx.Node]) -> None:
    """Put a range (`collective_identity.profiling`) around a kernel that launches a collective with an identity."""
    if not is_launch_operator(getattr(kernel, "op_overload", None)):
        return  # a wait, or one output of several, that comes from the same nodes
    found = {identity for node in origins if launch_of(node) is not None and (identity := identity_of(node))}
    if len(found) != 1:
        return
    name = profiling.label(found.pop())
    upstream.write_around(kernel, _IMPORT, f"{_SCOPE} = _identity_begin({name!r})", f"_identity_end({_SCOPE})")
