"""The pass manager: what a schedule must satisfy, which passes run when, and what an error says."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
from torch import fx

from collective_identity import GRAD_REDUCE_SHARD, PARAM_UNSHARD
from collective_identity.ledger import GraphLog, Ledger
from inductor_passes.contract import LiteBehaviour, PassContext, PassContract, PassOutcome
from inductor_passes.lite_mode import LiteState
from inductor_passes.manager import PassError, Pipeline, ScheduleError, role_counts, run_user_passes
from inductor_passes.options import BackendOptions
from tests.graphs import Builder


@dataclass
class Recorder:
    """A pass that notes that it ran, does `work`, and answers what it is told."""

    name: str
    lite: LiteBehaviour = LiteBehaviour.SKIP
    requires: frozenset[str] = frozenset()
    provides: frozenset[str] = frozenset()
    stage: str = "graph"
    outcome: PassOutcome = PassOutcome(changed=False)
    work: Callable[[fx.GraphModule], object] = lambda gm: None
    ran: list[str] = field(default_factory=list)

    @property
    def contract(self) -> PassContract:
        return PassContract(self.name, self.lite, self.requires, self.provides, self.stage)

    def __call__(self, gm: fx.GraphModule, context: PassContext) -> PassOutcome:
        self.ran.append(self.name)
        self.work(gm)
        return self.outcome


CONTEXT = PassContext(kind="backward", lite=LiteState.OFF, observe=False, options=BackendOptions(), log=None)
CHANGED = PassOutcome(changed=True)


def graph() -> fx.GraphModule:
    b = Builder()
    x = b.placeholder("x")
    gather = b.all_gather(x, role=PARAM_UNSHARD)
    reduce = b.reduce_scatter(gather.wait, role=GRAD_REDUCE_SHARD)
    other = b.all_reduce(reduce.wait, group="tp")
    b.output(other.wait)
    return b.module()


# ---- schedules ----


def test_a_need_that_nothing_before_provides() -> None:
    first = Recorder("first", provides=frozenset({"a"}))
    late = Recorder("late", requires=frozenset({"c", "b", "a"}))
    with pytest.raises(ScheduleError) as raised:
        Pipeline([first, late, Recorder("provider", provides=frozenset({"b", "c"}))])
    assert str(raised.value) == (
        "pass 'late' requires b, c, which none of ['first'] provides: put the pass that provides it before this one"
    )
    with pytest.raises(ScheduleError, match="requires a, b, c, which none of no pass provides"):
        Pipeline([late])


def test_two_passes_of_one_name() -> None:
    with pytest.raises(ScheduleError, match="^pass 'one' is scheduled twice: give each pass a name of its own$"):
        Pipeline([Recorder("one"), Recorder("two"), Recorder("one")])


def test_two_stages_in_one_pipeline() -> None:
    with pytest.raises(ScheduleError, match="^pass 'b' runs on the joint stage, 'a' on graph: schedule the stages"):
        Pipeline([Recorder("a"), Recorder("b", stage="joint")])


def test_a_schedule_that_holds() -> None:
    passes = [Recorder("a", provides=frozenset({"x"})), Recorder("b", requires=frozenset({"x"}))]
    assert Pipeline(passes).passes == tuple(passes)
    assert Pipeline([]).run(graph(), CONTEXT) is False


# ---- which passes run ----

READ_ONLY = [
    replace(CONTEXT, observe=True),
    replace(CONTEXT, lite=LiteState.FULL),
    replace(CONTEXT, lite=LiteState.PARTIAL),
    replace(CONTEXT, lite=LiteState.REGION),
]


@pytest.mark.parametrize("context", READ_ONLY, ids=lambda c: f"{c.lite.value}-{c.observe}")
def test_where_nothing_may_be_optimised_only_readers_and_capture_run(context: PassContext) -> None:
    ran: list[str] = []
    passes = [Recorder(behaviour.value, lite=behaviour, ran=ran) for behaviour in LiteBehaviour]
    Pipeline(passes).run(graph(), context)
    assert context.read_only
    assert ran == ["read_only", "capture"]


def test_otherwise_all_run_in_order() -> None:
    ran: list[str] = []
    passes = [Recorder(behaviour.value, lite=behaviour, ran=ran) for behaviour in LiteBehaviour]
    assert Pipeline(passes).run(graph(), CONTEXT) is False
    assert ran == ["skip", "read_only", "capture"]


@pytest.mark.parametrize(("outcomes", "changed"), [((), False), ((0,), True), ((1,), True), ((0, 1), True)])
def test_run_says_whether_any_pass_changed_the_graph(outcomes: tuple[int, ...], changed: bool) -> None:
    passes = [Recorder(str(i), outcome=PassOutcome(changed=i in outcomes)) for i in range(2)]
    assert Pipeline(passes).run(graph(), CONTEXT) is changed


# ---- errors ----


def fail(gm: fx.GraphModule) -> None:
    raise KeyError("w")


def break_order(gm: fx.GraphModule) -> None:
    """Leave a node before its own input."""
    first = next(n for n in gm.graph.nodes if n.op == "call_function")
    next(n for n in gm.graph.nodes if n.op == "placeholder").prepend(first)


def test_an_error_ends_with_graph_and_pass() -> None:
    with pytest.raises(PassError) as raised:
        Pipeline([Recorder("good"), Recorder("bad", work=fail)]).run(graph(), CONTEXT)
    assert str(raised.value) == "KeyError: 'w' (in the backward graph, pass 'bad')"
    assert isinstance(raised.value.__cause__, KeyError)


def test_an_invalid_graph_is_charged_to_the_pass_that_left_it() -> None:
    later = Recorder("later")
    with pytest.raises(PassError, match=r"\(in the backward graph, pass 'breaks'\)$"):
        Pipeline([Recorder("breaks", work=break_order, outcome=CHANGED), later]).run(graph(), CONTEXT)
    assert later.ran == []


def test_a_changed_graph_is_recompiled() -> None:
    def negate(gm: fx.GraphModule) -> None:
        output = gm.graph.output_node()
        with gm.graph.inserting_before(output):
            output.args = (gm.graph.call_function(torch.neg, (output.args[0],)),)

    plain = Builder()
    plain.graph.output(plain.placeholder("x"))
    gm = plain.module()
    assert Pipeline([Recorder("negate", work=negate, outcome=CHANGED)]).run(gm, CONTEXT) is True
    assert gm(torch.ones(1)).item() == -1


# ---- the log ----


def test_what_ran_is_recorded() -> None:
    """Name, time, and collectives by role before and after; a pass that did not run leaves no record."""
    ledger = Ledger(mode="optimize", run_dir=None, agreement_timeout=0)
    log: GraphLog = ledger.begin_graph("backward", "0/0", "test")

    def drop_other(gm: fx.GraphModule) -> None:
        output = gm.graph.output_node()
        wait = output.args[0][0]
        (start,) = wait.args
        output.args = ((start.args[0],),)
        gm.graph.erase_node(wait)
        gm.graph.erase_node(start)

    passes = [
        Recorder("look", lite=LiteBehaviour.READ_ONLY, outcome=PassOutcome(False, {"seen": 3})),
        Recorder("write", lite=LiteBehaviour.CAPTURE, work=drop_other, outcome=PassOutcome(True, {"dropped": 1})),
        Recorder("optimise"),
    ]
    Pipeline(passes).run(graph(), replace(CONTEXT, observe=True, log=log))
    look, write = [record for record in ledger.records() if type(record).__name__ == "PassRecord"]
    before = {PARAM_UNSHARD: 1, GRAD_REDUCE_SHARD: 1, "": 1}
    after = {PARAM_UNSHARD: 1, GRAD_REDUCE_SHARD: 1}
    facts: Any = [(r.name, r.changed, r.before, r.after, r.summary) for r in (look, write)]
    assert facts == [
        ("look", False, before, before, {"seen": 3}),
        ("write", True, before, after, {"dropped": 1}),
    ]
    assert 0 < look.seconds < 60 and 0 < write.seconds < 60


def test_role_counts() -> None:
    assert role_counts(graph()) == {PARAM_UNSHARD: 1, GRAD_REDUCE_SHARD: 1, "": 1}


# ---- the user's own passes ----


class Named:
    """A pass object, which has no ``__qualname__`` of its own."""

    def __call__(self, gm: fx.GraphModule) -> None:
        raise ValueError("no")


def test_user_passes_run_in_order_and_their_names_end_the_message() -> None:
    ran: list[int] = []
    gm = graph()
    run_user_passes(gm, [lambda g: ran.append(1), lambda g: ran.append(2)])
    assert ran == [1, 2]
    with pytest.raises(PassError, match=r"^ValueError: no \(in a pre_pass of the user, 'Named'\)$"):
        run_user_passes(gm, [Named()])
    with pytest.raises(PassError, match=r"\(in a pre_pass of the user, 'break_order'\)$"):
        run_user_passes(gm, [break_order])


@pytest.mark.parametrize("recompile", [True, False])
def test_code_is_generated_where_it_is_asked_for(recompile: bool) -> None:
    def negate(gm: fx.GraphModule) -> None:
        (output,) = gm.graph.find_nodes(op="output")
        with gm.graph.inserting_before(output):
            output.args = (gm.graph.call_function(torch.neg, (output.args[0],)),)

    gm = graph()
    before = gm.code
    assert Pipeline([Recorder("negate", work=negate, outcome=CHANGED)]).run(gm, CONTEXT, recompile=recompile)
    assert (gm.code != before) is recompile
