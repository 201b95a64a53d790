"""Small graphs from public reports on torch's low-contention and overlap passes: who is what afterwards."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch import fx
from torch.fx.passes.shape_prop import _extract_tensor_metadata

import collective_identity as ci
from collective_identity import GRAD_REDUCE_SHARD, PARAM_UNSHARD, absence_of, codes, compat, identity_of, members_of
from collective_identity.transports import Transport, launch_of
from inductor_passes.decomposition import replaced
from inductor_passes.metadata_first import metadata_first
from inductor_passes.reconcile import reconciled
from inductor_passes.upstream_passes import upstream_passes
from tests.graphs import Builder, aten
from tests.passes.upstream_graphs import as_on_gpus

TP_GATHER = "tp.activation_gather"


@pytest.fixture(scope="module")
def groups(fake_world: int) -> Iterator[dict[str, str]]:
    yield {name: dist.new_group(ranks).group_name for name, ranks in (("DP", [0, 2]), ("TP", [0, 1]))}


@pytest.fixture(autouse=True)
def _gpus() -> Iterator[None]:
    with as_on_gpus():
        yield


def finish(b: Builder, *outputs: fx.Node) -> fx.GraphModule:
    b.output(*outputs)
    for node in b.graph.nodes:
        if isinstance(node.meta.get("val"), torch.Tensor):
            node.meta["tensor_meta"] = _extract_tensor_metadata(node.meta["val"])
    return b.module()


def shared_dicts(gm: fx.GraphModule) -> list[str]:
    """Pairs of nodes with one dict, also in the sub-graphs that overlap wraps operators in."""
    seen: dict[int, str] = {}
    both = []
    for node in (n for m in gm.modules() if isinstance(m, fx.GraphModule) for n in m.graph.nodes):
        custom = node.meta.get("custom")
        if custom:
            both += [f"{seen[id(custom)]} and {node.name}"] if id(custom) in seen else []
            seen[id(custom)] = node.name
    return both


# ---- low contention


def weights_and_activations(groups: dict[str, str], roles: tuple[str | None, str | None]) -> fx.GraphModule:
    b = Builder()
    x, w = b.placeholder("x", (3, 8)), b.placeholder("w", (4, 8))
    activation = b.all_gather(x, group=groups["TP"], size=2, role=roles[0]).wait
    weight = b.all_gather(w, group=groups["DP"], size=2, role=roles[1]).wait
    return finish(b, b.call(aten.mm.default, activation, b.call(aten.permute.default, weight, [1, 0])))


def swap_all(gm: fx.GraphModule) -> None:
    """What torch's pass does, for a torch that lacks it (before 2.13): the new node shares the old one's metadata."""
    for start in ci.start_nodes(gm):
        with gm.graph.inserting_before(start):
            new = gm.graph.call_function(low_contention(), (start.args[0], start.args[2]))
        new.meta.update(start.meta)
        start.replace_all_uses_with(new)
        gm.graph.erase_node(start)


def low_contention() -> torch._ops.OpOverload:
    import torch.distributed._symmetric_memory  # defines the operator

    return torch.ops.symm_mem._low_contention_all_gather.default


@pytest.mark.parametrize(
    "roles", [(TP_GATHER, PARAM_UNSHARD), (None, PARAM_UNSHARD), (TP_GATHER, None), (PARAM_UNSHARD, TP_GATHER)]
)
def test_low_contention_forms_keep_their_own_identity(
    groups: dict[str, str], roles: tuple[str | None, str | None]
) -> None:
    """Torch swaps whatever it likes; each new node says what the one in its place said, in a dict of its own."""
    gm = weights_and_activations(groups, roles)
    old = {id(n.meta["custom"]) for n in ci.start_nodes(gm) if "custom" in n.meta}
    kept = [n.meta for n in ci.start_nodes(gm)]  # alive, so that no id is used again
    with reconciled(gm):
        upstream_passes().get("low_contention", swap_all)(gm)
    starts = ci.start_nodes(gm)
    assert len(kept) == len(starts) == 2 and all("low_contention" in str(n.target) for n in starts)
    assert tuple(i.role if (i := identity_of(n)) else None for n in starts) == roles
    assert not shared_dicts(gm) and not old & {id(n.meta.get("custom")) for n in starts}


@pytest.mark.parametrize(("roles", "swapped"), [
    ((TP_GATHER, PARAM_UNSHARD), [PARAM_UNSHARD]), ((PARAM_UNSHARD, TP_GATHER), [PARAM_UNSHARD]),
    ((TP_GATHER, None), [None]), ((TP_GATHER, "user.metric"), []),
    ((PARAM_UNSHARD, PARAM_UNSHARD), [PARAM_UNSHARD] * 2),
])
def test_metadata_first_has_it_swap_what_does_not_say_it_is_anothers(
    groups: dict[str, str], roles: tuple[str | None, str | None], swapped: list[str | None]
) -> None:
    """Torch documents the pass as one for FSDP's collectives, and has it take every gather and scatter."""
    lower = upstream_passes().get("low_contention")
    assert (lower is None) == (compat.torch_version() < (2, 13))
    if lower is None:
        return
    gm = weights_and_activations(groups, roles)
    with metadata_first(), reconciled(gm):
        lower(gm)
    said = {n: i.role if (i := identity_of(n)) else None for n in ci.start_nodes(gm)}
    assert [role for n, role in said.items() if "low_contention" in str(n.target)] == swapped
    assert tuple(said.values()) == roles and not shared_dicts(gm)


