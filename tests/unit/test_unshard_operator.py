"""`torch.ops.fsdp_hooks.unshard` in one process: schema, numbers on one rank, and what its joint graph looks like.

Numbers over several ranks are in tests/distributed/test_unshard_operator.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import fx
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.partitioners import default_partition

from collective_identity import GRAD_REDUCE_SHARD, GRAD_REPLICATE_REDUCE, PARAM_UNSHARD, identity_of, start_nodes
from collective_identity.store import BACKWARD_KEY, KEY, runs_in_backward
from fsdp_hooks.operator import UnshardArgs, unshard
from fsdp_hooks.reshard import RESHARD_KEY


@pytest.fixture(scope="module", autouse=True)
def one_rank(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """A real group of one rank."""
    folder: Path = tmp_path_factory.mktemp("store")
    dist.init_process_group("gloo", store=dist.FileStore(str(folder / "store"), 1), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def arguments(**changes: Any) -> UnshardArgs:
    """One rank, nothing cast or divided; `changes` replace what is there."""
    world = dist.group.WORLD.group_name
    plain = UnshardArgs(
        version=1,
        producer="fsdp2",
        param="block.weight",
        param_group="block",
        dim=0,
        size=4,
        group=world,
        group_size=1,
        reduce_group=world,
        reduce_op="sum",
        replicate_group=None,
        replicate_size=1,
        replicate_op="sum",
        predivide=None,
        postdivide=None,
        param_dtype=None,
        reduce_dtype=None,
        reshard_after_forward=True,
    )
    return plain._replace(**changes)


def replicate(**changes: Any) -> UnshardArgs:
    return arguments(replicate_group=dist.group.WORLD.group_name, **changes)


# ---- one rank ----

GRADIENT = torch.tensor([[1.0, -2.0], [0.3, 1e-3], [7.0, 65.0], [1 / 3, -1e4]])


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, lambda g: g),
        ({"predivide": 4.0}, lambda g: g / 4),
        ({"postdivide": 3.0}, lambda g: g / 3),
        ({"predivide": 2.0, "postdivide": 3.0}, lambda g: g / 2 / 3),
        ({"param_dtype": torch.bfloat16}, lambda g: g.bfloat16().float()),
        ({"param_dtype": torch.bfloat16, "reduce_dtype": torch.float32}, lambda g: g.bfloat16().float()),
        (
            {"param_dtype": torch.bfloat16, "reduce_dtype": torch.float32, "postdivide": 3.0},
            lambda g: g.bfloat16().float() / 3,
        ),
        ({"reduce_dtype": torch.float16, "predivide": 3.0}, lambda g: (g.half() / 3).float()),
        ({"param_dtype": torch.float64}, lambda g: g.double().float()),
    ],
    ids=lambda value: str(value) if isinstance(value, dict) else "",
)
@pytest.mark.parametrize("make", [arguments, replicate])
def test_one_rank(
    make: Callable[..., UnshardArgs],
    changes: dict[str, Any],
    expected: Callable[[torch.Tensor], torch.Tensor],
) -> None:
    """Order of the arithmetic: cast, pre-divide, reduce, post-divide, cast back to the shard's dtype."""
    shard = torch.arange(8.0).view(4, 2).div(3).requires_grad_()
    full = unshard(shard, make(**changes))
    dtype = changes.get("param_dtype") or torch.float32
    assert full.dtype == dtype
    assert torch.equal(full, shard.detach().to(dtype))
    full.backward(GRADIENT.to(dtype))
    assert shard.grad is not None and shard.grad.dtype == torch.float32
    assert torch.equal(shard.grad, expected(GRADIENT))


def test_a_frozen_shard_has_no_gradient_function() -> None:
    assert not unshard(torch.ones(4, 2), arguments()).requires_grad


def test_no_grad_gathers_all_the_same() -> None:
    shard = torch.ones(4, 2, requires_grad=True)
    with torch.no_grad():
        assert torch.equal(unshard(shard, arguments()), shard)


def test_the_full_tensor_is_not_the_shard() -> None:
    """On one rank nothing is gathered, but writing a gradient to the full tensor must not reach the leaf."""
    shard = torch.ones(4, 2, requires_grad=True)
    full = unshard(shard, arguments())
    assert full is not shard and full.grad_fn is not None


@pytest.mark.parametrize("changes", [{}, {"param_dtype": torch.bfloat16, "reduce_dtype": torch.float32}], ids=str)
def test_schema_fake_and_aot_agree_with_the_real_operator(changes: dict[str, Any]) -> None:
    torch.library.opcheck(
        torch.ops.fsdp_hooks.unshard.default,
        (torch.ones(4, 2, requires_grad=True), None, None, None, *replicate(**changes)),
        test_utils=("test_schema", "test_faketensor", "test_autograd_registration", "test_aot_dispatch_static"),
    )


def test_arguments_are_in_schema_order() -> None:
    schema = torch.ops.fsdp_hooks.unshard.default._schema
    tensors = "shard", "accumulator", "pending", "partial"
    assert tuple(argument.name for argument in schema.arguments) == (*tensors, *UnshardArgs._fields)


@pytest.mark.parametrize(("size", "ranks", "chunk"), [(4, 2, 2), (5, 2, 3), (1, 4, 1), (7, 4, 2), (8, 1, 8)])
def test_chunk_is_torch_chunks(size: int, ranks: int, chunk: int) -> None:
    assert arguments(size=size, group_size=ranks).chunk == chunk == len(torch.chunk(torch.empty(size), ranks)[0])


# ---- the joint graph ----


