"""Roles: what is well formed, what is FSDP, which transport may carry what."""

from __future__ import annotations

import pytest

from collective_identity import (
    DEFAULT_ROLES,
    GRAD_REDUCE_SHARD,
    GRAD_REPLICATE_REDUCE,
    PARAM_UNSHARD,
    RoleTable,
    Transport,
)
from collective_identity.codes import CODES
from collective_identity.roles import is_fsdp, is_namespaced

ALLOWED = {
    PARAM_UNSHARD: Transport.ALL_GATHER,
    GRAD_REDUCE_SHARD: Transport.REDUCE_SCATTER,
    GRAD_REPLICATE_REDUCE: Transport.ALL_REDUCE,
}


@pytest.mark.parametrize("transport", list(Transport))
@pytest.mark.parametrize("role", list(ALLOWED))
def test_fsdp_roles_have_one_transport(role: str, transport: Transport) -> None:
    assert DEFAULT_ROLES.allows(role, transport) == (transport is ALLOWED[role])


@pytest.mark.parametrize("transport", list(Transport))
@pytest.mark.parametrize("role", ["tp.activation_gather", "user.metric", "pp.send.recv", "fsdp2.like"])
def test_other_namespaces_are_open(role: str, transport: Transport) -> None:
    assert DEFAULT_ROLES.allows(role, transport)
    assert not is_fsdp(role)


@pytest.mark.parametrize("transport", list(Transport))
def test_the_fsdp_namespace_is_closed(transport: Transport) -> None:
    assert is_fsdp("fsdp.something_new")
    assert not DEFAULT_ROLES.allows("fsdp.something_new", transport)


@pytest.mark.parametrize("role", ["", "fsdp", "fsdp.", ".x", "a..b", "a b.c", "1a.b", "a.b\n", "fsdp. x", "ä.b"])
def test_not_namespaced(role: str) -> None:
    assert not is_namespaced(role)
    assert not DEFAULT_ROLES.knows(role)


def test_no_role_is_not_fsdp() -> None:
    assert not is_fsdp(None)
    assert not is_fsdp("fsdp")


def test_a_namespace_owner_registers_rows() -> None:
    table = DEFAULT_ROLES.extend({"tp.activation_gather": {Transport.ALL_GATHER}})
    assert table.allows("tp.activation_gather", Transport.ALL_GATHER)
    assert not table.allows("tp.activation_gather", Transport.ALL_REDUCE)
    assert table.allows("tp.another", Transport.ALL_REDUCE)
    assert table.allows(PARAM_UNSHARD, Transport.ALL_GATHER)
    assert DEFAULT_ROLES.allows("tp.activation_gather", Transport.ALL_REDUCE), "the default table changed"


@pytest.mark.parametrize(
    ("rows", "says"),
    [
        ({PARAM_UNSHARD: {Transport.ALL_REDUCE}}, "cannot be changed"),
        ({"fsdp.new": {Transport.ALL_REDUCE}}, "cannot be changed"),
        ({"gather": {Transport.ALL_GATHER}}, "namespaced"),
        ({"tp.none": set()}, "at least one transport"),
        ({"tp.bad": {"telepathy"}}, "telepathy"),
    ],
)
def test_rows_that_are_refused(rows: dict[str, set[Transport]], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        DEFAULT_ROLES.extend(rows)


def test_a_row_cannot_be_registered_twice_differently() -> None:
    table = DEFAULT_ROLES.extend({"tp.x": {Transport.ALL_GATHER}})
    assert table.extend({"tp.x": {Transport.ALL_GATHER}}).rows == table.rows
    with pytest.raises(ValueError, match="already registered for all_gather"):
        table.extend({"tp.x": {Transport.ALL_REDUCE}})


def test_the_default_rows_cannot_be_written_to() -> None:
    with pytest.raises(TypeError):
        DEFAULT_ROLES.rows["fsdp.x"] = frozenset()  # type: ignore[index]
    assert RoleTable().rows == DEFAULT_ROLES.rows


def test_codes_are_unique_and_read_only() -> None:
    assert len({c.slug for c in CODES.values()}) == len(CODES)
    assert all(key == code.id and len(key) == 5 and key.startswith("CI") for key, code in CODES.items())
    assert all(c.text and c.remedy and c.severity in ("info", "warning", "error") for c in CODES.values())
    with pytest.raises(TypeError):
        CODES["CI999"] = CODES["CI001"]  # type: ignore[index]
