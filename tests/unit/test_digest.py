"""Digests: what two ranks compare, and what a cache key must hold."""

from __future__ import annotations

import copy
import enum
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import fx
from torch.fx.experimental.proxy_tensor import make_fx

from collective_identity import (
    GRAD_REDUCE_SHARD,
    PARAM_UNSHARD,
    clear,
    collective_table,
    digest,
    normalize,
    payload_digest,
    stamp,
    start_nodes,
    store,
)
from collective_identity.comparison import digests
from tests.graphs import Builder, annotate, aten, identity, payload

C = torch.ops._c10d_functional
Group = Callable[[list[int]], str]


def _step(g1: str = "a", g2: str = "b", op: str = "sum", roles: list[str | None] | None = None) -> fx.GraphModule:
    b = Builder()
    x, y = b.placeholder("x"), b.placeholder("y")
    cs = [b.all_gather(x, group=g1), b.all_gather(y, group=g2), b.reduce_scatter(x, group=g1, op=op)]
    b.output(*[c.wait for c in cs])
    for c, role in zip(cs, roles or [], strict=False):
        if role is not None:
            stamp(c.start, identity(role))
    return b.module()


F = PARAM_UNSHARD


def test_what_ranks_must_agree_on(new_group: Group) -> None:
    """Group order, reduce op and role; equal graphs are equal."""
    a, b = new_group([0, 1]), new_group([0, 2])
    same = digest(_step(a, b))
    assert digest(_step(a, b)) == same and len(same) == 64
    assert digest(_step(b, a)) != same, "which group comes first"
    assert digest(_step(a, b, "avg")) != same
    assert digest(_step(a, b, roles=[F, None, None])) != digest(_step(a, b, roles=[None, F, None])) != same


def test_group_names_do_not_count() -> None:
    assert digest(_step("dp_of_rank_0", "tp_of_rank_0")) == digest(_step("dp_of_rank_3", "tp_of_rank_3"))
    assert digest(_step("a", "b")) != digest(_step("a", "a"))
    named = [_step(g, "tp") for g in ("3", "4")]
    for gm, group in zip(named, ("3", "4"), strict=True):
        stamp(start_nodes(gm)[0], identity(F, group=group))
    assert digest(named[0]) == digest(named[1]), "nor in the payload"
    stamp(start_nodes(named[1])[0], identity(F, group="tp"))
    assert digest(named[0]) != digest(named[1])


def test_every_rank_of_a_mesh_has_the_same_digest() -> None:
    """Names and members of the groups differ by rank, and the last rank pads an uneven shard."""
    code = """
import torch, torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore
from tests.graphs import Builder
from collective_identity import digest, PARAM_UNSHARD
for rank in range(4):
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=4)
    mesh = torch.distributed.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    dp, tp = mesh.get_group("dp").group_name, mesh.get_group("tp").group_name
    b = Builder()
    act = b.all_gather(b.placeholder("x"), group=tp, role="tp.activation_gather")
    w = b.placeholder("w", (3, 8) if rank == 3 else (4, 8))
    full = b.all_gather(b.pad(w, [0, 0, 0, 1]) if rank == 3 else w, group=dp, role=PARAM_UNSHARD)
    b.output(act.wait, full.wait)
    print(digest(b.module()), sorted(dist.get_process_group_ranks(mesh.get_group("dp"))))
    dist.destroy_process_group()
"""
    lines = [line.split(" ", 1) for line in _run(code).splitlines()]
    assert len(lines) == 4 and len({ranks for _, ranks in lines}) == 2
    assert len({found for found, _ in lines}) == 1


INTERLEAVED = """
import torch, torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore
from tests.graphs import Builder
from collective_identity import digest, PARAM_UNSHARD

def program(dp, tp, swapped=False):
    b = Builder()
    first, second = (tp, dp) if swapped else (dp, tp)
    act = b.all_gather(b.placeholder("x"), group=first, role="tp.activation_gather")
    full = b.all_gather(b.placeholder("w"), group=second, role=PARAM_UNSHARD)
    b.output(act.wait, full.wait)
    return digest(b.module())

orders = {
    "apart": [[0, 2], [1, 3], [0, 1], [2, 3]],
    "interleaved": [[0, 2], [0, 1], [1, 3], [2, 3]],
    "turned": [[0, 2], [2, 3], [0, 1], [1, 3]],
}
for rank in range(4):
    for name, order in orders.items():
        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=4)
        made = [(ranks, dist.new_group(ranks)) for ranks in order]
        mine = {ranks[1] - ranks[0]: group.group_name for ranks, group in made if rank in ranks}
        print(name, program(mine[2], mine[1]), program(mine[2], mine[1], True))
        dist.destroy_process_group()
    # A folded ring has no distance in common; the mesh's own names say which group is which.
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=4)
    mesh = dist.device_mesh.DeviceMesh("cpu", [[0, 3], [1, 2]], mesh_dim_names=("dp", "tp"))
    dp, tp = mesh.get_group("dp").group_name, mesh.get_group("tp").group_name
    print("mesh", program(dp, tp), program(dp, tp, True))
    dist.destroy_process_group()
"""


