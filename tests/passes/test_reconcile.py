"""Upstream's passes as they are, with every switch on: no collective ends with a wrong, spread or aliased identity."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Iterator

import pytest
from torch import fx

import collective_identity as ci
from collective_identity import GRAD_REDUCE_SHARD, PARAM_UNSHARD, absence_of, codes, identity_of, members_of, store
from collective_identity.debugify import STAMPS, Kind, debugify
from collective_identity.debugify.stamps import stamp_all
from inductor_passes.reconcile import reconciled
from inductor_passes.upstream_passes import upstream_passes
from tests.graphs import Builder, Collective, aten, counting_edges
from tests.passes.upstream_graphs import GRAPHS, SIZE, as_on_gpus, finished, gram, tensor_parallel, world

pytestmark = pytest.mark.usefixtures("fake_world")

PASSES = sorted(upstream_passes())
WRONG = (Kind.SPREAD, Kind.ALIAS, Kind.ARBITRARY_MERGE, Kind.DUPLICATE, Kind.TRANSPORT_MISMATCH, Kind.SOURCE_UPGRADE)
ONE_BY_ONE = ("low_contention", "overlap", "post_grad")
ALLOWED_LOSSES = {codes.DROPPED_MIXED, codes.DROPPED_OPAQUE, codes.DROPPED_DECOMPOSED}


@pytest.fixture(autouse=True)
def _gpus() -> Iterator[None]:
    with as_on_gpus():
        yield


def within(name: str) -> Callable[[fx.GraphModule], None]:
    """One of upstream's passes, inside `reconciled`."""

    def run(gm: fx.GraphModule) -> None:
        with reconciled(gm):
            upstream_passes()[name](gm)

    return run


@pytest.mark.parametrize("graph", sorted(GRAPHS))
@pytest.mark.parametrize("name", PASSES)
def test_nothing_ends_wrong(name: str, graph: str) -> None:
    report = debugify({name: within(name)}, GRAPHS[graph]())
    assert not [(f.kind, f.nodes, f.detail) for _, f in report.faults], str(report)


@pytest.mark.parametrize("graph", sorted(GRAPHS))
@pytest.mark.parametrize("name", PASSES)
def test_upstream_alone_ends_wrong(name: str, graph: str) -> None:
    """The same inputs without us, each pass: what the tests above would find if nothing were put right.

    A pass that changes the graph is wrong for some identities. Those in `ONE_BY_ONE` are not, as long as they only
    move collectives or replace each by another form of it.
    """
    report = debugify({name: upstream_passes()[name]}, GRAPHS[graph]())
    if any(one.changed for one in report.passes):
        gm = GRAPHS[graph]()
        before = len(ci.start_nodes(gm))
        upstream_passes()[name](gm)
        only_one_by_one = name in ONE_BY_ONE and len(ci.start_nodes(gm)) == before
        assert bool(report.faults) != only_one_by_one or name == "overlap" and report.faults, str(report)


@pytest.mark.parametrize("name", PASSES)
def test_every_pass_has_something_to_do(name: str) -> None:
    """The two tests above look at each pass at work."""
    assert any(one.changed for g in GRAPHS.values() for one in debugify({name: upstream_passes()[name]}, g()).passes)


@pytest.mark.parametrize("stamp", sorted(STAMPS))
@pytest.mark.parametrize("graph", sorted(GRAPHS))
def test_counts_per_role(graph: str, stamp: str) -> None:
    """Every identity is still there, was combined, or is recorded under a code of the contract."""
    gm = GRAPHS[graph]()
    origins = stamp_all(gm, stamp)
    said: list[tuple[object, str]] = []
    with reconciled(gm, lambda code, **facts: said.append((code, facts["role"]))) as done:
        upstream_passes()["post_grad"](gm)
    assert {code for code, _ in said} <= ALLOWED_LOSSES
    assert [(code, role) for code, _, role in done.lost] == said
    carried = [p for node in ci.start_nodes(gm) if (found := identity_of(node)) for p in found.params or ()]
    lost = {role for _, role in said}
    for origin in origins.values():
        if origin.identity is not None:
            (name,) = origin.identity.params or ()
            assert carried.count(name) == 1 or origin.identity.role in lost, origin


def pair(*roles: str | None) -> tuple[Builder, list[Collective]]:
    b = Builder()
    shards = [b.placeholder(f"p{i}", (8, 8)) for i in range(len(roles))]
    return b, [
        b.all_gather(shard, group=world(), size=SIZE, role=role, params=(f"p{i}",))
        for i, (shard, role) in enumerate(zip(shards, roles, strict=True))
    ]


