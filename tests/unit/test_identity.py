"""The validated view: one verdict for every payload, never an exception."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from collective_identity import (
    GRAD_REDUCE_SHARD,
    PARAM_UNSHARD,
    Identity,
    Source,
    Transport,
    codes,
    parse,
)
from tests.graphs import identity, payload

FULL = payload(PARAM_UNSHARD, group="7", param_group="layers.0", params=["layers.0.w", "layers.0.b"])


def test_a_valid_payload() -> None:
    verdict = parse(FULL, transport=Transport.ALL_GATHER, node_group="7")
    assert verdict.code is None and verdict.notes == () and verdict.detail == ""
    assert verdict.identity == Identity(
        1, PARAM_UNSHARD, Source.EXPLICIT, "test", "7", "layers.0", ("layers.0.w", "layers.0.b")
    )
    assert verdict.identity.to_payload() == FULL


def test_optional_fields_may_be_missing_or_none() -> None:
    bare = payload(PARAM_UNSHARD)
    nones = bare | {"group": None, "param_group": None, "params": None}
    assert parse(bare).identity == parse(nones).identity == identity(PARAM_UNSHARD)
    assert identity(PARAM_UNSHARD).to_payload() == bare


def test_unknown_fields_are_let_pass() -> None:
    assert parse(payload(PARAM_UNSHARD, colour="blue")).identity == identity(PARAM_UNSHARD)


def test_inferred_stays_inferred() -> None:
    verdict = parse(payload(PARAM_UNSHARD, source="inferred"), transport=Transport.ALL_GATHER)
    assert verdict.identity is not None and not verdict.identity.explicit
    assert identity(PARAM_UNSHARD).inferred() == verdict.identity


@pytest.mark.parametrize("missing", ["version", "role", "source", "producer"])
def test_missing_field(missing: str) -> None:
    raw = {k: v for k, v in FULL.items() if k != missing}
    verdict = parse(raw)
    assert verdict.identity is None and verdict.code is codes.MISSING_FIELD
    assert missing in verdict.detail


@pytest.mark.parametrize(
    ("change", "code"),
    [
        ({"version": "1"}, codes.WRONG_TYPE),
        ({"version": True}, codes.WRONG_TYPE),
        ({"version": 1.0}, codes.WRONG_TYPE),
        ({"version": 2}, codes.UNKNOWN_VERSION),
        ({"version": 0}, codes.UNKNOWN_VERSION),
        ({"role": None}, codes.WRONG_TYPE),
        ({"role": ["fsdp.param_unshard"]}, codes.WRONG_TYPE),
        ({"role": ""}, codes.BAD_ROLE),
        ({"role": "param_unshard"}, codes.BAD_ROLE),
        ({"role": "fsdp.param_unshards"}, codes.BAD_ROLE),
        ({"source": "guessed"}, codes.UNKNOWN_SOURCE),
        ({"source": "EXPLICIT"}, codes.UNKNOWN_SOURCE),
        ({"source": 1}, codes.WRONG_TYPE),
        ({"producer": None}, codes.WRONG_TYPE),
        ({"group": 7}, codes.WRONG_TYPE),
        ({"param_group": ["a"]}, codes.WRONG_TYPE),
        ({"params": "layers.0.w"}, codes.WRONG_TYPE),
        ({"params": ["a", 1]}, codes.WRONG_TYPE),
        ({"params": {"a"}}, codes.WRONG_TYPE),
        ({"role": GRAD_REDUCE_SHARD}, codes.ROLE_TRANSPORT),
        ({"group": "8"}, codes.GROUP_MISMATCH),
    ],
)
def test_malformed(change: dict[str, Any], code: codes.Code) -> None:
    verdict = parse(FULL | change, transport=Transport.ALL_GATHER, node_group="7")
    assert verdict.identity is None and verdict.code is code
    assert verdict.detail, "a refusal says what was expected and found"


@pytest.mark.parametrize("raw", [None, 1, "fsdp.param_unshard", [], (), object(), PARAM_UNSHARD.encode()])
def test_no_dict(raw: object) -> None:
    assert parse(raw).code is codes.WRONG_TYPE


def test_a_group_that_cannot_be_compared_is_noted() -> None:
    verdict = parse(FULL, transport=Transport.ALL_GATHER, node_group=None)
    assert verdict.identity is not None and verdict.notes == (codes.GROUP_UNVERIFIED,)
    assert parse(payload(PARAM_UNSHARD), transport=Transport.ALL_GATHER, node_group=None).notes == ()


def test_a_dict_with_behaviour_of_its_own_is_read_for_what_it_holds() -> None:
    class Hostile(dict):  # type: ignore[type-arg]
        def __contains__(self, key: object) -> bool:
            raise RuntimeError("no")

        __getitem__ = get = keys = items = __iter__ = __contains__  # type: ignore[assignment]

    class Names(list):  # type: ignore[type-arg]
        def __iter__(self) -> Any:
            return iter([1])

    assert parse(Hostile(FULL)) == parse(FULL)
    assert parse(FULL | {"params": Names(FULL["params"])}) == parse(FULL)


def test_the_view_shares_nothing_with_the_payload() -> None:
    raw = payload(PARAM_UNSHARD, params=["a"])
    view = parse(raw).identity
    assert view is not None
    raw["params"].append("b")
    out = view.to_payload()
    out["params"].append("c")
    assert view.params == ("a",) and view.to_payload()["params"] == ["a"]
    with pytest.raises(dataclasses.FrozenInstanceError):
        view.role = "x.y"  # type: ignore[misc]


_scalars = st.none() | st.booleans() | st.integers(-2, 3) | st.floats() | st.text(max_size=6) | st.binary(max_size=3)
_values = _scalars | st.lists(_scalars, max_size=3) | st.dictionaries(st.text(max_size=3), _scalars, max_size=2)
_fields = st.sampled_from([*FULL, "extra"])


@settings(max_examples=300, deadline=None)
@given(
    raw=_values | st.dictionaries(_fields, _values | st.sampled_from(list(FULL.values())), max_size=8),
    transport=st.none() | st.sampled_from(list(Transport)),
    group=st.none() | st.text(max_size=3),
)
def test_never_raises_and_is_either_valid_or_says_why(raw: object, transport: Any, group: str | None) -> None:
    verdict = parse(raw, transport=transport, node_group=group)
    assert (verdict.identity is None) == (verdict.code is not None)
    if verdict.identity is not None:
        again = parse(verdict.identity.to_payload(), transport=transport, node_group=group)
        assert again.identity == verdict.identity