def test_the_order_in_which_groups_are_created_does_not_count() -> None:
    """``new_group`` is called in the same order by every rank; which of a rank's two groups comes first varies."""
    found: dict[str, set[tuple[str, ...]]] = {}
    for line in _run(INTERLEAVED).splitlines():
        name, *answers = line.split()
        found.setdefault(name, set()).add(tuple(answers))
    assert {name: len(answers) for name, answers in found.items()} == {
        "apart": 1, "interleaved": 1, "turned": 1, "mesh": 1
    }  # fmt: skip
    assert found["apart"] == found["interleaved"] == found["turned"]
    assert all(straight != swapped for answers in found.values() for straight, swapped in answers)


def test_groups_of_one_place_are_told_apart_by_their_creation(new_group: Group) -> None:
    """Two communicators of the same ranks, and a group alone that another rank does not run on."""
    one, two, far = new_group([0, 1]), new_group([0, 1]), new_group([0, 2])
    assert digest(_step(one, two)) != digest(_step(two, one))
    assert digest(_step(one, one)) != digest(_step(far, far))


def _run(code: str) -> str:
    root = Path(__file__).resolve().parents[2]
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, cwd=root, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout.strip()


class Role(str, enum.Enum):
    """A member is a str to Python and no str to the contract."""

    UNSHARD = PARAM_UNSHARD


class Version(enum.IntEnum):
    ONE = 1


class Text(str):
    """Likewise, without an enum."""


CHANGES: dict[str, Any] = {
    "a str of an enum in role": {"role": Role.UNSHARD},
    "an int of an enum in version": {"version": Version.ONE},
    "a str of a subclass in source": {"source": Text("explicit")},
    "a str of a subclass in producer": {"producer": Text("test")},
    "a str of a subclass among params": {"params": [Text("w")]},
    "role": {"role": "tp.weight_gather"},
    "source": {"source": "inferred"},
    "producer": {"producer": "other"},
    "param_group": {"param_group": "layers.0"},
    "params": {"params": ["w"]},
    "version": {"version": 2},
    "unknown field": {"colour": "blue"},
}


def _differ(one: Any, two: Any) -> bool:
    """Whether both digests tell two payloads apart."""
    first, second = _step(), _step()
    annotate(start_nodes(first)[0], one)
    annotate(start_nodes(second)[0], two)
    answers = {digest(first) != digest(second), payload_digest(first) != payload_digest(second)}
    assert len(answers) == 1, "the two digests disagree"
    return answers.pop()


@pytest.mark.parametrize("change", list(CHANGES))
def test_every_field_of_a_payload_counts(change: str) -> None:
    """Graphs that differ only in a payload share no digest."""
    held = payload(F, params=["w"]) if "params" in change and change != "params" else payload(F)
    assert _differ(held, held | CHANGES[change])
    assert not _differ(held | CHANGES[change], held | CHANGES[change])


class Classless:
    """Raises when it is asked for its class, which isinstance does."""

    @property
    def __class__(self) -> Any:
        raise RuntimeError


class ClassOfAnything(type):
    """The type of types that equal every other, and that cannot be hashed."""

    __hash__ = None  # type: ignore[assignment]

    def __eq__(cls, other: object) -> bool:
        return True


class Anything(metaclass=ClassOfAnything):
    """Of a type that says it is any other."""


class Set(set):  # type: ignore[type-arg]
    """Says that it is a list."""

    @property
    def __class__(self) -> Any:
        return list


def _itself() -> list[Any]:
    held: list[Any] = []
    held.append(held)
    return held


def _doubled(times: int) -> list[Any]:
    held: list[Any] = []
    for _ in range(times):
        held = [held, held]
    return held


