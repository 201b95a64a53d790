"""Every FSDP2 option, each as one row: how it is set, how the model is trained with it, what it means when captured."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed.fsdp as fsdp
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_state import FSDPState
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from tests.distributed.own_gather import Float8Gathered

WIDTH, OUT = 6, 4
ONE_GROUP = "no parameter in two groups"  # torch 2.12 and later check it; 2.11 unties such a parameter


class Block(nn.Module):
    def __init__(self, kind: str = "") -> None:
        super().__init__()
        self.kind = kind
        self.up = nn.Linear(WIDTH, 7)  # odd on purpose: its shards are uneven
        self.down = nn.Linear(7, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.kind == "checkpoint inside":
            return x + checkpoint(self.inside, x, use_reentrant=False)
        if self.kind == "selective":
            return x + checkpoint(self.inside, x, use_reentrant=False, context_fn=selective_contexts)
        return x + self.inside(x)

    def inside(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(F.gelu(self.up(x)))

    def encode(self, x: torch.Tensor) -> torch.Tensor:
        return x - self.inside(x)


class Shift(nn.Module):
    """Its parameter's value is not needed in backward."""

    def __init__(self) -> None:
        super().__init__()
        self.by = nn.Parameter(torch.zeros(WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.by


class Model(nn.Module):
    """Two blocks, a norm and a head; `kind` changes how forward uses them."""

    def __init__(self, kind: str = "") -> None:
        super().__init__()
        self.kind = kind
        self.blocks = nn.ModuleList(Block(kind) for _ in range(2))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, OUT, bias=False)
        if kind == "buffers":
            self.register_buffer("scale", torch.full((WIDTH,), 0.5))
            self.norm = nn.BatchNorm1d(WIDTH)
        if kind == "shift":
            self.shift = Shift()
        if kind.startswith("tied"):
            self.blocks[1].up.weight = self.blocks[0].up.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first, second = self.blocks
        if self.kind == "buffers":
            x = x * self.scale
        if self.kind == "shift":
            x = self.shift(x)
        if self.kind == "registered":
            x = first.encode(x)
        else:
            x = first(x)
        if self.kind == "several times":
            x = first(x)
        if self.kind != "conditional" or x.shape[0] != 4:
            x = second(x)
        if self.kind == "graph break":
            torch._dynamo.graph_break()
        return self.head(self.norm(x))


def selective_contexts() -> Any:
    def policy(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        save = op in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)
        return CheckpointPolicy.MUST_SAVE if save else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)


Models = Callable[[], nn.Module]
Setter = Callable[[nn.Module], None]
BeforeForward = Callable[[nn.Module, int, int], None]


@dataclass(frozen=True)
class Row:
    """One line of the table.

    `covers` names what it tests: ``fully_shard(mesh)``, ``FSDPModule.reshard``, ``MixedPrecisionPolicy.param_dtype``.
    `build` makes the sharded model; `before` runs before each forward with ``(model, step, micro-batch)``. A row with
    `refuse` is refused: by install, or, where `refuse` does more than build, by what it calls on an installed model.
    Rows that differ in their words alone share a run: together their options are as in eager, so each is.
    `exact` is False where the last bits differ, `declared` where a step issues more or less than one
    pass through every module.
    """

    option: str
    covers: tuple[str, ...]
    meaning: str
    build: Models = lambda: sharded()
    eager: Models | None = None
    before: BeforeForward = lambda model, step, micro: None
    refuse: Setter | None = None
    ranks: int = 2
    micro_batches: int = 1
    optimizer: Callable[..., torch.optim.Optimizer] = torch.optim.AdamW
    extra: str = ""
    fullgraph: bool = True
    exact: bool = True
    declared: bool = True


def mesh_of(*shape: int) -> Any:
    world = torch.distributed.get_world_size()
    names = ("replicate", "shard")[-max(len(shape), 1) :]
    return init_device_mesh("cpu", shape or (world,), mesh_dim_names=names)


def sharded(kind: str = "", *, mesh: Any = None, root: dict[str, Any] | None = None, **options: Any) -> nn.Module:
    torch.manual_seed(0)
    model = Model(kind)
    mesh = mesh or mesh_of()
    for block in () if kind == "tied" else model.blocks:
        fully_shard(block, mesh=mesh, **options)
    return fully_shard(model, mesh=mesh, **({**options, **root} if root is not None else options))


def after(setter: Setter, build: Models = lambda: sharded()) -> Models:
    def built() -> nn.Module:
        model = build()
        setter(model)
        return model

    return built


