"""What copies, partitions and retraces leave of identities: kept by value, or the loss has a name."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch import fx
from torch.fx.experimental.proxy_tensor import make_fx

from collective_identity import (
    GRAD_REDUCE_SHARD,
    PARAM_UNSHARD,
    BucketRecord,
    Identity,
    Member,
    absence_of,
    classify,
    clear,
    codes,
    identity_of,
    launch_of,
    members_of,
    normalize,
    stamp,
    start_nodes,
    store,
)
from collective_identity.losses import Loss, record_losses, snapshot
from collective_identity.merge import merge_outcome
from collective_identity.subgraphs import graph_modules
from tests.graphs import Builder, annotate, aten, identity, payload

C = torch.ops._c10d_functional
UNSHARD = identity(PARAM_UNSHARD, params=("w",))
REDUCE = identity(GRAD_REDUCE_SHARD, params=("w",))
ARGS = (torch.ones(4, 8), torch.ones(3, 8))


@pytest.fixture
def traced(new_group: Callable[[list[int]], str]) -> fx.GraphModule:
    """A gather and a reduce-scatter with identities, on a group of the fake world."""
    group = new_group([0, 1])

    def named(w: torch.Tensor, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        full = C.wait_tensor(C.all_gather_into_tensor(w, 2, group))
        y = x @ full.T
        return y, C.wait_tensor(C.reduce_scatter_tensor(y.T @ x, "avg", 2, group))

    gm = make_fx(named, tracing_mode="fake")(*ARGS)
    for node, said in zip(start_nodes(gm), (UNSHARD, REDUCE), strict=True):
        stamp(node, said)
    return gm


def deep_copied(gm: fx.GraphModule) -> fx.GraphModule:
    return copy.deepcopy(gm)


def node_copied(gm: fx.GraphModule) -> fx.GraphModule:
    graph, env = fx.Graph(), {}
    for node in gm.graph.nodes:
        env[node] = graph.node_copy(node, lambda n: env[n])
    return fx.GraphModule(gm, graph)


def graph_copied(gm: fx.GraphModule) -> fx.GraphModule:
    graph = fx.Graph()
    graph.output(graph.graph_copy(gm.graph, {}))
    return fx.GraphModule(gm, graph)


def split(gm: fx.GraphModule) -> fx.GraphModule:
    """Two sub-modules, a collective in each."""
    from torch.fx.passes.split_module import split_module

    nodes = list(gm.graph.nodes)
    second = nodes.index(start_nodes(gm)[1])
    return split_module(gm, torch.nn.Module(), lambda node: int(nodes.index(node) >= second))


def fused(gm: fx.GraphModule) -> fx.GraphModule:
    """The capability-based partitioner, which moves nodes into a called sub-module."""
    from torch.fx.passes.infra.partitioner import CapabilityBasedPartitioner
    from torch.fx.passes.operator_support import create_op_support

    class Everything:
        def is_node_supported(self, modules: Any, node: fx.Node) -> bool:
            return node.op == "call_function"

    support = create_op_support(Everything().is_node_supported)
    return CapabilityBasedPartitioner(gm, support).partition_and_fuse()


def common_subexpressions_removed(gm: fx.GraphModule) -> fx.GraphModule:
    from torch._functorch.compile_utils import fx_graph_cse

    return fx.GraphModule(gm, fx_graph_cse(gm.graph))


def interpreted(gm: fx.GraphModule) -> fx.GraphModule:
    with fx.traceback.preserve_node_meta():
        return make_fx(lambda *args: fx.Interpreter(gm).run(*args), tracing_mode="fake")(*ARGS)


def pickled(gm: fx.GraphModule) -> fx.GraphModule:
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.fx._graph_pickler import GraphPickler, Options
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    data = GraphPickler.dumps(gm, Options(ops_filter=None))
    return GraphPickler.loads(data, FakeTensorMode(shape_env=ShapeEnv()))


KEEPING = (
    deep_copied,
    node_copied,
    graph_copied,
    split,
    fused,
    common_subexpressions_removed,
    interpreted,
    pickled,
)


def all_starts(gm: fx.GraphModule) -> list[fx.Node]:
    return [node for module in graph_modules(gm) for node in start_nodes(module)]


@pytest.mark.parametrize("made", KEEPING, ids=lambda f: f.__name__)
def test_kept_by_value(made: Callable[[fx.GraphModule], fx.GraphModule], traced: fx.GraphModule) -> None:
    kept = made(traced)
    starts = all_starts(kept)
    assert [identity_of(node) for node in starts] == [UNSHARD, REDUCE]
    assert record_losses(snapshot(traced), kept, pass_name="copy") == ()
    if kept is traced:
        return
    originals = dict(zip(all_starts(traced), (UNSHARD, REDUCE), strict=True)) if made is not fused else {}
    before = {node: copy.deepcopy(node.meta["custom"]) for node in originals}
    for node in starts:
        stamp(node, UNSHARD.inferred())
        store.drop(node, codes.DROPPED_OPAQUE, "test")
        clear(node)
    assert [identity_of(node) for node in starts] == [None, None]
    for node, said in originals.items():
        assert node.meta["custom"] == before[node] and identity_of(node) == said, "a copy's change reached the original"


@pytest.mark.parametrize("made", KEEPING, ids=lambda f: f.__name__)
def test_a_recorded_loss_goes_along(made: Callable[[fx.GraphModule], fx.GraphModule], traced: fx.GraphModule) -> None:
    """Else structure would call a mixed collective FSDP's once it is copied."""
    for node in start_nodes(traced):
        store.drop(node, codes.DROPPED_MIXED, "a pass", "met another")
    lost = store.Absence("dropped", codes.DROPPED_MIXED, "a pass", "met another")
    copied = made(traced)
    assert [absence_of(node) for node in all_starts(copied)] == [lost, lost]
    assert set(classify(copied).values()) == {None}
    for node in all_starts(copied):
        stamp(node, UNSHARD)
    if copied is not traced:
        assert [absence_of(node) for node in all_starts(traced)] == [lost, lost], "a copy's change reached the original"


