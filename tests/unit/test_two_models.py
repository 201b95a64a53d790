"""Two models of one class in one session: each has its own declaration, and each graph is known by its parameters."""

from __future__ import annotations

import contextlib
import gc
from typing import Any

import pytest
import torch
from torch import nn

import collective_identity as ci
import fsdp_hooks
import inductor_passes  # noqa: F401  (makes the backend known)
from collective_identity.declared import Declared
from collective_identity.reporting.records import ExpectedRecord, GraphRecord
from tests.unit.rows import expectation
from tests.unit.sharded import Model, sharded

pytestmark = pytest.mark.usefixtures("fake_world")

DATA = torch.ones(2, 8)


def frozen() -> Model:
    model = sharded()
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    return model


def distilled(teacher: Model, student: Model, *, left_out: str = "", batches: tuple[int, ...] = (2,)) -> dict[str, Any]:
    """Installed in this order, trained, with one of the two not compiled."""
    torch._dynamo.reset()
    with ci.enable():
        calls = {}
        for name, model in (("teacher", teacher), ("student", student)):
            fsdp_hooks.install(model)
            options = {"inner": "aot_eager"}
            compiled = torch.compile(model, backend="collective_identity", options=options, dynamic=False)
            calls[name] = model if name == left_out else compiled
        grad = any(parameter.requires_grad for parameter in teacher.parameters())
        for rows in batches:
            with contextlib.nullcontext() if grad else torch.no_grad():
                wanted = calls["teacher"](torch.ones(rows, 8))
            (calls["student"](torch.ones(rows, 8)) - wanted).square().sum().backward()
        graphs = [r for r in ci.session.ensure().ledger.records() if isinstance(r, GraphRecord)]
        return {**ci.report().to_dict(), "modules": {record.modules for record in graphs}}


@pytest.mark.parametrize("which", ["frozen teacher", "student not resharded"])
def test_each_is_compared_with_its_own_declaration(which: str) -> None:
    teacher = frozen() if which == "frozen teacher" else sharded(reshard_after_forward=which[:7] == "student")
    report = distilled(teacher, sharded(reshard_after_forward=which[:7] != "student"))
    assert report["failures"] == [] and report["modules"] == {("FSDPModel",), ("FSDPModel (2)",)}
    assert report["collectives"]["expected"][ci.PARAM_UNSHARD]["forward"] == 10
    assert report["counts"]["not_captured"] == 0


def test_a_whole_model_outside_every_graph_is_named() -> None:
    """Recompiles of the other one do not stand for it."""
    report = distilled(sharded(), sharded(), left_out="student", batches=(2, 3))
    (failure,) = report["failures"]
    assert failure.startswith("CI040 not_captured: FSDPModel (2): expected 10 collectives in a step")


def test_the_same_model_keeps_its_name_and_one_that_is_gone_leaves_it() -> None:
    known, first = Declared(), nn.Linear(1, 1)
    assert known.named(expectation("Linear"), first)[0].model == "Linear"
    second = nn.Linear(1, 1)
    said, name = known.named(expectation("Linear, some gradients not reduced"), second)
    assert (said.model, name) == ("Linear (2), some gradients not reduced", "Linear (2)")
    assert known.named(said, second) == (said, name) and known.name(first) == "Linear"
    assert known.of([second.weight, torch.ones(1)]) == ("Linear (2)",)
    assert known.of([first.bias, second.weight]) == ("Linear", "Linear (2)")
    assert known.of([torch.ones(1)]) is None
    first.weight = second.weight
    assert known.of([second.weight, second.bias]) == ("Linear (2)",), "shared: tells of nobody"
    del first
    gc.collect()
    assert known.name(nn.Linear(1, 1)) == "Linear (3)", "graphs of the first are in the records"
    assert known.name(nn.Linear(1, 1)) == "Linear (3)", "never compiled, and gone"


def test_a_declaration_by_name_keeps_its_model() -> None:
    """As one who knows what backward saves declares again."""
    with ci.enable() as handle:
        model = fsdp_hooks.install(sharded())
        handle.session.declare(fsdp_hooks.expected_collectives(model, saved_for_backward=()))
        records = [r for r in handle.session.ledger.records() if isinstance(r, ExpectedRecord)]
    assert [(record.model, record.module) for record in records] == [("FSDPModel", "FSDPModel")] * 2


def test_a_session_takes_over_only_what_still_lives() -> None:
    """A model that was installed before `enable` is expected there; one that nobody holds any more is not."""
    gone, kept = fsdp_hooks.install(sharded()), fsdp_hooks.install(sharded())
    gone(DATA).sum().backward()
    del gone
    gc.collect()
    with ci.enable():
        compiled = torch.compile(kept, backend="collective_identity", options={"inner": "aot_eager"})
        compiled(DATA).sum().backward()
        report = ci.report().to_dict()
    assert report["failures"] == [] and report["collectives"]["expected"][ci.PARAM_UNSHARD]["forward"] == 5