def blocks(method: str, *args: Any) -> Setter:
    def call(model: nn.Module) -> None:
        for module in model.modules():
            if isinstance(module, FSDPModule):
                getattr(module, method)(*args)

    return call


def without_unshard_in_backward() -> nn.Module:
    torch.manual_seed(0)
    model = Model("shift")
    for module in (model.shift, *model.blocks, model):
        fully_shard(module, mesh=mesh_of(), reshard_after_forward=True)
    model.shift.set_unshard_in_backward(False)
    return model


def grouped(kind: str = "") -> nn.Module:
    torch.manual_seed(0)
    model = Model(kind)
    mesh = mesh_of()
    fully_shard(list(model.blocks), mesh=mesh)
    fully_shard([model.norm, model.head], mesh=mesh)
    return fully_shard(model, mesh=mesh)


def meta_then_materialised() -> nn.Module:
    with torch.device("meta"):
        model = Model()
    for block in model.blocks:
        fully_shard(block, mesh=mesh_of())
    fully_shard(model, mesh=mesh_of())
    model.to_empty(device="cpu")
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            whole = torch.randn(parameter.shape, generator=generator) * 0.3
            parameter.copy_(distribute_tensor(whole, parameter.device_mesh, parameter.placements, src_data_rank=None))
    return model


def ignoring() -> nn.Module:
    torch.manual_seed(0)
    model = Model()
    model.norm.requires_grad_(False)
    ignored = set(model.norm.parameters())
    for block in model.blocks:
        fully_shard(block, mesh=mesh_of(), ignored_params=ignored)
    return fully_shard(model, mesh=mesh_of(), ignored_params=ignored)


def one_rank() -> nn.Module:
    alone = init_device_mesh("cpu", (torch.distributed.get_world_size(), 1), mesh_dim_names=("all", "one"))["one"]
    return sharded(mesh=alone)


def tensor_parallel() -> nn.Module:
    torch.manual_seed(0)
    model = Model()
    for block in model.blocks:
        block.up, block.down = nn.Linear(WIDTH, 8), nn.Linear(8, WIDTH)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    for block in model.blocks:
        parallelize_module(block, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
        fully_shard(block, mesh=mesh["dp"])
    return fully_shard(model, mesh=mesh["dp"])


def registered() -> nn.Module:
    model = sharded("registered")
    fsdp.register_fsdp_forward_method(model.blocks[0], "encode")
    return model


HINTS = {
    "set_modules_to_forward_prefetch": "the graph has an order of its own",
    "set_modules_to_backward_prefetch": "the graph has an order of its own",
    "set_is_last_backward": "it frees eager FSDP2's own state",
    "set_post_optim_event": "the graph runs on the current stream",
    "set_reduce_scatter_max_input_buffers": "eager FSDP2's buffers",
    "set_allocate_memory_from_process_group_for_comm": "the compiler allocates buffers",
}


def hinted() -> nn.Module:
    """Every hint that the installed torch has, on one model: none may have an effect."""
    model = sharded()
    first, second = model.blocks
    given: dict[str, tuple[tuple[nn.Module, Any], ...]] = {
        "set_modules_to_forward_prefetch": ((model, [first]), (first, [second])),
        "set_modules_to_backward_prefetch": ((model, [second]),),
        "set_is_last_backward": ((model, True),),
        "set_post_optim_event": ((model, torch.cpu.current_stream().record_event()),),
        "set_reduce_scatter_max_input_buffers": ((model, 2),),
        "set_allocate_memory_from_process_group_for_comm": ((first, True), (second, True), (model, True)),
    }
    for name, calls in given.items():
        for module, value in calls:
            if hasattr(module, name):
                getattr(module, name)(value)
    if hasattr(fsdp, "share_comm_ctx"):
        fsdp.share_comm_ctx([model])
    return model


def no_sync(model: nn.Module, step: int, micro: int) -> None:
    model.set_requires_gradient_sync(micro == 2)


def no_all_reduce(model: nn.Module, step: int, micro: int) -> None:
    model.set_requires_all_reduce(micro == 2)


def no_sync_then_no_all_reduce(model: nn.Module, step: int, micro: int) -> None:
    model.set_requires_gradient_sync(micro > 0)
    model.set_requires_all_reduce(micro == 2)


def toggling_reshard(model: nn.Module, step: int, micro: int) -> None:
    if step in (0, 5):
        model.set_reshard_after_forward(step == 5)


def changing_factor(model: nn.Module, step: int, micro: int) -> None:
    if step == 5:
        model.set_force_sum_reduction_for_comms(True)
        model.set_gradient_divide_factor(3.0)


def spmd() -> nn.Module:
    torch.manual_seed(0)
    model = Model()
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("dp", "tp"))
    for module in model.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            value = distribute_tensor(parameter.detach(), mesh, [Replicate(), Replicate()])
            module.register_parameter(name, nn.Parameter(value))
    dims = fsdp.DataParallelMeshDims(shard="dp", replicate=None)
    return fully_shard(model, mesh=mesh, dp_mesh_dims=dims)


