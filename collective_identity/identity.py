"""What does a payload say, and is it to be believed? One value type, one function that builds it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import Enum
from types import MappingProxyType
from typing import Any, Final

from . import codes
from .canonical import is_dict, items_of, type_name
from .codes import Code
from .roles import DEFAULT_ROLES, RoleTable, is_fsdp, is_namespaced
from .transports import Transport

VERSION: Final = 1
"""The payload's schema version."""


class Source(str, Enum):
    """Who says so: the producer, or the shape of the graph."""

    EXPLICIT = "explicit"
    INFERRED = "inferred"

    def __str__(self) -> str:
        return self.value


_SOURCES: Final = MappingProxyType({source.value: source for source in Source})


@dataclass(frozen=True, slots=True)
class Identity:
    """The validated view of a payload: why a collective was emitted.

    Attributes:
        version: schema version, 1.
        role: namespaced role, ``"fsdp.param_unshard"``.
        source: who says so. Inferred never turns into explicit.
        producer: what wrote it, ``"fsdp2"``, ``"bucketing"``.
        group: process-group name the producer used, or None.
        param_group: the producer's own unit (module FQN), or None.
        params: FQNs of the parameters carried, or None when not known.

    RFC-0057 (pytorch/rfcs pull 103).
    """

    version: int
    role: str
    source: Source
    producer: str
    group: str | None = None
    param_group: str | None = None
    params: tuple[str, ...] | None = None

    @property
    def explicit(self) -> bool:
        """Whether the producer itself said so."""
        return self.source is Source.EXPLICIT

    def inferred(self) -> Identity:
        """The same identity with the weaker source."""
        return replace(self, source=Source.INFERRED)

    def to_payload(self) -> dict[str, Any]:
        """The wire form: a fresh dict of primitives, optional fields left out when None."""
        payload: dict[str, Any] = {
            "version": self.version,
            "role": self.role,
            "source": self.source.value,
            "producer": self.producer,
        }
        if self.group is not None:
            payload["group"] = self.group
        if self.param_group is not None:
            payload["param_group"] = self.param_group
        if self.params is not None:
            payload["params"] = list(self.params)
        return payload


@dataclass(frozen=True, slots=True)
class Verdict:
    """What became of a payload.

    Attributes:
        identity: the validated view, None when the payload counts as absent.
        code: why it counts as absent, None when valid.
        detail: expected and found, in words; empty when valid.
        notes: remarks on a valid payload (``GROUP_UNVERIFIED``).
    """

    identity: Identity | None
    code: Code | None = None
    detail: str = ""
    notes: tuple[Code, ...] = ()


def parse(
    raw: object,
    *,
    transport: Transport | None = None,
    node_group: str | None = None,
    roles: RoleTable = DEFAULT_ROLES,
) -> Verdict:
    """Build the validated view of a raw payload. Never raises, whatever ``raw`` is.

    Args:
        raw: the value found under the payload key.
        transport: transport of the collective that carries it; None leaves role × transport unchecked.
        node_group: process-group name of that collective; None when it resolves to no name.
        roles: role × transport rows.

    Returns:
        A verdict with an identity, or with the code and detail that say why there is none.
    """
    try:
        return _parse(raw, transport, node_group, roles)
    except Exception as error:  # a payload may be any object, with any behaviour
        return _absent(codes.WRONG_TYPE, unreadable(error))


def unreadable(error: Exception) -> str:
    """What to say of a payload that raised when it was read."""
    return f"reading the payload raised {type_name(error)}"


def _absent(code: Code, detail: str) -> Verdict:
    return Verdict(None, code, detail)


def _wrong_type(name: str, expected: str, value: object) -> Verdict:
    return _absent(codes.WRONG_TYPE, f"expected {expected} in {name!r}, found {type_name(value)}")


def _shown(value: object) -> str:
    """A value for a message, cut: a payload may hold megabytes."""
    if isinstance(value, int) and value.bit_length() > 256:
        return f"an int of {value.bit_length()} bits"
    text = repr(value[:100] if isinstance(value, str) else value)
    return text if len(text) <= 100 else f"{text[:97]}..."


def _parse(raw: object, transport: Transport | None, node_group: str | None, roles: RoleTable) -> Verdict:
    # Types are compared exactly: a subclass of int or str may say of itself what it likes.
    if not is_dict(raw):
        return _absent(codes.WRONG_TYPE, f"expected a dict as payload, found {type_name(raw)}")
    fields = raw if type(raw) is dict else dict(dict.items(raw))
    try:
        version, role, source, producer = fields["version"], fields["role"], fields["source"], fields["producer"]
    except KeyError:
        missing = [name for name in ("version", "role", "source", "producer") if name not in fields]
        return _absent(codes.MISSING_FIELD, f"missing {', '.join(missing)}")

    if type(version) is not int:
        return _wrong_type("version", "an int", version)
    if version != VERSION:
        return _absent(codes.UNKNOWN_VERSION, f"expected version {VERSION}, found {_shown(version)}")
    for name, value in (("role", role), ("source", source), ("producer", producer)):
        if type(value) is not str:
            return _wrong_type(name, "a str", value)
    said = _SOURCES.get(source)
    if said is None:
        return _absent(codes.UNKNOWN_SOURCE, f"expected 'explicit' or 'inferred', found {_shown(source)}")
    if not roles.knows(role):
        return _absent(codes.BAD_ROLE, _bad_role(role, roles))
    if transport is not None and not roles.allows(role, transport):
        expected = roles.expected(role)
        return _absent(codes.ROLE_TRANSPORT, f"{_shown(role)} expects {expected}, found {transport.value}")

    group, param_group, params = fields.get("group"), fields.get("param_group"), fields.get("params")
    for name, value in (("group", group), ("param_group", param_group)):
        if value is not None and type(value) is not str:
            return _wrong_type(name, "a str", value)
    if params is not None:
        if not issubclass(type(params), (list, tuple)):
            return _wrong_type("params", "a list of str", params)
        params = tuple(items_of(params))
        for item in params:
            if type(item) is not str:
                return _wrong_type("params", "a list of str", item)
    if group is not None and node_group is not None and group != node_group:
        return _absent(
            codes.GROUP_MISMATCH, f"the payload names group {_shown(group)}, the collective runs on {node_group!r}"
        )
    identity = Identity(VERSION, role, said, producer, group, param_group, params)
    unverified = transport is not None and group is not None and node_group is None
    return Verdict(identity, notes=(codes.GROUP_UNVERIFIED,) if unverified else ())


def _bad_role(role: str, roles: RoleTable) -> str:
    if not is_namespaced(role):
        return f"expected a namespaced role, found {_shown(role)}"
    known = ", ".join(sorted(r for r in roles.rows if is_fsdp(r)))
    return f"expected one of {known}, found {_shown(role)}"