def joint_graph(shape: tuple[int, ...], args: UnshardArgs, *, params: int = 1) -> fx.GraphModule:
    """The joint graph of a product with unsharded parameters, as the partitioner gets it. Groups are only named."""
    found: list[fx.GraphModule] = []

    def keep(gm: fx.GraphModule, *rest: Any, **kwargs: Any) -> Any:
        found.append(gm)
        return default_partition(gm, *rest, **kwargs)

    def nothing(gm: fx.GraphModule, _: Any) -> Callable[..., Any]:
        return gm.forward

    def model(x: torch.Tensor, shards: list[torch.Tensor]) -> torch.Tensor:
        for number, shard in enumerate(shards):
            x = x * unshard(shard, args._replace(param=f"p{number}")).float().sum().tanh()
        return x

    shards = [torch.ones(shape, requires_grad=True) for _ in range(params)]
    torch._dynamo.reset()
    with torch._subclasses.fake_tensor.FakeTensorMode() as fake:
        inputs = torch.ones(3, requires_grad=True), shards
        x, shards = torch.utils._pytree.tree_map_only(torch.Tensor, fake.from_tensor, inputs)
        backend = aot_autograd(fw_compiler=nothing, bw_compiler=nothing, partition_fn=keep)
        torch.compile(model, backend=backend, fullgraph=True)(x, shards)
    (gm,) = found
    return gm


def is_backward(node: fx.Node) -> bool:
    return node.meta.get("partitioner_tag") == "is_backward"


CASES: dict[str, tuple[tuple[int, ...], dict[str, Any]]] = {
    "dim 0": ((2, 6), {"size": 4}),
    "uneven": ((3, 6), {"size": 5}),
    "dim 1": ((4, 3), {"size": 5, "dim": 1}),
    "mixed precision": ((2, 6), {"param_dtype": torch.bfloat16, "reduce_dtype": torch.float32}),
    "divided": ((2, 6), {"reduce_dtype": torch.float16, "predivide": 2.0, "postdivide": 1.0}),
    "hybrid": (
        (2, 6),
        {"replicate_group": "replicas", "replicate_size": 2, "reduce_op": "avg", "replicate_op": "avg"},
    ),
}


@pytest.fixture(scope="module", params=CASES, ids=str)
def joint(request: pytest.FixtureRequest) -> tuple[str, fx.GraphModule]:
    shape, changes = CASES[request.param]
    args = arguments(group="shards", group_size=2, reduce_group="reducers", **changes)
    return request.param, joint_graph(shape, args, params=2)


def test_no_forward_node_has_the_sequence_number_of_a_gradient_collective(joint: tuple[str, fx.GraphModule]) -> None:
    """Torch 2.11 and 2.12 replace a backward node's payload by that of a forward node with its number."""
    _, gm = joint
    nodes = [node for node in gm.graph.nodes if "seq_nr" in node.meta]
    forward = {node.meta["seq_nr"] for node in nodes if not is_backward(node)}
    collectives = [node for node in start_nodes(gm) if is_backward(node)]
    assert len(collectives) >= 2
    numbers = {node.meta["seq_nr"] for node in collectives}
    assert len(numbers) == 2, "one for each parameter"
    assert not numbers & forward
    assert forward & {node.meta["seq_nr"] for node in nodes if is_backward(node)}, "others are shared: torch copies"


def test_every_collective_carries_its_payload_and_nothing_else_does(joint: tuple[str, fx.GraphModule]) -> None:
    name, gm = joint
    starts = start_nodes(gm)
    roles = [PARAM_UNSHARD, PARAM_UNSHARD]
    roles += [GRAD_REDUCE_SHARD, GRAD_REPLICATE_REDUCE] * 2 if name == "hybrid" else [GRAD_REDUCE_SHARD] * 2
    groups = {PARAM_UNSHARD: "shards", GRAD_REDUCE_SHARD: "reducers", GRAD_REPLICATE_REDUCE: "replicas"}
    found = []
    for node in starts:
        identity = identity_of(node)
        assert identity is not None
        custom = node.meta["custom"]
        keys = {KEY, BACKWARD_KEY} if identity.role != PARAM_UNSHARD else {KEY, RESHARD_KEY}
        assert set(custom) == keys
        assert custom[KEY] == {
            "version": 1,
            "role": identity.role,
            "source": "explicit",
            "producer": "fsdp2",
            "group": groups[identity.role],
            "param_group": "block",
            "params": list(identity.params or ()),
        }
        assert custom.get(BACKWARD_KEY, custom[KEY]) == custom[KEY]
        assert runs_in_backward(node) == is_backward(node) == (identity.role != PARAM_UNSHARD)
        found.append((identity.role, identity.params))
    assert [role for role, _ in found] == roles
    assert {params for _, params in found} == {("p0",), ("p1",)}
    for node in gm.graph.nodes:
        assert node in starts or not {KEY, BACKWARD_KEY, RESHARD_KEY} & set(node.meta.get("custom") or {}), node


def test_no_reshard_mark_without_reshard() -> None:
    args = arguments(group="shards", group_size=2, reshard_after_forward=False)
    (gather, _) = start_nodes(joint_graph((2, 6), args))
    assert set(gather.meta["custom"]) == {KEY}


def test_one_rank_a_shard_group_gathers_nothing() -> None:
    """Only replicas are reduced."""
    args = arguments(replicate_group="replicas", replicate_size=4, replicate_op="avg")
    identities = [identity_of(node) for node in start_nodes(joint_graph((4, 6), args))]
    assert [identity.role for identity in identities if identity is not None] == [GRAD_REPLICATE_REDUCE]