def float8_gathered() -> nn.Module:
    """Trains with eager FSDP2, which gathers one weight with float8's few values."""
    torch.manual_seed(0)
    model = Model()
    weight = model.blocks[0].down.weight
    model.blocks[0].down.weight = nn.Parameter(Float8Gathered(weight.detach()))
    for block in model.blocks:
        fully_shard(block, mesh=mesh_of())
    fully_shard(model, mesh=mesh_of())
    model(torch.ones(4, WIDTH)).sum().backward()
    assert model.blocks[0].down.weight.grad is not None
    model.blocks[0].unshard()
    error = (model.blocks[0].down.weight - weight).abs().max()
    assert 0 < error < weight.abs().max() / 8
    model.blocks[0].reshard()
    return model


def foreach(params: Any, lr: float) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=lr, foreach=True)


def fused(params: Any, lr: float) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=lr, fused=True)


BF16 = {"param_dtype": torch.bfloat16, "reduce_dtype": torch.float32}


def mixed(output: torch.dtype | None = None, **policy: Any) -> nn.Module:
    root = {"mp_policy": MixedPrecisionPolicy(output_dtype=output, **policy)}
    return sharded(mp_policy=MixedPrecisionPolicy(**policy), root=root)


def surface() -> set[str]:
    """Everything that a user of the installed torch can set: what the table must cover."""
    found = {f"fully_shard({name})" for name in inspect.signature(fully_shard).parameters}
    found |= {f"FSDPModule.{name}" for name, value in vars(FSDPModule).items() if name[0] != "_" and callable(value)}
    names = ("MixedPrecisionPolicy", "OffloadPolicy", "CPUOffloadPolicy", "DataParallelMeshDims")
    for policy in (getattr(fsdp, name) for name in names if hasattr(fsdp, name)):
        found |= {f"{policy.__name__}.{field.name}" for field in dataclasses.fields(policy)}
    public = torch.distributed.fsdp._fully_shard
    functions = {name for name in public.__all__ if inspect.isfunction(getattr(public, name))} - {"fully_shard"}
    if hasattr(FSDPState, "_validate_no_duplicate_params"):
        found.add(ONE_GROUP)
    return found | functions


def option(name: str) -> tuple[str, ...]:
    return (f"FSDPModule.{name}",)


