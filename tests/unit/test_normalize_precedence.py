"""Which of several payloads beside one collective counts, and what is said of those that do not."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import fx

from collective_identity import (
    DEFAULT_ROLES,
    PARAM_UNSHARD,
    Transport,
    absence_of,
    classify,
    classify_report,
    codes,
    collective_table,
    identity_of,
    normalize,
    plan_normalization,
    store,
)
from collective_identity.transports import WAIT
from tests.graphs import Builder, annotate, aten, identity, payload

UNSHARD = payload(PARAM_UNSHARD)


def _two_waits(*payloads: dict[str, Any] | None, own: dict[str, Any] | None = None) -> tuple[fx.GraphModule, fx.Node]:
    """A gather of two inputs' sum, which structure takes for nobody's, with as many waits as payloads."""
    b = Builder()
    start = b.call(aten.add.Tensor, b.placeholder("x"), b.placeholder("y"))
    start = b.call(torch.ops._c10d_functional.all_gather_into_tensor.default, start, 2, "dp")
    waits = [b.call(WAIT, start) for _ in payloads]
    b.output(*waits)
    for node, said in zip([start, *waits], [own, *payloads], strict=True):
        if said is not None:
            annotate(node, said)
    return b.module(), start


INFERRED = UNSHARD | {"source": "inferred"}
TP = payload("tp.activation_gather")


@pytest.mark.parametrize("order", [1, -1])
@pytest.mark.parametrize("guess", [INFERRED, TP | {"source": "inferred"}])
def test_an_explicit_payload_goes_before_inferred_ones(order: int, guess: dict[str, Any]) -> None:
    gm, start = _two_waits(*[UNSHARD, guess][::order])
    assert classify(gm)[start] == identity(PARAM_UNSHARD)
    assert normalize(gm) and identity_of(start) == identity(PARAM_UNSHARD) and not normalize(gm)


def test_an_explicit_payload_replaces_the_starts_own_guess_and_nothing_else_of_it() -> None:
    gm, start = _two_waits(UNSHARD, own=TP | {"source": "inferred"})
    assert classify(gm)[start] == identity(PARAM_UNSHARD)
    assert normalize(gm) and identity_of(start) == identity(PARAM_UNSHARD)

    gm, start = _two_waits(UNSHARD, own=TP)
    assert classify(gm)[start] == identity("tp.activation_gather"), "explicit as well: its own"

    gm, start = _two_waits(UNSHARD, own=payload("fsdp.grad_reduce_shard"))
    assert normalize(gm) and identity_of(start) is None, "a malformed one is the start's own too"

    gm, start = _two_waits(UNSHARD, own=TP | {"source": "inferred"})
    store.set_members(start, store.BucketRecord("bucketing", ()))
    assert normalize(gm)
    found = identity_of(start)
    assert found is not None and not found.explicit, "what members of a bucket were is no guess of this node's"


def test_the_order_of_parameter_names_says_nothing() -> None:
    gm, start = _two_waits(UNSHARD | {"params": ["a", "b"]}, UNSHARD | {"params": ["b", "a"]})
    assert normalize(gm) and identity_of(start) == identity(PARAM_UNSHARD, params=("a", "b"))
    gm, start = _two_waits(UNSHARD | {"params": ["a", "b"]}, UNSHARD | {"params": ["a"]})
    assert normalize(gm) and identity_of(start) is None


@pytest.mark.parametrize(
    ("payloads", "code", "says"),
    [
        ((payload("fsdp.grad_reduce_shard"),), codes.ROLE_TRANSPORT, "expects reduce_scatter, found all_gather"),
        ((UNSHARD | {"group": "tp"}, None), codes.GROUP_MISMATCH, "names group 'tp'"),
        ((UNSHARD, TP), codes.AMBIGUOUS_PAYLOAD, "2 nodes beside"),
    ],
)
def test_a_payload_that_fits_nowhere_is_not_one_that_never_was(payloads: Any, code: codes.Code, says: str) -> None:
    gm, start = _two_waits(*payloads)
    before = classify_report(gm).absences[start]
    assert (before.kind, before.code, before.pass_name) == ("dropped", code, "normalize") and says in before.detail
    plan = plan_normalization(gm)
    assert list(plan.refused) == [start] and plan.summary()["refused"] == 1
    assert normalize(gm) and not normalize(gm)
    assert absence_of(start) == before == classify_report(gm).absences[start]


def test_copies_of_what_counts_are_no_loss() -> None:
    gm, start = _two_waits(UNSHARD, UNSHARD)
    assert plan_normalization(gm).summary() == {"moved_payload": 1, "removed_payload": 1}
    gm, start = _two_waits(UNSHARD, TP, own=UNSHARD)
    assert plan_normalization(gm).summary() == {"removed_payload": 2} and absence_of(start) is None
    gm, start = _two_waits(payload("fsdp.grad_reduce_shard"), UNSHARD)
    assert not plan_normalization(gm).refused
    assert normalize(gm) and identity_of(start) == identity(PARAM_UNSHARD)


def test_a_namespaces_owner_has_the_last_word() -> None:
    owned = DEFAULT_ROLES.extend({"tp.activation_gather": {Transport.REDUCE_SCATTER}})
    gm, start = _two_waits(TP)
    assert classify(gm)[start] == identity("tp.activation_gather")
    assert classify(gm, roles=owned)[start] is None and not plan_normalization(gm, roles=owned).moves
    assert normalize(gm, roles=owned) and identity_of(start) is None
    absence = absence_of(start)
    assert absence is not None and absence.code is codes.ROLE_TRANSPORT

    gm, start = _two_waits(None, own=TP)
    assert identity_of(start) is not None and identity_of(start, roles=owned) is None
    found = absence_of(start, roles=owned)
    assert found is not None and found.kind == "malformed"
    assert normalize(gm, roles=owned) and not normalize(gm, roles=owned)
    (row,) = collective_table(gm)
    assert identity_of(start) is None and row.absence == "dropped", "whoever reads it needs no table"


def test_a_backward_payload_in_forward_says_so() -> None:
    gm, start = _two_waits(None)
    start.meta["custom"] = {store.BACKWARD_KEY: UNSHARD}
    absence = absence_of(start)
    assert absence is not None and (absence.kind, absence.code) == ("malformed", codes.BACKWARD_ONLY)
