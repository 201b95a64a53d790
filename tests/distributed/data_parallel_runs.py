"""What runs on each rank: the same training with `data_parallel` and with what it stands for, compared."""

from __future__ import annotations

import gc
import tempfile
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from torch import nn
from torch.distributed._functional_collectives import all_gather_tensor_autograd, reduce_scatter_tensor_autograd
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.distributed.tensor.placement_types import Shard
from torch.nn.parallel import DistributedDataParallel

import collective_identity as ci
from fsdp_hooks import data_parallel, undo_data_parallel
from tests.distributed import capture_cases
from tests.distributed.capture_cases import BF16, CLASSES, Case, Model
from tests.distributed.capture_runs import compiled, train

STEPS = 10


def flat() -> DeviceMesh:
    return init_device_mesh("cpu", (dist.get_world_size(),))


@dataclass(frozen=True)
class Pair:
    """`reference` trains as PyTorch does it, `ours` shards the same model with `data_parallel`."""

    ours: Callable[[nn.Module], Any] = field(default=lambda model: data_parallel(model, flat()))
    reference: Callable[[nn.Module], Any] = field(default=lambda model: capture_cases.shard_blocks(model))
    case: Case = Case(steps=STEPS)
    tolerance: float = 0.0


def ddp(model: nn.Module) -> nn.Module:
    return DistributedDataParallel(model)


def hybrid(model: nn.Module) -> nn.Module:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    return data_parallel(model, mesh, "hybrid_shard")