ODD: dict[str, Callable[[], Any]] = {
    "a value without a class": Classless,
    "one in a list": lambda: [Classless()],
    "one in a set": lambda: {Classless()},
    "one as a key": lambda: {Classless(): 1},
    "a type equal to every type": Anything,
    "a set that says it is a list": lambda: Set({"a"}),
    "ten thousand and one containers": lambda: [[] for _ in range(10_001)],
    "a container that holds itself": _itself,
    "2 ** 60 containers that are one another": lambda: _doubled(60),
    "a surrogate": lambda: chr(0xD800),
}


@pytest.mark.parametrize("place", ["a value", "a key"])
@pytest.mark.parametrize("odd", list(ODD))
def test_no_field_hides_another(odd: str, place: str) -> None:
    """A valid payload shows every field that the contract reads, whatever lies before it in one that it does not."""

    def held(**said: Any) -> dict[Any, Any]:
        value = ODD[odd]()
        before = {(value,) if type(value).__hash__ else repr(odd): 1} if place == "a key" else {"extra": value}
        return {**before, **payload(F, params=["w"]), **said}

    b = Builder()
    gathered = b.all_gather(b.placeholder("w"))
    annotate(gathered.start, held())
    assert store.identity_of(gathered.start) is not None, "it is valid"
    changes = {"role": "tp.any"}, {"params": ["v"]}, {"producer": "other"}, {"source": "inferred"}, {"group": "dp"}
    assert all(_differ(held(), held(**change)) for change in changes)
    assert not _differ(held(), held())


UNLIKE: dict[str, tuple[Any, Any]] = {
    "a pair of surrogates is no character": (chr(0xD83D) + chr(0xDE00), chr(0x1F600)),
    "surrogates": (chr(0xD800), chr(0xDC00)),
    "an escape is no character": (r"\ud83d\ude00", chr(0x1F600)),
    "a bool is no int": (True, 1),
    "an int is no float": (1, 1.0),
    "zeros": (0.0, -0.0),
    "a form is no dict": (2.5, {"float": "2.5"}),
    "deep inside": ([[[["a"]]]], [[[["b"]]]]),
    "a list in a list is no list": ([["a"]], [[["a"]]]),
    "floats of a subclass": (type("F", (float,), {})(1), type("F", (float,), {})(2)),
    "a set is no list": ({1}, [1]),
    "long ints": (10**4000, 10**4000 + 1),
}


@pytest.mark.parametrize("pair", list(UNLIKE))
def test_values_that_are_not_alike(pair: str) -> None:
    one, two = UNLIKE[pair]
    assert _differ(payload(F, extra=one), payload(F, extra=two))
    assert not _differ(payload(F, extra=one), payload(F, extra=copy.deepcopy(one)))


def test_what_is_not_told_apart() -> None:
    """The bounds that `payload_digest` states; the contract reads each of these pairs alike."""
    held = payload(F, params=["w"])
    assert not _differ(held, held | {"params": ("w",)})
    assert not _differ(held, dict(reversed(held.items())))
    assert not _differ(held | {"extra": object()}, held | {"extra": object()})
    deep, deeper = ["a"], ["b"]
    for _ in range(32):
        deep, deeper = [deep], [deeper]  # type: ignore[list-item]
    assert not _differ(held | {"extra": deep}, held | {"extra": deeper})


def test_roles_are_in_both_digests(new_group: Group) -> None:
    """On a traced graph."""
    dp = new_group([0, 2])

    def ag(x: torch.Tensor) -> torch.Tensor:
        return C.wait_tensor(C.all_gather_into_tensor(x, 2, dp))

    def made(second: str) -> fx.GraphModule:
        args = (torch.randn(4, 8), torch.randn(4, 8), torch.randn(3, 8))
        gm = make_fx(lambda a, b, x: (x @ ag(a)) @ ag(b).T, tracing_mode="fake")(*args)
        for node, role in zip(start_nodes(gm), (F, second), strict=True):
            stamp(node, identity(role))
        return gm

    assert digest(made(F)) == digest(made(F)) and payload_digest(made(F)) == payload_digest(made(F))
    assert digest(made(F)) != digest(made("tp.weight_gather"))
    assert payload_digest(made(F)) != payload_digest(made("tp.weight_gather"))


def test_where_a_payload_lies_counts_for_caches() -> None:
    one, two = _step(), _step()
    annotate(start_nodes(one)[0], payload(F))
    annotate(start_nodes(two)[1], payload(F))
    assert payload_digest(one) != payload_digest(two)
    for gm in (one, two):
        for node in start_nodes(gm):
            clear(node)
    assert payload_digest(one) == payload_digest(two)