EQUAL: tuple[Row, ...] = (
    Row("fully_shard(module)", ("fully_shard(module)",), "one gather and one reduction a parameter, then bucketed"),
    Row("fully_shard(mesh=2D), HSDP", ("fully_shard(mesh)",), "reduce-scatter, then all-reduce over the replicas",
        build=lambda: sharded(mesh=mesh_of(2, 2)), ranks=4),
    Row("fully_shard([a, b])", ("fully_shard(module)",), "one unit: open from the first module to the last",
        build=grouped),
    Row("reshard_after_forward=True", ("fully_shard(reshard_after_forward)",), "gathered again in backward",
        build=lambda: sharded(reshard_after_forward=True)),
    Row("reshard_after_forward=False", ("fully_shard(reshard_after_forward)",), "kept until backward",
        build=lambda: sharded(reshard_after_forward=False)),
    Row("reshard_after_forward=<int>", ("fully_shard(reshard_after_forward)",),
        "as True: gathered again over the whole shard group, not a smaller one", ranks=4,
        build=lambda: sharded(reshard_after_forward=2)),
    Row("shard_placement_fn", ("fully_shard(shard_placement_fn)",), "any dimension FSDP2 accepts",
        build=lambda: sharded(shard_placement_fn=lambda p: Shard(1) if p.ndim == 2 and p.shape[1] == WIDTH else None)),
    Row("MixedPrecisionPolicy(param_dtype, reduce_dtype)",
        ("fully_shard(mp_policy)", "MixedPrecisionPolicy.param_dtype", "MixedPrecisionPolicy.reduce_dtype"),
        "gathered in one dtype, reduced in the other", build=lambda: mixed(**BF16)),
    Row("MixedPrecisionPolicy(param_dtype), reduced in it", ("MixedPrecisionPolicy.param_dtype",),
        "gathered and reduced in it", build=lambda: mixed(param_dtype=torch.bfloat16)),
    Row("MixedPrecisionPolicy(output_dtype)", ("MixedPrecisionPolicy.output_dtype",), "the module's outputs are cast",
        build=lambda: mixed(torch.float32, **BF16)),
    Row("MixedPrecisionPolicy(cast_forward_inputs=False)", ("MixedPrecisionPolicy.cast_forward_inputs",),
        "inputs stay as they are", build=lambda: mixed(param_dtype=torch.float32, cast_forward_inputs=False)),
    Row("offload_policy=CPUOffloadPolicy(pin_memory=False)",
        ("fully_shard(offload_policy)", "CPUOffloadPolicy.pin_memory"),
        "shards move to the device in the graph; run here on a CPU mesh only",
        build=lambda: sharded(offload_policy=CPUOffloadPolicy(pin_memory=False))),
    Row("ignored_params", ("fully_shard(ignored_params)",), "read as they are", build=ignoring),
    Row("set_requires_gradient_sync", option("set_requires_gradient_sync"),
        "the gradient waits unsharded; the step that reduces takes it as an input", before=no_sync, micro_batches=3),
    Row("set_requires_gradient_sync, bf16 reduced in fp32", option("set_requires_gradient_sync"),
        "it waits in the reduction's dtype", build=lambda: mixed(**BF16), before=no_sync, micro_batches=3),
    Row("set_requires_all_reduce, HSDP", option("set_requires_all_reduce"), "the reduced shard waits", ranks=4,
        build=lambda: sharded(mesh=mesh_of(2, 2)), before=no_all_reduce, micro_batches=3),
    Row("both, HSDP", (*option("set_requires_gradient_sync"), *option("set_requires_all_reduce")),
        "first unsharded, then reduced over the shards, then all", ranks=4,
        build=lambda: sharded(mesh=mesh_of(2, 2)), before=no_sync_then_no_all_reduce, micro_batches=3),
    Row("set_reshard_after_forward", option("set_reshard_after_forward"), "also after install: another graph",
        before=toggling_reshard),
    Row("set_reshard_after_backward(False)", option("set_reshard_after_backward"),
        "no effect: every captured forward gathers the parameters as they are", micro_batches=3,
        before=lambda model, step, micro: model.set_reshard_after_backward(micro == 2)),
    Row("set_gradient_divide_factor, a custom factor", option("set_gradient_divide_factor"),
        "divided before a sum, where NCCL has PREMUL_SUM; here against eager's forced sum, as gloo has none",
        build=after(blocks("set_gradient_divide_factor", 4.0)),
        eager=after(blocks("set_force_sum_reduction_for_comms", True),
                    after(blocks("set_gradient_divide_factor", 4.0)))),
    Row("set_gradient_divide_factor after install", option("set_gradient_divide_factor"), "another graph",
        before=changing_factor),
    Row("set_reduce_scatter_divide_factor", option("set_reduce_scatter_divide_factor"), "the same, by its older name",
        build=after(blocks("set_reduce_scatter_divide_factor", 2.0))),
    Row("set_force_sum_reduction_for_comms, factor 3", option("set_force_sum_reduction_for_comms"),
        "a sum, divided after it", build=after(blocks("set_force_sum_reduction_for_comms", True),
                                               after(blocks("set_gradient_divide_factor", 3.0)))),
    Row("set_unshard_in_backward(False)", option("set_unshard_in_backward"),
        "no effect: backward gathers again what it reads and nothing else",
        build=without_unshard_in_backward),
    *(Row(name, option(name), f"no effect: {why}", build=hinted) for name, why in HINTS.items()),
    Row("set_separate_reduce_scatter_group", option("set_separate_reduce_scatter_group"),
        "reduce-scatters carry that group", build=after(lambda m: m.set_separate_reduce_scatter_group(True))),
    Row("reshard()", option("reshard"), "nothing to do: full parameters live within a forward",
        before=lambda model, step, micro: model.reshard()),
    Row("reset_iter_state()", option("reset_iter_state"), "closes what is open, forgets gradients that wait",
        before=lambda model, step, micro: model.reset_iter_state() if step else None),
    Row("register_fsdp_forward_method", ("register_fsdp_forward_method",), "the method opens the unit as forward does",
        build=registered),
    Row("share_comm_ctx", ("share_comm_ctx",), "no effect: eager FSDP2's streams", build=hinted),
    Row("a meta-device model, materialised before install", (), "as any other", build=meta_then_materialised),
    Row("buffers", (), "read as they are", build=lambda: sharded("buffers")),
    Row("a parameter that two modules share", (), "one gather, one reduction", build=lambda: sharded("tied")),
    Row("a parameter shared across the modules of fully_shard([a, b])", (), "one gather, one reduction",
        build=lambda: grouped("tied")),
    Row("checkpoint inside a fully_shard module", (), "recomputed in backward with the gathered parameters",
        build=lambda: sharded("checkpoint inside")),
    Row("selective checkpoint", (), "the same, as the policy says", build=lambda: sharded("selective")),
    Row("a module that runs several times", (), "gathers and reduces each time; eager FSDP2 adds, then reduces once",
        build=lambda: sharded("several times"), exact=False, declared=False),
    Row("a module that runs conditionally", (), "one graph for each case", build=lambda: sharded("conditional"),
        extra="shapes", declared=False),
    Row("a graph break in user code", (), "every piece is captured", build=lambda: sharded("graph break"),
        fullgraph=False),
    Row("no_grad between training steps", (), "another graph", extra="no_grad, ema"),
    Row("an EMA copy of the parameters", (), "outside forward parameters are FSDP2's shards", extra="no_grad, ema"),
    Row("clip_grad_norm_", (), "gradients are FSDP2's DTensors", extra="clip", optimizer=foreach),
    Row("AdamW(foreach=True)", (), "the optimizer sees FSDP2's shards", extra="clip", optimizer=foreach),
    Row("GradScaler", (), "gradients are FSDP2's DTensors", extra="scaler", optimizer=fused),
    Row("AdamW(fused=True)", (), "the optimizer sees FSDP2's shards", extra="scaler", optimizer=fused),
    Row("a mesh of one rank", ("fully_shard(mesh)",), "nothing to gather, nothing to reduce", build=one_rank),
    Row("tensor-parallel parameters (DTensors)", (), "gathered over the data-parallel axis", build=tensor_parallel,
        ranks=4),
)