def test_a_bucket_carries_its_members() -> None:
    b, made = pair(PARAM_UNSHARD, PARAM_UNSHARD, PARAM_UNSHARD)
    b.output(*(one.wait for one in made))
    gm = b.module()
    within("bucket_all_gathers")(gm)
    (bucket,) = ci.start_nodes(gm)
    found, record = identity_of(bucket), members_of(bucket)
    assert found is not None and record is not None
    assert (found.role, found.params, found.producer) == (
        PARAM_UNSHARD,
        ("p0", "p1", "p2"),
        "bucketing.bucket_all_gather",
    )
    assert [member.identity and member.identity.params for member in record.members] == [("p0",), ("p1",), ("p2",)]


def test_a_mixed_bucket_has_no_role_and_says_so() -> None:
    b, made = pair(PARAM_UNSHARD, "cp.kv_gather", None)
    b.output(*(one.wait for one in made))
    gm = b.module()
    within("bucket_all_gathers")(gm)
    (bucket,) = ci.start_nodes(gm)
    absence = absence_of(bucket)
    assert identity_of(bucket) is None and absence is not None
    assert (absence.kind, absence.code) == ("dropped", codes.DROPPED_MIXED)
    assert ci.classify(gm)[bucket] is None, "structure must not guess what a merge of roles is"


def test_a_bucket_of_a_bucket_keeps_every_member() -> None:
    b, made = pair(PARAM_UNSHARD, PARAM_UNSHARD, PARAM_UNSHARD)
    b.output(*(one.wait for one in made))
    gm = b.module()

    def merge(gm: fx.GraphModule, count: int) -> None:
        from torch._inductor.fx_passes import bucketing

        starts = ci.start_nodes(gm)[:count]
        with gm.graph.inserting_before(starts[-1].next):
            cat = gm.graph.call_function(aten.cat.default, ([start.args[0] for start in starts],))
            new = gm.graph.call_function(starts[0].target, (cat, SIZE, world()))  # type: ignore[arg-type]
            wait = gm.graph.call_function(bucketing.torch.ops._c10d_functional.wait_tensor.default, (new,))
        new.meta = cat.meta = wait.meta = starts[0].meta
        for start in starts:
            (old,) = start.users
            old.replace_all_uses_with(wait)
            gm.graph.erase_node(old)
            gm.graph.erase_node(start)

    with reconciled(gm):
        merge(gm, 2)
        merge(gm, 2)
    (bucket,) = ci.start_nodes(gm)
    record, found = members_of(bucket), identity_of(bucket)
    assert record is not None and found is not None
    assert sorted(member.name for member in record.members) == sorted(one.start.name for one in made)
    assert found.params == ("p0", "p1", "p2")


@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize("name", [name for name in PASSES if name != "post_grad"])  # 2.11's raises on such a graph
def test_waits_that_nobody_uses(name: str, count: int) -> None:
    """No use is handed on, so that nothing shows who took over; a bucket is not the first member's for that."""
    b = Builder()
    shards = [b.placeholder(f"p{i}", (8, 8)) for i in range(2 * count)]
    for shard in shards[:count]:
        b.all_gather(shard, group=world(), size=SIZE)
    for shard in shards[count:]:
        b.reduce_scatter(shard, group=world(), size=SIZE)
    report = debugify({name: within(name)}, finished(b, *shards))
    assert not [(f.kind, f.nodes, f.detail) for _, f in report.faults], str(report)


ROLES = (GRAD_REDUCE_SHARD, "tp.partial", None)


@pytest.mark.parametrize(("first", "second"), list(itertools.product(ROLES, repeat=2)))
def test_dedup(first: str | None, second: str | None) -> None:
    if "dedup_reduce_scatters" not in PASSES:
        assert not hasattr(__import__("torch")._inductor.config, "dedup_reduce_scatters")
        return
    b = Builder()
    waits = [
        b.reduce_scatter(b.placeholder(f"g{i}", (8, 8)), group=world(), size=SIZE, role=role).wait
        for i, role in enumerate((first, second))
    ]
    b.output(b.call(aten.add.Tensor, *waits))
    gm = b.module()
    within("dedup_reduce_scatters")(gm)
    (left,) = ci.start_nodes(gm)
    found, absence = identity_of(left), absence_of(left)
    if first == second:
        assert (found.role if found else None) == first
    else:
        assert found is None and absence is not None and absence.code is codes.DROPPED_MIXED