def test_malformed_and_stray_payloads_count() -> None:
    plain = _step()
    stray, odd, backward = _step(), _step(), _step()
    annotate(next(iter(stray.graph.nodes)), payload(F))
    annotate(start_nodes(odd)[0], "no payload at all")
    annotate(start_nodes(backward)[2], payload(F), backward=payload(GRAD_REDUCE_SHARD))
    forward = _step()
    annotate(start_nodes(forward)[2], payload(F))
    graphs = [plain, stray, odd, backward, forward]
    assert len({digest(g) for g in graphs}) == len({payload_digest(g) for g in graphs}) == 5


def test_payloads_of_sub_graphs_count() -> None:
    def nested(role: str | None) -> fx.GraphModule:
        root = torch.nn.Module()
        root.body = _step(roles=[role])
        graph = fx.Graph()
        x = graph.placeholder("x")
        graph.output(graph.call_function(torch.ops.higher_order.invoke_subgraph, (graph.get_attr("body"), "b", x, x)))
        return fx.GraphModule(root, graph)

    for f in (digest, payload_digest):
        assert len({f(nested(r)) for r in (None, F, "tp.x")}) == 3
        assert f(nested(F)) == f(nested(F))
    assert [row.role for row in collective_table(nested(F))][:1] == [F]


def test_normalising_does_not_change_what_ranks_compare() -> None:
    b = Builder()
    w = b.placeholder("w")
    cast = annotate(b.cast(w, torch.bfloat16), payload(F, params=["w"]))
    gathered = b.all_gather(cast)
    b.output(gathered.wait)
    gm = b.module()
    before = digest(gm)
    assert normalize(gm) and digest(gm) == before
    clear(gathered.start)
    assert digest(gm) != before


def test_an_uneven_rank_pads_where_others_do_not() -> None:
    def rank(rows: int) -> str:
        b = Builder()
        w = b.placeholder("w", (rows, 8))
        shard = b.pad(w, [0, 0, 0, 4 - rows]) if rows < 4 else w
        if rows < 4:
            annotate(shard, payload(F))
        b.output(b.all_gather(shard, role=F).wait)
        gm = b.module()
        normalize(gm)
        return digest(gm)

    assert rank(3) == rank(4)


def test_the_digest_reads_only() -> None:
    gm = _step(roles=[F, None, GRAD_REDUCE_SHARD])
    before = [copy.deepcopy(n.meta.get("custom")) for n in gm.graph.nodes]
    digest(gm), payload_digest(gm), collective_table(gm)
    assert [n.meta.get("custom") for n in gm.graph.nodes] == before


def _with_hook(*args: Any, **kwargs: Any) -> fx.GraphModule:
    graph = fx.Graph()
    x = graph.placeholder("x")
    graph.output(graph.call_function(torch.ops.fsdp_hooks.core_test_unshard.default, (x, *args), kwargs))
    return fx.GraphModule(torch.nn.Module(), graph)


def test_the_arguments_of_producer_operators_count() -> None:
    with torch.library._scoped_library("fsdp_hooks", "FRAGMENT") as lib:
        lib.define("core_test_unshard(Tensor x, str group, str[] params, float scale=1.0) -> Tensor")
        one = payload_digest(_with_hook("g", ["w"]))
        assert one == payload_digest(_with_hook("g", ["w"]))
        others = [("h", ["w"]), ("g", ["v"]), ("g", ["w"], 2.0), ("g", [])]
        assert len({one, *(payload_digest(_with_hook(*o)) for o in others)}) == 5
        assert payload_digest(_with_hook("g", ["w"], scale=2.0)) != one


def test_ranks_compare_payloads_by_logical_group() -> None:
    def named(first: str, second: str) -> fx.GraphModule:
        gm = _step()
        for node, group in zip(start_nodes(gm), (first, second), strict=False):
            annotate(node, payload("user.any", group=group))
        return gm

    one, other = named("dp_0", "tp_0"), named("dp_1", "tp_1")
    assert payload_digest(one) != payload_digest(other), "a cache is per process and keeps the names"
    assert payload_digest(one, logical_groups=True) == payload_digest(other, logical_groups=True)
    same = named("dp_0", "dp_0")
    assert payload_digest(one, logical_groups=True) != payload_digest(same, logical_groups=True)