def over_tensor_parallel(mode: str) -> Callable[[nn.Module], nn.Module]:
    def shard(model: nn.Module) -> nn.Module:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        for block in model.blocks:
            parallelize_module(block, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
        return data_parallel(model, mesh["dp"], mode)

    return shard


def materialised(model: nn.Module) -> nn.Module:
    """Sharded on the meta device, then filled from the model that was there."""
    torch.manual_seed(0)
    with torch.device("meta"):
        empty = Model()
    data_parallel(empty, flat()).to_empty(device="cpu")
    with torch.no_grad():
        for sharded, value in zip(empty.parameters(), model.parameters(), strict=True):
            sharded.copy_(distribute_tensor(value.detach(), sharded.device_mesh, sharded.placements))
    return empty


class Buffered(Model):
    """A buffer that forward reads and writes, and a scale that is no matrix."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(1))
        self.scale = nn.Parameter(torch.ones(1))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        self.calls.add_(1)
        return super().forward(tokens) * self.scale + self.calls * 0.01


class Scalar(Model):
    def __init__(self) -> None:
        super().__init__()
        self.temperature = nn.Parameter(torch.tensor(2.0))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return super().forward(tokens) / self.temperature


def of(build: Callable[[], nn.Module], **options: Any) -> Case:
    return Case(build=build, steps=STEPS, **options)


def with_policy(mode: str = "fully_shard", **policy: Any) -> Callable[[nn.Module], nn.Module]:
    return lambda model: data_parallel(model, flat(), mode, mp_policy=MixedPrecisionPolicy(**policy))


def fsdp2(**options: Any) -> Callable[[nn.Module], None]:
    return lambda model: capture_cases.shard_blocks(model, **options)


TWO_RANKS = {
    "uneven": Pair(),
    "kept after forward": Pair(
        lambda m: data_parallel(m, flat(), reshard_after_forward=False), fsdp2(reshard_after_forward=False)
    ),
    "one unit": Pair(lambda m: data_parallel(m, flat(), units=()), lambda m: fully_shard(m, mesh=flat())),
    "units by name": Pair(lambda m: data_parallel(m, flat(), units=["blocks.*"]), fsdp2()),
    "tied": Pair(case=of(lambda: Model(tied=True))),
    "frozen": Pair(case=of(capture_cases.frozen)),
    "checkpointed": Pair(case=of(capture_cases.checkpointed)),
    "accumulated and clipped": Pair(case=of(Model, micro_batches=2, clip=0.1)),
    "columns": Pair(
        lambda m: data_parallel(m, flat(), shard_dim=1), capture_cases.shard_columns, of(capture_cases.even)
    ),
    # FSDP2 refuses it; here the padding leaves a strided view of the full matrix, which takes another kernel
    "columns, uneven": Pair(lambda m: data_parallel(m, flat(), shard_dim=1), tolerance=1e-6),
    "buffers": Pair(case=of(Buffered)),
    "from meta": Pair(materialised),
    "bf16": Pair(with_policy(**BF16), capture_cases.mixed(**BF16)),
    "bf16, output fp32": Pair(
        with_policy(**BF16, output_dtype=torch.float32), capture_cases.mixed(**BF16, output_dtype=torch.float32)
    ),
    "fp16 reduction": Pair(
        with_policy(param_dtype=torch.float32, reduce_dtype=torch.float16),
        capture_cases.mixed(param_dtype=torch.float32, reduce_dtype=torch.float16),
    ),
    "replicated, like DDP": Pair(lambda m: data_parallel(m, flat(), "replicate"), ddp),
    "replicated, a scalar": Pair(lambda m: data_parallel(m, flat(), "replicate"), ddp, of(Scalar)),
    "replicated, bf16": Pair(with_policy("replicate", **BF16), capture_cases.mixed(**BF16)),
}

FOUR_RANKS = {
    "hybrid": Pair(hybrid, capture_cases.shard_hybrid),
    "tensor parallel": Pair(
        over_tensor_parallel("fully_shard"), capture_cases.shard_tensor_parallel, of(capture_cases.even)
    ),
    "tensor parallel, replicated": Pair(
        over_tensor_parallel("replicate"), capture_cases.shard_tensor_parallel, of(capture_cases.even)
    ),
}


def seeded(build: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    return build()


def state(model: nn.Module) -> dict[str, torch.Tensor]:
    return {
        name.removeprefix("module."): value.full_tensor() if isinstance(value, DTensor) else value.clone()
        for name, value in model.state_dict().items()
    }


def difference(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> float:
    assert a.keys() == b.keys()
    return max((a[key].float() - b[key].float()).abs().max().item() for key in a)


def relative(a: list[float], b: list[float]) -> float:
    return max(abs(x - y) / abs(x) for x, y in zip(a, b, strict=True))


def compare(rank: int, ranks: int, table: str, names: tuple[str, ...], options: dict[str, Any]) -> dict[str, Any]:
    """The differences of the compiled and of the uncompiled ("eager") run, and the report, for each named pair."""
    warnings.simplefilter("ignore")
    results = {}
    for name in names:
        pair: Pair = globals()[table][name]
        torch._dynamo.reset()
        reference = seeded(pair.case.build)
        reference = pair.reference(reference) or reference
        expected = train(reference, reference, pair.case, rank)
        wanted = state(reference)
        plain = pair.ours(seeded(pair.case.build))
        uncompiled = train(plain, plain, pair.case, rank)
        left = state(plain)
        del plain  # declared, and never compiled: no report is to expect it
        gc.collect()
        with ci.enable():
            model = pair.ours(seeded(pair.case.build))
            call = torch.compile(
                model, backend="collective_identity", fullgraph=True, options={"inner": "aot_eager", **options}
            )
            found = train(model, call, pair.case, rank)
            report = ci.report().to_dict()
        results[name] = {
            "loss": relative(expected, found),
            "param": difference(wanted, state(model)),
            "eager loss": relative(expected, uncompiled),
            "eager param": difference(wanted, left),
            "tolerance": pair.tolerance,
            "report": report,
        }
    return results


# ---- expert parallelism ------------------------------------------------------------------------------------


class Experts(nn.Module):
    """Four small experts, each sees every token; with a group, this rank holds some and the tokens travel."""

    def __init__(self, width: int = 8, count: int = 4) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.randn(count, width, width) * 0.3)
        self.group: Any = None

    def forward(self, x: torch.Tensor, gates: torch.Tensor) -> torch.Tensor:
        up = self.up.to_local() if isinstance(self.up, DTensor) else self.up
        if self.group is None:
            return torch.einsum("tw,ewv,te->tv", x, up, gates)
        first = dist.get_rank(self.group) * up.shape[0]
        tokens, gates = (all_gather_tensor_autograd(y, 0, self.group) for y in (x, gates))
        mine = torch.einsum("tw,ewv,te->tv", tokens, up, gates[:, first : first + up.shape[0]])
        return reduce_scatter_tensor_autograd(mine, "sum", 0, self.group)


class Mixture(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(CLASSES, 8)
        self.gate = nn.Linear(8, 4)
        self.experts = nn.ModuleList(Experts() for _ in range(2))
        self.head = nn.Linear(8, CLASSES)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        gates = self.gate(x).softmax(-1)
        for experts in self.experts:
            x = x + torch.tanh(experts(x, gates))
        return self.head(x)


def expert_parallel(rank: int, ranks: int) -> dict[str, Any]:
    """Dense parts over four ranks, experts over two by two, against one process that sees every batch."""

    def data(step: int, of: int) -> torch.Tensor:
        return torch.randint(0, CLASSES, (6,), generator=torch.Generator().manual_seed(10 * step + of))

    def loss_of(call: Any, tokens: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(call(tokens), tokens.roll(-1))

    whole = seeded(Mixture)
    optimizer = torch.optim.AdamW(whole.parameters(), lr=1e-2)
    expected = []
    for step in range(STEPS):
        optimizer.zero_grad()
        losses = [loss_of(whole, data(step, one)) for one in range(ranks)]
        torch.stack(losses).mean().backward()
        optimizer.step()
        expected.append(losses[rank].item())

    with ci.enable():
        model = seeded(Mixture)
        dense = init_device_mesh("cpu", (4,), mesh_dim_names=("dp",))
        sparse = init_device_mesh("cpu", (2, 2), mesh_dim_names=("edp", "ep"))
        for experts in model.experts:
            experts.group = sparse.get_group("ep")
            experts.up = nn.Parameter(distribute_tensor(experts.up.detach(), sparse["ep"], [Shard(0)]))
            data_parallel(experts, sparse["edp"], gradient_divide_factor=4)
        data_parallel(model, dense)
        call = compiled(model)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=False)
        found = []
        for step in range(STEPS):
            optimizer.zero_grad()
            loss = loss_of(call, data(step, rank))
            loss.backward()
            optimizer.step()
            found.append(loss.item())
        report = ci.report().to_dict()
    undone = undo_data_parallel(model)
    kinds = {type(experts.up.data).__name__ for experts in undone.experts}
    return {
        "loss": relative(expected, found),
        "param": difference(state(whole), state(undone)),
        "after undo": kinds,
        "report": report,
    }


# ---- what the user sees ------------------------------------------------------------------------------------


def facts(rank: int, ranks: int) -> dict[str, Any]:
    """Names, gradients, optimizer state, checkpoints into FSDP2 and back, inference, undo."""
    warnings.simplefilter("ignore")
    before = seeded(Model)
    keys, classes = list(before.state_dict()), [type(module) for module in before.modules()]
    model = data_parallel(seeded(Model), flat())
    tokens = torch.randint(0, CLASSES, (4, 5), generator=torch.Generator().manual_seed(rank))
    call = compiled(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)

    def step(one: nn.Module, its: torch.optim.Optimizer) -> None:
        its.zero_grad()
        one(tokens).square().mean().backward()
        its.step()

    found: dict[str, Any] = {"same keys": keys == list(model.state_dict())}
    found["a shard outside forward"] = isinstance(model.head.weight, DTensor)
    with torch.no_grad():
        found["no_grad"] = (call(tokens) - before(tokens)).abs().max().item()
    step(call, optimizer)
    found["DTensor gradients"] = all(isinstance(p.grad, DTensor) for p in model.parameters())
    found["DTensor optimizer state"] = all(isinstance(s["exp_avg"], DTensor) for s in optimizer.state.values())

    folder = [tempfile.mkdtemp() if rank == 0 else ""]
    dist.broadcast_object_list(folder)
    weights, state_of_optimizer = get_state_dict(model, optimizer)
    dcp.save({"model": weights, "optimizer": state_of_optimizer}, checkpoint_id=folder[0])
    step(call, optimizer)
    others = {
        "FSDP2": lambda m: capture_cases.shard_blocks(m) or m,
        "itself": lambda m: data_parallel(m, flat()),
        "replicated": lambda m: data_parallel(m, flat(), "replicate"),
    }
    for name, shard in others.items():
        other = shard(Model())
        its = torch.optim.AdamW(other.parameters(), lr=1e-2)
        weights, state_of_optimizer = get_state_dict(other, its)
        loaded = {"model": weights, "optimizer": state_of_optimizer}
        dcp.load(loaded, checkpoint_id=folder[0])
        set_state_dict(other, its, model_state_dict=loaded["model"], optim_state_dict=loaded["optimizer"])
        step(other, its)
        found[f"checkpoint into {name}"] = difference(state(model), state(other))
    wanted = state(model)
    undo_data_parallel(model)
    found["undo"] = difference(wanted, model.state_dict())
    found["plain after undo"] = not any(isinstance(p, DTensor) for p in model.parameters())
    found["classes after undo"] = classes == [type(module) for module in model.modules()]
    return found