def installed(method: str, *args: Any) -> Setter:
    return lambda model: getattr(model, method)(*args)


REFUSED: tuple[Row, ...] = (
    Row("set_custom_all_gather", option("set_custom_all_gather"), "",
        build=after(lambda m: m.blocks[0].set_custom_all_gather(object())), refuse=lambda model: None),
    Row("set_custom_reduce_scatter", option("set_custom_reduce_scatter"), "",
        build=after(lambda m: m.blocks[0].set_custom_reduce_scatter(object())), refuse=lambda model: None),
    Row("set_all_reduce_hook", option("set_all_reduce_hook"), "",
        build=after(lambda m: m.blocks[0].set_all_reduce_hook(lambda x: None)), refuse=lambda model: None),
    Row("set_reduce_scatter_unused_params(True)", option("set_reduce_scatter_unused_params"), "",
        build=after(lambda m: m.set_reduce_scatter_unused_params(True)), refuse=lambda model: None),
    Row("set_symm_mem_for_comm", option("set_symm_mem_for_comm"), "", refuse=installed("set_symm_mem_for_comm")),
    Row("unshard()", option("unshard"), "", refuse=installed("unshard")),
    Row("dp_mesh_dims", ("fully_shard(dp_mesh_dims)", "DataParallelMeshDims.shard", "DataParallelMeshDims.replicate"),
        "", build=spmd, refuse=lambda model: None),
    Row("fsdp_pre_all_gather, fsdp_post_all_gather (float8)", (), "", build=float8_gathered, refuse=lambda model: None),
    Row("a parameter shared across groups", (ONE_GROUP,), "", refuse=lambda model: None,
        build=lambda: sharded("tied across")),
    Row("a model on the meta device", (), "", refuse=lambda model: None,
        build=lambda: fully_shard(nn.Linear(4, 4, device="meta"), mesh=mesh_of())),
    Row("set_keep_unsharded_storage(True)", option("set_keep_unsharded_storage"), "",
        refuse=installed("set_keep_unsharded_storage", True)),
    Row("set_manual_backward_finalization(True)", option("set_manual_backward_finalization"), "",
        refuse=installed("set_manual_backward_finalization", True)),
    Row("finalize_backward()", option("finalize_backward"), "", refuse=installed("finalize_backward")),
)


def same_run(row: Row) -> Row:
    """What a row runs, without its words."""
    return dataclasses.replace(row, option="", covers=(), meaning="")


def rows(ranks: int | None = None) -> list[Row]:
    """The rows that the installed torch has."""
    there = surface()
    return [r for r in (*EQUAL, *REFUSED) if {*r.covers} <= there and ranks in (None, r.ranks)]
