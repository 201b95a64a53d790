"""Two gathers of one shard under two roles become one in the compiled graph: it carries neither's word alone."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch._inductor.config as inductor_config
from torch import fx
from torch.fx.experimental.proxy_tensor import make_fx

import collective_identity as ci
from collective_identity import PARAM_UNSHARD, absence_of, codes, identity_of, stamp, start_nodes, store
from inductor_passes.equals import CSE, settle_equal_collectives
from inductor_passes.upstream import NonRecomputingPartitioner, without_common_subexpressions
from tests.graphs import identity

C = torch.ops._c10d_functional
OTHER = "tp.weight_gather"
FIRST = identity(PARAM_UNSHARD, params=("a",))


@pytest.fixture
def group(fake_world: int) -> str:
    return torch.distributed.new_group([0, 2]).group_name


def gathered(x: torch.Tensor, group: str) -> torch.Tensor:
    return C.wait_tensor(C.all_gather_into_tensor(x, 2, group))


def traced(group: str, *said: ci.Identity | None) -> fx.GraphModule:
    """As many gathers of one shard as identities, whose products are returned."""

    def f(w: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        for _ in said:
            x = (x @ gathered(w.t().t(), group).T).relu()
        return x

    gm = make_fx(f, tracing_mode="fake")(torch.randn(4, 8), torch.randn(8, 8))
    for node, one in zip(start_nodes(gm), said, strict=True):
        if one is not None:
            stamp(node, one)
    return gm


def left(gm: fx.GraphModule) -> fx.Node:
    """The one gather that torch's own elimination leaves."""
    (node,) = start_nodes(fx.GraphModule(gm, without_common_subexpressions(gm.graph)))
    return node


BOTH = [identity(PARAM_UNSHARD), identity(OTHER)]


@pytest.mark.parametrize("said", [BOTH, BOTH[::-1], [BOTH[0], None], [None, BOTH[0]], [*BOTH, None], [None, *BOTH]])
def test_the_one_that_stays_carries_no_word_that_another_denies(said: Any, group: str) -> None:
    gm = traced(group, *said)
    assert settle_equal_collectives(gm) == len(said)
    absence = absence_of(left(gm))
    assert absence is not None
    assert (absence.kind, absence.code, absence.pass_name) == ("dropped", codes.DROPPED_MIXED, CSE)
    assert set(ci.classify(gm).values()) == {None}


@pytest.mark.parametrize("turned", [False, True])
def test_one_role_is_kept_with_what_both_say(turned: bool, group: str) -> None:
    second = identity(PARAM_UNSHARD, params=("b",), param_group="layer")
    gm = traced(group, *([second, FIRST] if turned else [FIRST, second]))
    settle_equal_collectives(gm)
    kept = identity_of(left(gm))
    assert kept is not None and (kept.role, kept.params, kept.param_group) == (PARAM_UNSHARD, ("a", "b"), None)
    assert kept.explicit and kept.producer == CSE


@pytest.mark.parametrize("turned", [False, True])
def test_an_earlier_loss_is_not_hidden_by_one_that_never_had_an_identity(turned: bool, group: str) -> None:
    gm = traced(group, None, None)
    store.drop(start_nodes(gm)[turned], codes.DROPPED_OPAQUE, "an earlier pass")
    settle_equal_collectives(gm)
    assert (absence := absence_of(left(gm))) is not None and absence.code is codes.DROPPED_OPAQUE


def test_equal_identities_are_left_alone(group: str) -> None:
    gm = traced(group, FIRST, FIRST)
    assert settle_equal_collectives(gm) == 0 and identity_of(left(gm)) == FIRST


def test_what_stays_apart_keeps_its_word(group: str) -> None:
    """Another input, another group, a result that is returned (torch keeps its own storage), another region."""
    other = torch.distributed.new_group([0, 2]).group_name

    def f(w: Any, v: Any, x: Any) -> Any:
        one, two, three = gathered(w, group), gathered(v, group), gathered(w, other)
        four = gathered(x, group)
        x = x.add_(1)
        return one.sum(), two.sum(), three.sum(), four.sum(), gathered(x, group).sum()

    gm = make_fx(f, tracing_mode="fake")(*(torch.randn(4, 8) for _ in range(3)))
    said = [identity(PARAM_UNSHARD, producer=f"p{i}") for i in range(5)]
    for node, one in zip(start_nodes(gm), said, strict=True):
        stamp(node, one)
    assert settle_equal_collectives(gm) == 0
    assert [identity_of(node) for node in start_nodes(gm)] == said
    assert not any("collective_identity.equals" in node.meta for node in gm.graph.nodes)