def test_a_loss_copied_from_forward_to_backward_is_not_the_backwards() -> None:
    b = Builder()
    node = b.all_gather(b.placeholder("w")).start
    store.drop(node, codes.DROPPED_MIXED, "a pass")
    node.meta["partitioner_tag"] = "is_backward"
    assert absence_of(node) == store.NEVER_HAD
    forward = dict(node.meta["custom"])
    store.drop(node, codes.DROPPED_OPAQUE, "another")
    node.meta["custom"] = {**node.meta["custom"], **forward}  # what AOTAutograd does
    assert absence_of(node) == store.Absence("dropped", codes.DROPPED_OPAQUE, "another")


@pytest.mark.parametrize("record", [1, {}, {"code": "CI999", "pass": "p", "detail": ""}, {"code": [], "pass": 1}])
def test_a_record_that_nobody_wrote_is_none(record: object) -> None:
    b = Builder()
    node = b.all_gather(b.placeholder("w")).start
    store.drop(node, codes.DROPPED_MIXED, "a pass")
    (key,) = node.meta["custom"]
    node.meta["custom"] = {key: record}
    assert absence_of(node) == store.NEVER_HAD


def retraced(gm: fx.GraphModule) -> fx.GraphModule:
    return make_fx(gm, tracing_mode="fake")(*ARGS)


def symbolically_traced(gm: fx.GraphModule) -> fx.GraphModule:
    return fx.symbolic_trace(gm)


@pytest.mark.parametrize("made", [retraced, symbolically_traced], ids=lambda f: f.__name__)
def test_lost_and_recorded(made: Callable[[fx.GraphModule], fx.GraphModule], traced: fx.GraphModule) -> None:
    before = snapshot(traced)
    lossy = made(traced)
    starts = all_starts(lossy)
    assert [identity_of(node) for node in starts] == [None, None]
    losses = record_losses(before, lossy, pass_name="retrace")
    assert [(loss.was, loss.identity, loss.node) for loss in losses] == [
        (seen.name, said, node) for seen, said, node in zip(before, (UNSHARD, REDUCE), starts, strict=True)
    ]
    for node, role in zip(starts, (PARAM_UNSHARD, GRAD_REDUCE_SHARD), strict=True):
        assert absence_of(node) == store.Absence("dropped", codes.DROPPED_UNKNOWN, "retrace", f"retrace lost {role}")
    assert [identity_of(node) for node in start_nodes(traced)] == [UNSHARD, REDUCE]
    assert record_losses(before, lossy, pass_name="again") == (), "a recorded loss is not recorded anew"


