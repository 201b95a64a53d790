"""Preserve, combine, drop: the algebra of merging identities."""

from __future__ import annotations

from itertools import permutations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from collective_identity import (
    DEFAULT_ROLES,
    GRAD_REDUCE_SHARD,
    GRAD_REPLICATE_REDUCE,
    PARAM_UNSHARD,
    Identity,
    Source,
    Transport,
    codes,
    combine,
)
from collective_identity.merge import merge_outcome, replacement_outcome, split_outcome
from tests.graphs import identity

_names = st.none() | st.sampled_from(["a", "b"])
_identities = st.builds(
    Identity,
    version=st.just(1),
    role=st.sampled_from([PARAM_UNSHARD, GRAD_REDUCE_SHARD, "tp.x"]),
    source=st.sampled_from(list(Source)),
    producer=st.sampled_from(["p", "q"]),
    group=_names,
    param_group=_names,
    params=st.none() | st.lists(st.sampled_from(["w0", "w1", "w2"]), max_size=3).map(tuple),
)
_members = st.lists(st.none() | _identities, min_size=1, max_size=5)
_same_role = st.lists(
    _identities.map(lambda i: Identity(1, PARAM_UNSHARD, i.source, i.producer, i.group, i.param_group, i.params)),
    min_size=1,
    max_size=5,
)


@settings(max_examples=200, deadline=None)
@given(_members | _same_role, st.randoms(use_true_random=False))
def test_order_does_not_matter(members: list[Identity | None], random: object) -> None:
    shuffled = list(members)
    random.shuffle(shuffled)  # type: ignore[attr-defined]
    assert combine(shuffled, producer="pass") == combine(members, producer="pass")


@settings(max_examples=200, deadline=None)
@given(_members | _same_role, _members | _same_role, _members | _same_role)
def test_nesting_does_not_matter(a: list[Identity | None], b: list[Identity | None], c: list[Identity | None]) -> None:
    def join(*parts: Identity | None) -> Identity | None:
        return combine(parts, producer="pass")

    left = join(join(*a, *b), join(*c))
    right = join(join(*a), join(*b, *c))
    assert left == right == join(*a, *b, *c)


@settings(max_examples=200, deadline=None)
@given(_members | _same_role)
def test_idempotent_and_honest(members: list[Identity | None]) -> None:
    merged = combine(members, producer="pass")
    assert combine([merged, merged], producer="pass") == merged
    if merged is None:
        assert None in members or len({m.role for m in members if m}) > 1
        return
    present = [m for m in members if m is not None]
    assert len(present) == len(members), "a member without identity was overlooked"
    assert {m.role for m in present} == {merged.role}, "a role was invented"
    assert merged.explicit == all(m.explicit for m in present), "the source was raised or lowered"
    assert merged.producer == "pass" and merged.version == 1
    assert merged.group in {m.group for m in present} | {None}
    assert (merged.params is None) == any(m.params is None for m in present)
    if merged.params is not None:
        assert list(merged.params) == sorted({p for m in present for p in m.params or ()})


def test_a_full_bucket() -> None:
    members = [
        identity(PARAM_UNSHARD, group="g", param_group="layers.0", params=("b", "a")),
        identity(PARAM_UNSHARD, group="g", param_group="layers.1", params=("c",)),
    ]
    assert combine(members, producer="bucketing") == identity(
        PARAM_UNSHARD, producer="bucketing", group="g", params=("a", "b", "c")
    )


def test_no_members() -> None:
    with pytest.raises(ValueError, match="at least one"):
        combine([], producer="pass")
    with pytest.raises(ValueError, match="at least one"):
        combine(iter(()), producer="pass")


def test_one_inferred_member_makes_it_inferred() -> None:
    explicit = identity(PARAM_UNSHARD)
    for order in permutations([explicit, explicit, explicit.inferred()]):
        merged = combine(order, producer="pass")
        assert merged is not None and merged.source is Source.INFERRED


F, T = identity(GRAD_REDUCE_SHARD), identity("tp.output_reduce_scatter")


@pytest.mark.parametrize(
    ("members", "role", "code"),
    [
        ([F, F], GRAD_REDUCE_SHARD, None),
        ([F, T], None, codes.DROPPED_MIXED),
        ([T, F], None, codes.DROPPED_MIXED),
        ([F, None], None, codes.DROPPED_MIXED),
        ([None, F], None, codes.DROPPED_MIXED),
        ([None, None], None, None),
    ],
)
def test_a_merge_and_the_name_of_its_loss(
    members: list[Identity | None], role: str | None, code: codes.Code | None
) -> None:
    outcome = merge_outcome(members, producer="dedup")
    assert (outcome.identity and outcome.identity.role) == role
    assert outcome.code is code
    assert bool(outcome.detail) == (code is not None)


def test_replacement() -> None:
    unshard = identity(PARAM_UNSHARD, params=("w",))
    kept = replacement_outcome(unshard, Transport.ALL_GATHER, producer="low_contention")
    assert kept.identity == unshard and kept.code is None
    for became in (None, Transport.ALL_REDUCE):
        lost = replacement_outcome(unshard, became, producer="fusion")
        assert lost.identity is None and lost.code is codes.DROPPED_OPAQUE and "fusion" in lost.detail
    assert replacement_outcome(None, None, producer="fusion").code is None
    assert replacement_outcome(T, Transport.BROADCAST, producer="p").identity == T, "open roles fit any transport"
    assert DEFAULT_ROLES.allows(T.role, Transport.BROADCAST)


def test_split() -> None:
    reduce = identity(GRAD_REPLICATE_REDUCE)
    parts = split_outcome(
        reduce, Transport.ALL_REDUCE, [Transport.REDUCE_SCATTER, None, Transport.ALL_GATHER], producer="decomp"
    )
    assert [p.identity for p in parts] == [None, None, None]
    assert [p.code for p in parts] == [codes.DROPPED_DECOMPOSED, None, codes.DROPPED_DECOMPOSED]
    chunks = split_outcome(reduce, Transport.ALL_REDUCE, [Transport.ALL_REDUCE] * 2, producer="chunk")
    assert [p.identity for p in chunks] == [reduce, reduce]
    open_role = split_outcome(T, Transport.REDUCE_SCATTER, [Transport.ALL_TO_ALL], producer="decomp")
    assert open_role[0].code is codes.DROPPED_DECOMPOSED
    assert split_outcome(None, Transport.ALL_REDUCE, [Transport.ALL_GATHER], producer="d")[0].code is None
