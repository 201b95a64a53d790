"""Which roles exist, and which transport may carry which role?"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Final

from .transports import Transport

PARAM_UNSHARD: Final = "fsdp.param_unshard"
"""Materialise the parameters of an FSDP parameter group (all-gather). RFC-0057."""
GRAD_REDUCE_SHARD: Final = "fsdp.grad_reduce_shard"
"""Reduce gradients into the sharded form (reduce-scatter). RFC-0057."""
GRAD_REPLICATE_REDUCE: Final = "fsdp.grad_replicate_reduce"
"""Reduce gradients over the replicate axis, HSDP or DDP (all-reduce). RFC-0057."""

_FSDP: Final = "fsdp."
_NAMESPACE: Final = re.compile(r"[A-Za-z_][\w-]*", re.ASCII)
_WORD: Final = re.compile(r"[\w-]+", re.ASCII)


def is_fsdp(role: str | None) -> bool:
    """Whether the role is in the ``fsdp.`` namespace. None (no role) is not."""
    return role is not None and role.startswith(_FSDP)


def is_namespaced(role: str) -> bool:
    """Whether the role reads ``namespace.name[.name…]``: ASCII words, at least two, joined by dots."""
    namespace, *words = role.split(".")
    return bool(words) and _NAMESPACE.fullmatch(namespace) is not None and all(map(_WORD.fullmatch, words))


@dataclass(frozen=True, slots=True)
class RoleTable:
    """Role × transport rows. The ``fsdp.`` namespace is closed, every other one open.

    Attributes:
        rows: for a listed role the transports that may carry it. A role outside ``fsdp.`` that is not
            listed may be carried by any transport.
    """

    rows: Mapping[str, frozenset[Transport]] = field(default_factory=lambda: MappingProxyType(_FSDP_ROWS))

    def knows(self, role: str) -> bool:
        """Whether the role may exist at all: namespaced, and listed if it is in ``fsdp.``, in whatever case."""
        return role in self.rows or (not is_fsdp(role.lower()) and is_namespaced(role))

    def allows(self, role: str, transport: Transport) -> bool:
        """Whether ``transport`` may carry ``role``."""
        row = self.rows.get(role)
        return self.knows(role) if row is None else transport in row

    def expected(self, role: str) -> str:
        """The transports of a role in words, for messages."""
        row = self.rows.get(role)
        return "any transport" if row is None else " or ".join(sorted(t.value for t in row))

    def extend(self, rows: Mapping[str, Iterable[Transport]]) -> RoleTable:
        """A new table with the rows of a namespace owner added; this one is unchanged.

        Args:
            rows: role → transports that may carry it, ``{"tp.activation_gather": {ALL_GATHER}}``.

        Raises:
            ValueError: a role is not namespaced, is in ``fsdp.``, is already listed with other transports,
                or has no transport.
        """
        merged = dict(self.rows)
        for role, transports in rows.items():
            wanted = frozenset(Transport(t) for t in transports)
            if not is_namespaced(role):
                raise ValueError(f"expected a namespaced role such as 'tp.activation_gather', found {role!r}")
            if is_fsdp(role.lower()):
                raise ValueError(
                    f"the rows of the 'fsdp.' namespace cannot be changed, found {role!r}; "
                    "register the role under a namespace of your own"
                )
            if not wanted:
                raise ValueError(f"expected at least one transport for {role!r}, found none")
            if merged.get(role, wanted) != wanted:
                raise ValueError(
                    f"{role!r} is already registered for {self.expected(role)}, "
                    f"found {' or '.join(sorted(t.value for t in wanted))}"
                )
            merged[role] = wanted
        return RoleTable(MappingProxyType(merged))


_FSDP_ROWS: Final[dict[str, frozenset[Transport]]] = {
    PARAM_UNSHARD: frozenset({Transport.ALL_GATHER}),
    GRAD_REDUCE_SHARD: frozenset({Transport.REDUCE_SCATTER}),
    GRAD_REPLICATE_REDUCE: frozenset({Transport.ALL_REDUCE}),
}

DEFAULT_ROLES: Final = RoleTable()
"""The ``fsdp.`` rows only."""