def test_a_pickled_module_has_lost_them_all() -> None:
    gm, _ = _three()
    before = snapshot(gm)
    read = pickle.loads(pickle.dumps(gm))
    assert [identity_of(node) for node in start_nodes(read)] == [None] * 3
    assert [loss.node for loss in record_losses(before, read, pass_name="pickle")] == start_nodes(read)


def test_partition_and_recompute_keep_forward_roles_and_alias_nothing_of_ours(fake_world: int) -> None:
    """The re-gather in backward is the forward's own collective; changing it leaves the forward graph alone."""
    from functorch.compile import aot_function, make_boxed_func, min_cut_rematerialization_partition
    from torch.utils.checkpoint import CheckpointPolicy

    from collective_identity import role_scope

    group = torch.distributed.group.WORLD.group_name  # type: ignore[union-attr]
    graphs: dict[str, fx.GraphModule] = {}

    class Gather(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, w: torch.Tensor) -> torch.Tensor:
            with role_scope(PARAM_UNSHARD, producer="test", params=["w"]):
                return C.wait_tensor(C.all_gather_into_tensor(w, fake_world, group))

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
            return C.wait_tensor(C.reduce_scatter_tensor(grad, "avg", fake_world, group))

    def partition(joint: fx.GraphModule, *args: Any, **kwargs: Any) -> Any:
        for node in joint.graph.nodes:
            chain = launch_of(node) is not None or (
                node.args and isinstance(node.args[0], fx.Node) and launch_of(node.args[0])
            )
            if node.op == "call_function" and chain and node.meta.get("partitioner_tag") != "is_backward":
                node.meta["recompute"], node.meta["ac_graph_id"] = CheckpointPolicy.MUST_RECOMPUTE, 1
        return min_cut_rematerialization_partition(joint, *args, **kwargs)

    def keep(name: str) -> Any:
        return lambda gm, _: graphs.setdefault(name, gm) and make_boxed_func(gm.forward)

    w, x = torch.ones(4, 8, requires_grad=True), torch.ones(3, 8, requires_grad=True)
    run = aot_function(
        lambda w, x: (x @ Gather.apply(w).T).sin().sum(),
        fw_compiler=keep("forward"),
        bw_compiler=keep("backward"),
        partition_fn=partition,
    )
    run(w, x).backward()
    forward, backward = (all_starts(graphs[name]) for name in ("forward", "backward"))
    assert len(forward) == 1 and len(backward) == 2, "gathered again"
    twins = [n for n in backward if (launch := launch_of(n)) and launch.transport.value == "all_gather"]
    assert [identity_of(n) for n in forward + twins] == [UNSHARD] * (1 + len(twins))
    scatters = [n for n in backward if n not in twins]
    assert [identity_of(n) for n in scatters] == [None], "never the forward's role"
    for twin in twins:
        clear(twin)
    assert [identity_of(n) for n in forward] == [UNSHARD]


# --- CSE -------------------------------------------------------------------------------------------------

ONE, TWO = identity(PARAM_UNSHARD, params=("a",)), identity("tp.activation_gather")