def test_a_gather_whose_result_is_returned_stays_apart(group: str) -> None:
    gm = make_fx(lambda w: (gathered(w, group), gathered(w, group)), tracing_mode="fake")(torch.randn(4, 8))
    for node, one in zip(start_nodes(gm), BOTH, strict=True):
        stamp(node, one)
    count = len(start_nodes(fx.GraphModule(gm, without_common_subexpressions(gm.graph))))
    settle_equal_collectives(gm)
    assert [identity_of(node) for node in start_nodes(gm)] == (BOTH if count == 2 else [None, None])


@pytest.fixture(params=["optimize", "observe"])
def session(request: pytest.FixtureRequest) -> Iterator[ci.Handle]:
    torch._dynamo.reset()
    with ci.enable(mode=request.param, agreement_timeout=0) as opened:
        yield opened


@pytest.mark.parametrize("roles", [(PARAM_UNSHARD, OTHER), (OTHER, PARAM_UNSHARD)])
def test_in_a_compile(
    session: ci.Handle, roles: tuple[str, str], group: str, caplog: pytest.LogCaptureFixture
) -> None:
    def f(w: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        with ci.role_scope(roles[0], producer="p"):
            one = gathered(w, group)
        with ci.role_scope(roles[1], producer="p"):
            two = gathered(w, group)
        return ((x @ one) @ two.T).sin().sum()

    compiled = torch.compile(f, backend="collective_identity", fullgraph=True, options={"inner": "aot_eager"})
    compiled(torch.randn(4, 8), torch.randn(3, 8, requires_grad=True)).backward()
    (graph,) = [one for one in session.report().to_dict()["graphs"] if one["phase"] == "forward"]
    assert not set(graph["after"]) & set(roles)
    assert f"CI030 mixed: {codes.DROPPED_MIXED.text}" in caplog.text and f"pass {CSE}" in caplog.text


def test_one_that_backward_needs_and_one_that_it_does_not(session: ci.Handle, group: str) -> None:
    """Whether torch merges them depends on its version; what is reported does as well."""

    def f(w: torch.Tensor, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        with ci.role_scope(PARAM_UNSHARD, producer="p"):
            one = gathered(w, group)
        with ci.role_scope(OTHER, producer="p"):
            two = gathered(w, group)
        return (x @ one).sin().sum(), two.cos().sum()

    compiled = torch.compile(f, backend="collective_identity", fullgraph=True, options={"inner": "aot_eager"})
    compiled(torch.randn(4, 8), torch.randn(3, 8, requires_grad=True))[0].backward()
    (graph,) = [one for one in session.report().to_dict()["graphs"] if one["phase"] == "forward"]
    if torch.__version__ >= "2.14":
        assert graph["after"] == {PARAM_UNSHARD: 1, OTHER: 1}
    else:
        assert not set(graph["after"]) & {PARAM_UNSHARD, OTHER} and sum(graph["after"].values()) == 1


@pytest.mark.parametrize("partitioner", ["min-cut", "the user's"])
def test_only_a_partitioner_that_is_known_to_merge_settles(partitioner: str, group: str) -> None:
    gm = traced(group, *BOTH)
    fn = None if partitioner == "min-cut" else NonRecomputingPartitioner()
    with inductor_config.patch(custom_partitioner_fn=fn):
        assert settle_equal_collectives(gm) == (2 if fn is None else 0)
        assert settle_equal_collectives(traced(group, *BOTH), inductor=False) == 2, "Inductor's option is not asked"
    assert [identity_of(node) for node in start_nodes(gm)] == ([None, None] if fn is None else BOTH)


def test_strict_lite_merges_nothing_and_says_so(group: str, caplog: pytest.LogCaptureFixture) -> None:
    def f(w: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        with ci.role_scope(PARAM_UNSHARD, producer="p"):
            one = gathered(w, group)
        with ci.role_scope(OTHER, producer="p"):
            two = gathered(w, group)
        return ((x @ one) @ two.T).sin().sum()

    torch._dynamo.reset()
    with ci.enable(agreement_timeout=0) as opened:
        compiled = torch.compile(f, backend="collective_identity", fullgraph=True, options={"strict_lite": True})
        compiled(torch.randn(4, 8), torch.randn(3, 8, requires_grad=True)).backward()
        graphs = opened.report().to_dict()["graphs"]
    assert [(one["phase"], one["lite"]) for one in graphs] == [(p, "full") for p in ("joint", "forward", "backward")]
    assert graphs[1]["after"] == {PARAM_UNSHARD: 1, OTHER: 1}
    assert "CI030" not in caplog.text