def test_a_fused_operator_says_what_it_swallowed() -> None:
    gm = tensor_parallel()
    stamp_all(gm, "different")
    within("micro_pipeline_tp")(gm)
    fused = [n for n in gm.graph.nodes if "fused" in str(n.target)]
    reasons = [absence_of(node) for node in fused]
    assert len(fused) == 2 and not ci.start_nodes(gm)
    assert all(a is not None and a.code is codes.DROPPED_OPAQUE for a in reasons)


def test_a_decomposed_gather_is_no_all_reduce_of_its_role() -> None:
    gm = gram()
    stamp_all(gm, "same")
    said: list[object] = []
    with reconciled(gm, lambda code, **facts: said.append((code, facts["role"]))):
        upstream_passes().get("decomp_comms", lambda gm: None)(gm)
    starts = ci.start_nodes(gm)
    if "decomp_comms" in PASSES:
        absences = [absence_of(start) for start in starts]
        assert all(absence is not None and absence.code is codes.DROPPED_DECOMPOSED for absence in absences)
        assert said == [(codes.DROPPED_DECOMPOSED, PARAM_UNSHARD)]
    else:
        assert all(map(identity_of, starts)) and said == []


def test_hooks_are_gone_whatever_happens_and_from_copies() -> None:
    b, made = pair(PARAM_UNSHARD)
    b.output(made[0].wait)
    gm = b.module()

    def hooks(module: fx.GraphModule) -> int:
        lists = (module._create_node_hooks, module._erase_node_hooks, module._replace_hooks, module._deepcopy_hooks)
        return sum(map(len, lists))

    with pytest.raises(ZeroDivisionError), reconciled(gm):
        copied = copy.deepcopy(gm)
        assert hooks(gm) == 4 and hooks(copied) == 0
        raise ZeroDivisionError
    assert hooks(gm) == 0


def test_shared_dicts_are_parted() -> None:
    b, made = pair(PARAM_UNSHARD, PARAM_UNSHARD)
    b.output(*(one.wait for one in made))
    gm = b.module()
    with reconciled(gm):
        made[1].start.meta = made[0].start.meta.copy()
        made[0].wait.meta["custom"] = made[0].start.meta["custom"]
    assert made[0].start.meta["custom"] is not made[1].start.meta["custom"]
    assert not store.has_payload(made[0].wait)


def test_whole_metadata_is_parted() -> None:
    """`wait.meta = start.meta`: the spread is taken off the wait, the start keeps what it had."""
    b, made = pair(PARAM_UNSHARD, PARAM_UNSHARD)
    b.output(*(one.wait for one in made))
    gm = b.module()
    had = [identity_of(one.start) for one in made]
    with reconciled(gm) as done:
        for one in made:
            one.wait.meta = one.start.meta
    assert [identity_of(one.start) for one in made] == had and None not in had
    assert not any(store.has_payload(one.wait) for one in made)
    assert done.lost == []


def test_equal_collectives_found_equal() -> None:
    """CSE: the one that stays has what both agree on."""
    for roles, expected in (((PARAM_UNSHARD, PARAM_UNSHARD), PARAM_UNSHARD), ((PARAM_UNSHARD, "cp.kv"), None)):
        b = Builder()
        shard = b.placeholder("p", (8, 8))
        first, second = (b.all_gather(shard, group=world(), size=SIZE, role=role) for role in roles)
        b.output(first.wait, second.wait)
        gm = b.module()
        with reconciled(gm):
            second.start.replace_all_uses_with(first.start)
            gm.graph.erase_node(second.start)
        found = identity_of(first.start)
        assert (found.role if found else None) == expected


def test_linear_in_collectives() -> None:
    """Ten times the collectives, ten times the steps: counted, not timed."""

    def reads(count: int) -> int:
        b, made = pair(*[PARAM_UNSHARD] * count)
        b.output(*(one.wait for one in made))
        gm = b.module()
        with counting_edges() as seen, reconciled(gm):
            for node in ci.start_nodes(gm):
                with gm.graph.inserting_before(node):
                    new = gm.graph.node_copy(node)
                node.replace_all_uses_with(new)
                gm.graph.erase_node(node)
        assert all(identity_of(node) is not None for node in ci.start_nodes(gm))
        return seen()

    assert reads(200) < 14 * reads(20)