@pytest.mark.parametrize("swapped", [False, True])
@pytest.mark.parametrize(("first", "second"), [(ONE, ONE), (ONE, TWO), (ONE, None), (None, None)])
def test_two_collectives_that_became_one(first: Identity | None, second: Identity | None, swapped: bool) -> None:
    """`fx_graph_cse` keeps whichever came first; the outcome must not depend on it, so it is decided beforehand."""
    if swapped:
        first, second = second, first
    b = Builder()
    w = b.placeholder("w")
    pair = [b.all_gather(w), b.all_gather(w)]
    b.output(*(b.call(aten.relu.default, one.wait) for one in pair))
    gm = b.module()
    for one, said in zip(pair, (first, second), strict=True):
        if said is not None:
            stamp(one.start, said)
    outcome = merge_outcome((first, second), producer="cse")
    (left,) = start_nodes(common_subexpressions_removed(gm))
    if outcome.identity is not None:
        stamp(left, outcome.identity)
    elif outcome.code is not None:
        store.drop(left, outcome.code, "cse", outcome.detail)
    same = first == second == ONE
    assert identity_of(left) == (identity(PARAM_UNSHARD, producer="cse", params=("a",)) if same else None)
    absence = absence_of(left)
    if same or first is second:
        assert absence is None or absence == store.NEVER_HAD
    else:
        assert absence is not None and absence.code is codes.DROPPED_MIXED


# --- passes that say nothing -----------------------------------------------------------------------------


def _three() -> tuple[fx.GraphModule, list[fx.Node]]:
    b = Builder()
    made = [b.all_gather(b.placeholder(f"w{i}"), role=PARAM_UNSHARD, params=(f"w{i}",)) for i in range(3)]
    b.output(*(one.wait for one in made))
    return b.module(), [one.start for one in made]


def lose_nothing(gm: fx.GraphModule, starts: list[fx.Node]) -> None:
    starts[0].meta["mine"] = 1


def wipe_metadata(gm: fx.GraphModule, starts: list[fx.Node]) -> None:
    starts[1].meta.clear()


def replace_one(gm: fx.GraphModule, starts: list[fx.Node]) -> None:
    with gm.graph.inserting_before(starts[1]):
        new = gm.graph.call_function(starts[1].target, starts[1].args)
    starts[1].replace_all_uses_with(new)
    gm.graph.erase_node(starts[1])


def merge_two(gm: fx.GraphModule, starts: list[fx.Node]) -> None:
    with gm.graph.inserting_after(starts[1]):
        both = gm.graph.call_function(aten.cat.default, ([*starts[0].args[:1], *starts[1].args[:1]],))
    with gm.graph.inserting_after(both):
        new = gm.graph.call_function(starts[0].target, (both, *starts[0].args[1:]))
    for old in starts[:2]:
        old.replace_all_uses_with(new)
        gm.graph.erase_node(old)


def drop_by_name(gm: fx.GraphModule, starts: list[fx.Node]) -> None:
    store.drop(starts[1], codes.DROPPED_OPAQUE, "careful")


def erase_one(gm: fx.GraphModule, starts: list[fx.Node]) -> None:
    wait = next(iter(starts[1].users))
    wait.replace_all_uses_with(starts[1].args[0])
    gm.graph.erase_node(wait)
    gm.graph.erase_node(starts[1])


@pytest.mark.parametrize(
    ("careless", "lost", "left"),
    [
        (lose_nothing, [], 0),
        (wipe_metadata, ["w1"], 1),
        (replace_one, ["w1"], 1),
        (merge_two, ["w0", "w1"], 1),
        (drop_by_name, [], 0),
        (erase_one, ["w1"], 0),
    ],
    ids=lambda v: getattr(v, "__name__", ""),
)
def test_a_pass_that_says_nothing(careless: Callable[..., None], lost: list[str], left: int) -> None:
    gm, starts = _three()
    before = snapshot(gm)
    careless(gm, starts)
    losses = record_losses(before, gm, pass_name="careless")
    assert [loss.identity.params for loss in losses] == [(name,) for name in lost]
    unknown = [n for n in start_nodes(gm) if (a := absence_of(n)) and a.code is codes.DROPPED_UNKNOWN]
    assert len(unknown) == left and {loss.node for loss in losses} == ({*unknown} or {None} if losses else set())
    for node in unknown:
        absence = absence_of(node)
        assert absence is not None and (absence.kind, absence.pass_name) == ("dropped", "careless")


