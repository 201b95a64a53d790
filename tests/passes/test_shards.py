"""Parameters that a captured graph reads only as this rank's shard reach AOTAutograd as plain tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import fx, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard

import collective_identity as ci
import fsdp_hooks
import inductor_passes  # noqa: F401  (makes the backend known)
from inductor_passes.shards import take_shards

pytestmark = pytest.mark.usefixtures("fake_world")


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    """No code of another test, and a session that asks no other rank: there is none."""
    torch._dynamo.reset()
    with ci.enable(agreement_timeout=0):
        yield


def sharded(width: int = 6) -> nn.Linear:
    """A layer of 6 rows, over 4 ranks: this rank, the first, has 2 of them."""
    torch.manual_seed(0)
    return fully_shard(nn.Linear(8, width), mesh=init_device_mesh("cpu", (4,)))


class Seen:
    """A Dynamo backend that takes shards, keeps what it saw and runs the graph as it is."""

    def __init__(self) -> None:
        self.graph: fx.Graph
        self.given: list[Any]
        self.places: tuple[int, ...]

    def __call__(self, gm: fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
        self.given, self.places = take_shards(gm, inputs)
        self.graph = gm.graph
        gm.graph.lint()
        return lambda *args: (torch.zeros(()),)


def captured(run: Callable[[Any], torch.Tensor], value: Any) -> Seen:
    seen = Seen()
    torch.compile(run, backend=seen, fullgraph=True)(value)
    return seen


def test_an_uneven_shard_is_given_as_it_is() -> None:
    weight = sharded().weight
    seen = captured(lambda w: w.to_local().sum(), weight)
    (shard,) = (seen.given[place] for place in seen.places)
    assert type(shard) is not DTensor and shard.shape == (2, 8) and shard.dtype == torch.float32
    assert shard.is_leaf and shard.requires_grad
    names = [node.name for node in seen.graph.nodes if "to_local" in str(node.target)]
    assert names == [], "the placeholder itself is the shard"


def test_a_parameter_read_twice_is_given_once() -> None:
    seen = captured(lambda w: w.to_local().sum() + w.to_local().mean(), sharded().weight)
    assert len(seen.places) == 1


@pytest.mark.parametrize(
    "run",
    [
        lambda w: w.to_local(grad_placements=[Shard(0)]).sum(),
        lambda w: w.to_local().sum() + (w * 2).to_local().sum(),
        lambda w: w.redistribute(placements=[Replicate()]).to_local().sum(),
    ],
    ids=["other placements of the gradient", "an operator on the whole", "redistributed"],
)
def test_what_is_read_otherwise_is_left(run: Callable[[Any], torch.Tensor]) -> None:
    assert captured(run, sharded().weight).places == ()


def test_what_wants_no_gradient_is_left() -> None:
    layer = sharded()
    layer.weight.requires_grad_(False)
    assert captured(lambda w: w.to_local().sum(), layer.weight).places == ()
    assert captured(lambda w: w.to_local().sum(), layer.bias * 2).places == (), "no parameter"


def test_where_dynamo_traces_backward_as_well_all_is_left() -> None:
    with torch._dynamo.config.patch(compiled_autograd=True):
        assert captured(lambda w: w.to_local().sum(), sharded().weight).places == ()


@pytest.mark.parametrize("inner", ["aot_eager", "inductor"])
def test_gradients_reach_the_parameters(inner: str) -> None:
    model = nn.Sequential(sharded(), nn.Unflatten(-1, (6, 1)))
    model[0].bias.requires_grad_(False)
    fsdp_hooks.install(model)
    weight = model[0].weight
    options = {} if inner == "inductor" else {"inner": inner}
    call = torch.compile(model, backend="collective_identity", fullgraph=True, options=options)
    call(torch.ones(3, 8)).sum().backward()
    first = weight.grad
    assert model[0].bias.grad is None
    assert type(first) is DTensor and first.shape == weight.shape and first.placements == weight.placements
    assert first.to_local().shape == weight.to_local().shape == (2, 8)
    place = first.to_local().data_ptr()  # no values: a pretended world leaves them as they lie in memory
    call(torch.ones(3, 8)).sum().backward()
    assert weight.grad is first and first.to_local().data_ptr() == place
    with torch.no_grad():
        assert not call(torch.ones(3, 8)).requires_grad
    assert weight.to_local().grad_fn is not None and weight._local_tensor.grad_fn is None


class Shifted(nn.Module):
    """Two vectors that are added: their gradients are equal."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Parameter(torch.zeros(8)), nn.Parameter(torch.zeros(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.first + self.second


@pytest.mark.parametrize("inner", ["aot_eager", "inductor"])
def test_equal_gradients_share_no_memory(inner: str) -> None:
    model = fully_shard(Shifted(), mesh=init_device_mesh("cpu", (4,)))
    fsdp_hooks.install(model)
    options = {} if inner == "inductor" else {"inner": inner}
    torch.compile(model, backend="collective_identity", fullgraph=True, options=options)(torch.ones(8)).sum().backward()
    first, second = (param.grad.to_local() for param in model.parameters())
    first.fill_(1.0)
    second.fill_(2.0)
    assert first.tolist() == [1.0, 1.0] and second.tolist() == [2.0, 2.0]