def test_the_payload_digest_is_the_same_in_every_process() -> None:
    code = """
from collective_identity.comparison import digests
from tests.graphs import Builder, annotate, payload
from collective_identity import payload_digest
b = Builder()
g = b.all_gather(b.placeholder("w"))
b.output(g.wait)
annotate(g.start, payload("fsdp.param_unshard", extra={"b", "a", "c"}, odd=object(), f=1.5, d={"y": 1, "x": (2,)}))
found = payload_digest(b.module())
"""
    here: dict[str, Any] = {}
    exec(code, here)
    assert _run(code + "print(found)") == here["found"]


# --- the table -------------------------------------------------------------------------------------------


def test_the_table() -> None:
    b = Builder()
    w = b.placeholder("w", (4, 8), dtype=torch.bfloat16)
    gathered = b.all_gather(w, role=F, params=("w",), param_group="layers.0")
    scattered = b.reduce_scatter(b.placeholder("g"), op="avg", size=4)
    mixed = b.all_gather(b.call(aten.add.Tensor, b.placeholder("p"), b.placeholder("q")), group="tp")
    annotate(scattered.start, payload(F))
    b.output(gathered.wait, scattered.wait, mixed.wait)
    rows = collective_table(b.module())
    assert [r.index for r in rows] == [0, 1, 2]
    first, second, third = rows
    assert (first.transport, first.form, first.role, first.source) == ("all_gather", "default", F, "explicit")
    assert (first.producer, first.params, first.param_group) == ("test", ("w",), "layers.0")
    assert (first.dtype, first.numel, first.nbytes) == ("bfloat16", 32, 64)
    assert (first.group, first.group_size, first.reduce_op) == ("dp", 2, None)
    assert (first.absence, first.code, first.backward) == (None, None, False)
    assert (second.role, second.source, second.reduce_op, second.group_size) == (
        GRAD_REDUCE_SHARD,
        "inferred",
        "avg",
        4,
    )
    assert (second.absence, second.code) == ("malformed", "CI006")
    assert (third.role, third.absence, third.code, third.group) == (None, "never_had", None, "tp")


def test_the_table_tells_forward_from_backward() -> None:
    b = Builder()
    w, t = b.placeholder("primals_1"), b.placeholder("tangents_1")
    again, reduced = b.all_gather(w), b.reduce_scatter(t)
    b.output(reduced.wait, again.wait)
    gm = b.module()
    for node in (reduced.start, reduced.wait):
        node.meta["partitioner_tag"] = "is_backward"
    assert [r.backward for r in collective_table(gm)] == [True, True], "a re-gather in a backward graph"
    again.wait.meta["partitioner_tag"] = "is_forward"
    assert [r.backward for r in collective_table(gm)] == [False, True], "a joint graph returns forward results"


def test_symbolic_sizes_are_unknown(new_group: Group) -> None:
    dp = new_group([0, 2])
    f = lambda w: C.wait_tensor(C.all_gather_into_tensor(w.clone(), 2, dp))  # noqa: E731
    gm = make_fx(f, tracing_mode="symbolic")(torch.randn(4, 8))
    (row,) = collective_table(gm)
    assert (row.numel, row.nbytes, row.dtype) == (None, None, "float32")
    assert len(digest(gm)) == 64


def test_the_wrapped_body_is_not_counted_twice() -> None:
    from torch._inductor.fx_passes.control_dependencies import preserve_node_ordering
    from torch.utils._ordered_set import OrderedSet

    b = Builder()
    other = b.call(aten.relu.default, b.placeholder("x"))
    gathered = b.all_gather(b.placeholder("w"), role=F)
    b.output(gathered.wait, other)
    gm = b.module()
    preserve_node_ordering(gm.graph, {gathered.start: OrderedSet([other])})
    (row,) = collective_table(gm)
    assert (row.form, row.role, row.numel) == ("control_deps", F, 32)
    assert store.identity_of(start_nodes(gm)[0]) is not None


def test_what_ranks_compare_in_a_row_tells_surrogates_apart() -> None:
    def compared(name: str) -> dict[str, str]:
        gm = _step()
        stamp(start_nodes(gm)[0], identity(F, params=(name,)))
        return digests(collective_table(gm))

    assert compared(chr(0x1F600)) == compared(chr(0x1F600))
    assert compared(chr(0x1F600)) != compared(chr(0xD83D) + chr(0xDE00))