def test_what_a_careless_pass_left_is_validated_again() -> None:
    """Copied onto a collective of another transport, a payload is malformed there, and no loss is hidden by it."""
    b = Builder()
    gathered = b.all_gather(b.placeholder("w"), role=PARAM_UNSHARD)
    b.output(gathered.wait)
    gm = b.module()
    before = snapshot(gm)
    with gm.graph.inserting_before(gathered.start):
        new = gm.graph.call_function(C.all_reduce.default, (gathered.start.args[0], "sum", "dp"))
    new.meta["custom"] = gathered.start.meta["custom"]
    gathered.start.replace_all_uses_with(new)
    gm.graph.erase_node(gathered.start)
    losses = record_losses(before, gm, pass_name="careless")
    assert losses == (Loss(gathered.start.name, identity(PARAM_UNSHARD), None),)
    absence = absence_of(new)
    assert absence is not None and absence.code is codes.ROLE_TRANSPORT


def test_losses_in_sub_graphs_of_the_same_names() -> None:
    root, graph = torch.nn.Module(), fx.Graph()
    x = graph.placeholder("x")
    calls = []
    for number in range(2):
        body, _ = _three()
        setattr(root, f"body_{number}", body)
        calls.append(graph.call_module(f"body_{number}", (x, x, x)))
    graph.output(tuple(calls))
    gm = fx.GraphModule(root, graph)
    before = snapshot(gm)
    assert len(before) == 6 and len({seen.name for seen in before}) == 3
    twin = copy.deepcopy(gm)
    victim = start_nodes(twin.body_1)[2]
    clear(victim)
    (loss,) = record_losses(before, twin, pass_name="p")
    assert loss.node is victim and loss.identity.params == ("w2",)


def test_provenance_goes_with_a_copy_and_a_loss_leaves_it() -> None:
    gm, starts = _three()
    record = BucketRecord("bucketing", (Member("ag_0", UNSHARD), Member("ag_1", UNSHARD)))
    store.set_members(starts[0], record)
    twin = start_nodes(copy.deepcopy(gm))[0]
    assert members_of(twin) == record
    clear(twin)
    before = snapshot(gm)
    starts[0].meta.pop("custom")
    (loss,) = record_losses(before, gm, pass_name="p")
    assert loss.node is starts[0] and members_of(starts[0]) is record


def test_a_region_annotated_with_one_dict_is_normalised_by_value() -> None:
    b = Builder()
    cast = b.cast(b.placeholder("w"), torch.bfloat16)
    gathered = b.all_gather(cast)
    b.output(gathered.wait)
    gm = b.module()
    shared: Mapping[str, Any] = {store.KEY: payload(PARAM_UNSHARD, params=["w"])}
    for node in (cast, gathered.wait):
        node.meta["custom"] = shared
    twin = copy.deepcopy(gm)
    assert normalize(gm) and shared == {store.KEY: payload(PARAM_UNSHARD, params=["w"])}
    assert identity_of(gathered.start) == UNSHARD
    gathered.start.meta["custom"][store.KEY]["params"].append("other")
    assert normalize(twin) and identity_of(start_nodes(twin)[0]) == UNSHARD
    annotate(gathered.start, payload(PARAM_UNSHARD))
    assert identity_of(start_nodes(twin)[0]) == UNSHARD


def test_losses_are_in_the_order_of_before() -> None:
    """Sub-graphs repeat each other's names."""

    def calling(*, stamped: bool) -> fx.GraphModule:
        outer = Builder()
        x = outer.placeholder("x")
        for name in ("one", "two"):
            b = Builder()
            w = b.placeholder("w")
            hops = [b.all_gather(w), b.reduce_scatter(w)][: 2 if name == "one" else 1]
            b.output(*[hop.wait for hop in hops])
            for hop, said in zip(hops, (UNSHARD, REDUCE), strict=False):
                if stamped:
                    stamp(hop.start, said)
            setattr(outer.root, name, b.module())
            outer.graph.call_function(torch.ops.higher_order.invoke_subgraph, (outer.graph.get_attr(name), name, x))
        outer.output(x)
        return outer.module()

    losses = record_losses(snapshot(calling(stamped=True)), calling(stamped=False), pass_name="p")
    assert [loss.identity for loss in losses] == [UNSHARD, REDUCE, UNSHARD]
