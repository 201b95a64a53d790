"""Keys and values that lie or raise when they are compared, hashed or named: absent, written past, nothing raises."""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping
from typing import Any

import pytest
from torch import fx

from collective_identity import (
    PARAM_UNSHARD,
    absence_of,
    classify_report,
    clear,
    codes,
    collective_table,
    digest,
    identity_of,
    normalize,
    parse,
    payload_digest,
    plan_normalization,
    stamp,
    store,
)
from tests.graphs import Builder, Collective, identity, payload

VALID = payload(PARAM_UNSHARD)


class Key:
    """Hashes like another key and, once armed, raises when it is compared."""

    def __init__(self, like: str) -> None:
        self.like, self.armed = hash(like), False

    def __hash__(self) -> int:
        return self.like

    def __eq__(self, other: object) -> bool:
        if self.armed:
            raise RuntimeError("compared")
        return False


class Fickle(Key):
    """A key that raises when it is hashed, too."""

    def __hash__(self) -> int:
        if self.armed:
            raise RuntimeError("hashed")
        return self.like


class Sub(dict):  # type: ignore[type-arg]
    """A dict that shows nothing of what it holds."""

    def __contains__(self, key: object) -> bool:
        raise RuntimeError

    get = __getitem__ = __iter__ = items = keys = __contains__  # type: ignore[assignment]


def _graph() -> tuple[fx.GraphModule, Collective]:
    b = Builder()
    gathered = b.all_gather(b.placeholder("w"))
    b.output(gathered.wait)
    return b.module(), gathered


QUESTIONS: Mapping[str, Callable[[fx.GraphModule, fx.Node], Any]] = {
    "identity_of": lambda gm, node: identity_of(node),
    "absence_of": lambda gm, node: absence_of(node),
    "classify_report": lambda gm, node: classify_report(gm),
    "collective_table": lambda gm, node: collective_table(gm),
    "plan_normalization": lambda gm, node: plan_normalization(gm),
    "digest": lambda gm, node: digest(gm),
    "payload_digest": lambda gm, node: payload_digest(gm),
    "normalize": lambda gm, node: normalize(gm),
    "store.dropped_of": lambda gm, node: store.dropped_of(node),
}


@pytest.mark.parametrize("place", ["start", "wait"])
@pytest.mark.parametrize("kind", [dict, Sub], ids=["dict", "subclass"])
@pytest.mark.parametrize("key", [Key, Fickle], ids=["compared", "hashed"])
@pytest.mark.parametrize("field", [None, "version", "role", "group", "params"])
def test_a_key_that_raises(field: str | None, key: type[Key], kind: Any, place: str) -> None:
    gm, gathered = _graph()
    node = gathered.start if place == "start" else gathered.wait
    odd = key(store.KEY if field is None else field)
    if field is None:
        node.meta["custom"] = kind({odd: 1, "mine": 2, store.KEY: VALID})
    else:
        node.meta["custom"] = {"mine": 2, store.KEY: kind({odd: 1, **VALID})}
    odd.armed = True
    for ask in QUESTIONS.values():
        ask(gm, node)
    assert identity_of(gathered.start) is None
    if place == "start":
        absence = absence_of(node)
        assert absence is not None and (absence.kind, absence.code) == ("malformed", codes.WRONG_TYPE)
        assert absence.detail == "reading the payload raised RuntimeError"
        assert classify_report(gm).absences[node] == absence
    else:
        assert not store.has_payload(node), "normalised away"

    stamp(gathered.start, identity(PARAM_UNSHARD))
    assert identity_of(gathered.start) == identity(PARAM_UNSHARD)
    store.drop(gathered.start, codes.DROPPED_MIXED, "test")
    assert (absence := absence_of(gathered.start)) is not None and absence.code is codes.DROPPED_MIXED
    clear(gathered.start)
    assert absence_of(gathered.start) == store.NEVER_HAD
    assert node.meta["custom"] == {"mine": 2}, "the plain keys of others stay"


def test_writing_past_a_key_that_never_collides_keeps_it() -> None:
    gm, gathered = _graph()
    odd = Key("another key")
    gathered.start.meta["custom"] = {odd: 1, store.KEY: VALID}
    odd.armed = True
    assert identity_of(gathered.start) == identity(PARAM_UNSHARD)
    clear(gathered.start)
    assert list(gathered.start.meta["custom"]) == [odd]


class Int(int):
    """Any number, equal to every other."""

    __hash__ = int.__hash__

    def __eq__(self, other: object) -> bool:
        return True

    def __ne__(self, other: object) -> bool:
        return False


class Text(str):
    """Any text, equal to every other."""

    __hash__ = str.__hash__

    def __eq__(self, other: object) -> bool:
        return True

    def split(self, *args: Any) -> list[str]:  # type: ignore[override]
        return ["tp", "anything"]


class Role(str, enum.Enum):
    """A member that is a str."""

    UNSHARD = PARAM_UNSHARD


class Nameless(type):
    """The type of types that have no name."""

    @property
    def __name__(cls) -> str:  # type: ignore[override]
        raise RuntimeError


class Unnamed(metaclass=Nameless):
    """Raises when its type is named."""


class Refusal(Exception, metaclass=Nameless):
    """An error whose type has no name to tell."""


class Raising(dict):  # type: ignore[type-arg]
    """A value that a reader must not ask."""

    def __repr__(self) -> str:
        raise Refusal


LIES: Mapping[str, tuple[str, Any, codes.Code]] = {
    "an int that equals every version": ("version", Int(99), codes.WRONG_TYPE),
    "an int of the right version": ("version", Int(1), codes.WRONG_TYPE),
    "a str that reads as another role": ("role", Text("fsdp.nothing"), codes.WRONG_TYPE),
    "a str enum": ("role", Role.UNSHARD, codes.WRONG_TYPE),
    "a str that is every source": ("source", Text("guess"), codes.WRONG_TYPE),
    "a str of a producer": ("producer", Text("p"), codes.WRONG_TYPE),
    "a str that is every group": ("group", Text("tp"), codes.WRONG_TYPE),
    "a str of a unit": ("param_group", Text("unit"), codes.WRONG_TYPE),
    "a name among names": ("params", ["w", Text("v")], codes.WRONG_TYPE),
    "a value whose type has no name": ("role", Unnamed(), codes.WRONG_TYPE),
    "a value that raises": ("producer", Raising(), codes.WRONG_TYPE),
    "a shouted namespace": ("role", "FSDP.param_unshard", codes.BAD_ROLE),
    "a capitalised namespace": ("role", "Fsdp.anything", codes.BAD_ROLE),
}


@pytest.mark.parametrize("lie", LIES)
def test_a_value_that_lies_counts_as_absent(lie: str) -> None:
    field, value, code = LIES[lie]
    gm, gathered = _graph()
    gathered.start.meta["custom"] = {store.KEY: VALID | {field: value}}
    absence = absence_of(gathered.start)
    assert absence is not None and (absence.kind, absence.code) == ("malformed", code)
    for ask in QUESTIONS.values():
        ask(gm, gathered.start)
    assert not classify_report(gm).identities[gathered.start].explicit  # type: ignore[union-attr]


def test_a_payload_of_a_type_without_a_name() -> None:
    assert parse(Unnamed()).code is codes.WRONG_TYPE


def test_a_registered_role_cannot_be_in_the_fsdp_namespace_in_another_case() -> None:
    from collective_identity import DEFAULT_ROLES, Transport

    with pytest.raises(ValueError, match="cannot be changed"):
        DEFAULT_ROLES.extend({"FSDP.mine": {Transport.ALL_GATHER}})