def test_a_pass_that_swaps_fsdps_collectives_alone_asks_for_the_role(groups: dict[str, str]) -> None:
    gm = weights_and_activations(groups, (TP_GATHER, PARAM_UNSHARD))
    target = low_contention()
    for start, identity in ci.classify(gm).items():
        if identity is not None and identity.role == PARAM_UNSHARD:
            with gm.graph.inserting_before(start):
                new = gm.graph.call_function(target, (start.args[0], groups["DP"]))
            new.meta["val"] = start.meta["val"]
            replaced(start, new, pass_name="policy")
            start.replace_all_uses_with(new)
            gm.graph.erase_node(start)
    found = {str(n.target).split(".")[1]: i.role for n in ci.start_nodes(gm) if (i := identity_of(n))}
    assert found == {"all_gather_into_tensor": TP_GATHER, "_low_contention_all_gather": PARAM_UNSHARD}
    assert not shared_dicts(gm)


# ---- the overlap scheduler with bucketing


def step(groups: dict[str, str], activation: str, other: str | None = TP_GATHER) -> fx.GraphModule:
    """One activation gather on the group named, three parameters, two gradients."""
    b = Builder()
    x, *weights = b.placeholder("x", (2, 8)), *(b.placeholder(f"w{i}", (4, 8)) for i in range(3))
    gradients = [b.placeholder(f"g{i}", (8, 8)) for i in range(2)]
    h = b.all_gather(x, group=groups[activation], size=2, role=other, params=("x",)).wait
    for i, w in enumerate(weights):
        full = b.all_gather(w, group=groups["DP"], size=2, role=PARAM_UNSHARD, params=(f"w{i}",))
        h = b.call(aten.mm.default, h, full.wait)
    reduced = [
        b.reduce_scatter(b.call(aten.mm.default, g, g), group=groups["DP"], size=2, role=GRAD_REDUCE_SHARD).wait
        for g in gradients
    ]
    return finish(b, h, *reduced)


@pytest.mark.parametrize("first", [False, True], ids=["as torch is", "metadata first"])
@pytest.mark.parametrize(("activation", "other"), [("TP", TP_GATHER), ("DP", TP_GATHER), ("DP", None)])
def test_every_fsdp_role_is_readable_or_its_loss_named(
    groups: dict[str, str], activation: str, other: str | None, first: bool
) -> None:
    """A bucket that torch fills with another's gather on FSDP's group has no role; it is never FSDP's."""
    gm = step(groups, activation, other)
    with reconciled(gm):
        if first:
            with metadata_first():
                upstream_passes()["overlap"](gm)
        else:
            upstream_passes()["overlap"](gm)
    roles: Counter[str | None] = Counter()
    params: list[str] = []
    for node in ci.start_nodes(gm):
        identity, record, absence = identity_of(node), members_of(node), absence_of(node)
        said = {m.identity.role if m.identity else None for m in record.members} if record else set()
        if identity is not None:
            assert said <= {identity.role}, f"{node.name} carries {identity.role} for {said}"
            roles[identity.role] += 1
            params += identity.params or ()
        elif record is not None:
            assert absence is not None and absence.code is codes.DROPPED_MIXED and len(said) > 1
        launch = launch_of(node)
        assert launch is not None
        if identity is not None and identity.role in (PARAM_UNSHARD, TP_GATHER):
            assert launch.transport is Transport.ALL_GATHER
    assert not shared_dicts(gm) and len(params) == len(set(params))
    assert roles[GRAD_REDUCE_SHARD] >= 1
    if activation == "TP":
        assert roles[PARAM_UNSHARD] >= 1 and roles[TP_GATHER] == 1
