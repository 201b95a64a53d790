"""`data_parallel` in a fake world of four ranks: layouts, units, what it refuses, and that undo undoes."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import fsdp_hooks
from collective_identity import GRAD_REDUCE_SHARD, GRAD_REPLICATE_REDUCE, PARAM_UNSHARD, session
from fsdp_hooks import InstallError, data_parallel, undo_data_parallel
from fsdp_hooks.data_parallel_record import RECORD, data_parallel_specs

pytestmark = pytest.mark.usefixtures("fake_world")


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(10, 6)
        self.layers = nn.ModuleList([nn.Linear(6, 6), nn.Sequential(nn.Linear(6, 6), nn.GELU())])
        self.head = nn.Linear(6, 10, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def flat() -> DeviceMesh:
    return init_device_mesh("cpu", (4,), mesh_dim_names=("dp",))


def square(*names: str) -> DeviceMesh:
    return init_device_mesh("cpu", (2, 2), mesh_dim_names=names or ("replicate", "shard"))


def groups(model: nn.Module) -> dict[str, str]:
    return {spec.fqn: spec.args.param_group for spec in data_parallel_specs(model)}


# ---- layouts -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("mode", "mesh", "placements", "local"),
    [
        ("fully_shard", flat, (Shard(0),), (3, 6)),
        ("hybrid_shard", square, (Replicate(), Shard(0)), (5, 6)),
        ("replicate", flat, (Replicate(),), (10, 6)),
    ],
)
def test_parameters_lie_as_the_mode_says(mode: str, mesh: Any, placements: Any, local: tuple[int, ...]) -> None:
    plain = Model()
    model = data_parallel(Model(), mesh(), mode)
    weight = model.head.weight
    assert isinstance(weight, nn.Parameter) and isinstance(weight, DTensor)
    assert (weight.placements, weight.to_local().shape, weight.shape) == (placements, local, (10, 6))
    assert list(model.state_dict()) == list(plain.state_dict())


def test_layouts_are_those_of_fully_shard() -> None:
    """Uneven, even and empty shards, mesh and placements, over tensor parallelism too."""

    def lay(parallel: bool, shard: Callable[[nn.Module, DeviceMesh], Any]) -> list[Any]:
        model, mesh = Model(), flat()
        if parallel:
            two = square("dp", "tp")
            for name, placement in (("embed", Shard(0)), ("head", Shard(1))):
                module = getattr(model, name)
                module.weight = nn.Parameter(distribute_tensor(module.weight.detach(), two["tp"], [placement]))
            mesh = two["dp"]
        shard(model, mesh)
        return [
            (name, p.device_mesh, p.placements, p.shape, p.stride(), p.to_local().shape, p.to_local().stride())
            for name, p in model.named_parameters()
        ]

    for parallel in (False, True):
        ours = lay(parallel, data_parallel)
        assert ours == lay(parallel, lambda model, mesh: fully_shard(model, mesh=mesh))
        assert len(ours) == 6


def test_the_shard_owns_its_memory() -> None:
    model = data_parallel(Model(), flat())
    local = model.embed.weight.to_local()
    assert local.untyped_storage().nbytes() == local.numel() * local.element_size()


def test_shard_dim_applies_where_the_parameter_has_it() -> None:
    model = data_parallel(Model(), flat(), shard_dim=1)
    assert model.embed.weight.placements == (Shard(1),) and model.layers[0].bias.placements == (Shard(0),)


def test_mixed_precision_and_divide_factor_reach_the_plan() -> None:
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    model = Model()
    model.register_parameter("index", nn.Parameter(torch.arange(4), requires_grad=False))
    data_parallel(model, flat(), mp_policy=policy, gradient_divide_factor=8)
    specs = {spec.fqn: spec.args for spec in data_parallel_specs(model)}
    head = specs["head.weight"]
    assert (head.param_dtype, head.reduce_dtype, head.reduce_op, head.postdivide) == (
        torch.bfloat16,
        torch.float32,
        "sum",
        8.0,
    )
    assert specs["index"].param_dtype is None, "an integer parameter is not cast"
    assert head.producer == "data_parallel"


def test_attributes_and_frozen_parameters_are_kept() -> None:
    model = Model()
    model.head.weight.decay = False  # type: ignore[attr-defined]
    model.embed.weight.requires_grad_(False)
    data_parallel(model, flat())
    assert model.head.weight.decay is False and not model.embed.weight.requires_grad
    expected = fsdp_hooks.expected_collectives(model)
    counts = {(row.role, row.phase): 0 for row in expected.rows}
    for row in expected.rows:
        counts[row.role, row.phase] += row.count or 0
    assert counts[PARAM_UNSHARD, "forward"] == 6 and counts[GRAD_REDUCE_SHARD, "backward"] == 5


def test_replicas_alone_expect_all_reduces_alone() -> None:
    expected = fsdp_hooks.expected_collectives(data_parallel(Model(), flat(), "replicate"))
    assert {(row.role, row.phase) for row in expected.rows} == {(GRAD_REPLICATE_REDUCE, "backward")}


# ---- units -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("units", "blocks"),
    [
        (None, {"layers.0", "layers.1"}),
        ((), set()),
        (["layers.*"], {"layers.0", "layers.1", "layers.1.0"}),
        ([nn.Linear], {"layers.0", "layers.1.0", "head"}),
        (["head", nn.Embedding], {"head", "embed"}),
    ],
    ids=["elements of lists", "none", "names", "class", "both"],
)
def test_units(units: Any, blocks: set[str]) -> None:
    assert set(groups(data_parallel(Model(), flat(), units=units)).values()) - {""} == blocks - (
        {"layers.1"} if "layers.1.0" in blocks else set()
    )


def test_a_module_can_be_a_unit() -> None:
    model = Model()
    assert set(groups(data_parallel(model, flat(), units=[model.layers[1]])).values()) == {"", "layers.1"}


def test_reshard_is_fsdp2s_choice_unless_said() -> None:
    def marks(**options: Any) -> dict[str, bool]:
        specs = data_parallel_specs(data_parallel(Model(), flat(), **options))
        return {spec.args.param_group: spec.args.reshard_after_forward for spec in specs}

    assert marks() == {"": False, "layers.0": True, "layers.1": True}
    assert set(marks(reshard_after_forward=True).values()) == {True}
    assert set(marks(reshard_after_forward=False).values()) == {False}


def test_a_tied_parameter_belongs_to_the_unit_around_both() -> None:
    model = Model()
    model.layers[1][0].weight = model.layers[0].weight
    data_parallel(model, flat())
    assert model.layers[1][0].weight is model.layers[0].weight
    assert groups(model)["layers.0.weight"] == "" and groups(model)["layers.0.bias"] == "layers.0"


def test_ignored_parameters_stay() -> None:
    model = Model()
    kept = model.embed.weight
    data_parallel(model, flat(), ignored_params={kept})
    assert model.embed.weight is kept and "embed.weight" not in groups(model)


def test_lists_of_lists_are_one_list() -> None:
    model = Model()
    model.layers = nn.ModuleList([nn.ModuleList([nn.Linear(6, 6)]), nn.ModuleList([nn.Linear(6, 6)])])
    assert set(groups(data_parallel(model, flat())).values()) == {"", "layers.0.0", "layers.1.0"}


# ---- running, nesting, undoing -----------------------------------------------------------------------------


def test_reads_are_full_inside_forward_alone() -> None:
    """Also of a block's parameter that the model reads without calling the block."""
    seen: list[Any] = []

    class Reads(Model):
        def forward(self, tokens: torch.Tensor) -> torch.Tensor:
            seen.extend([self.head.weight, self.layers[0].weight])
            return super().forward(tokens)

    model = data_parallel(Reads(), flat())
    model(torch.zeros(2, dtype=torch.long))
    assert [(type(one).__name__, tuple(one.shape)) for one in seen] == [("Tensor", (10, 6)), ("Tensor", (6, 6))]
    assert isinstance(model.layers[0].weight, DTensor)


def test_a_forward_set_on_the_instance_is_called_and_given_back() -> None:
    model = Model()
    calls: list[str] = []
    inner, own = model.forward, lambda tokens: calls.append("own") or inner(tokens)
    model.forward = own  # type: ignore[method-assign]
    data_parallel(model, flat())(torch.zeros(2, dtype=torch.long))
    assert calls == ["own"]
    assert undo_data_parallel(model).__dict__["forward"] is own


def test_inner_modules_first_then_the_model() -> None:
    """Another mesh for a part; in the whole its units and parameters go by their full names."""
    model = Model()
    data_parallel(model.layers[1], square()["shard"])
    assert groups(model) == {"0.weight": "", "0.bias": ""}
    data_parallel(model, flat())
    assert {k: v for k, v in groups(model).items() if v.startswith("layers.1")} == {
        "layers.1.0.weight": "layers.1",
        "layers.1.0.bias": "layers.1",
    }
    assert model.layers[1][0].weight.device_mesh.size() == 2
    expected = fsdp_hooks.expected_collectives(model)
    assert sum(row.count or 0 for row in expected.rows if row.phase == "forward") == 6
    report = session.ensure().report().to_dict()["collectives"]["expected"]
    assert report[PARAM_UNSHARD]["forward"] == 6, "the part is not counted twice"


def test_undo_leaves_nothing_behind() -> None:
    plain = Model()
    classes, attributes = [type(m) for m in plain.modules()], [sorted(m.__dict__) for m in plain.modules()]
    model = Model()
    data_parallel(model.layers[1], square()["shard"])
    undo_data_parallel(data_parallel(model, flat()))
    assert [type(m) for m in model.modules()] == classes
    assert [sorted(m.__dict__) for m in model.modules()] == attributes
    assert [(n, p.shape, type(p)) for n, p in model.named_parameters()] == [
        (n, p.shape, type(p)) for n, p in plain.named_parameters()
    ]
    data_parallel(model, flat(), "replicate")


def test_meta_parameters_wait_for_their_values() -> None:
    with torch.device("meta"):
        model = Model()
    data_parallel(model, flat())
    assert model.head.weight.is_meta and isinstance(model.head.weight, DTensor)
    model.to_empty(device="cpu")
    model.head.weight.data.fill_(1.0)
    assert model.head.weight.to_local().tolist() == [[1.0] * 6] * 3
    assert model(torch.zeros(2, dtype=torch.long)).shape == (2, 10)


# ---- refused -----------------------------------------------------------------------------------------------


def with_scalar() -> nn.Module:
    model = Model()
    model.scale = nn.Parameter(torch.tensor(1.0))
    return model


def with_hook() -> nn.Module:
    model = Model()
    model.head.weight.register_hook(lambda gradient: gradient)
    return model


def with_gradient() -> nn.Module:
    model = Model()
    model.head.weight.grad = torch.zeros(10, 6)
    return model


def on_the_same_mesh() -> nn.Module:
    model = Model()
    model.head.weight = nn.Parameter(distribute_tensor(model.head.weight.detach(), flat(), [Shard(0)]))
    return model


def tied_to_an_inner_one() -> nn.Module:
    model = Model()
    model.head.weight = model.embed.weight
    data_parallel(model.embed, flat())
    return model


def installed() -> nn.Module:
    return fsdp_hooks.install(fully_shard(Model(), mesh=flat()))


def lazy() -> nn.Module:
    model = Model()
    model.head = nn.LazyLinear(10)
    return model


def without_parameters() -> nn.Module:
    return nn.GELU()


REFUSED: dict[str, tuple[Callable[[], Any], dict[str, Any], str]] = {
    "no module": (lambda: "model", {}, "expects an nn.Module, found str"),
    "compiled": (lambda: torch.compile(Model()), {}, "before torch.compile"),
    "fully_shard": (lambda: fully_shard(Model(), mesh=flat()), {}, "found fully_shard applied to FSDPModel"),
    "fully_shard inside": (
        lambda: nn.Sequential(fully_shard(Model(), mesh=flat())),
        {},
        "found fully_shard applied to its sub-module '0'",
    ),
    "installed": (installed, {}, "found fully_shard applied"),
    "DDP": (lambda: nn.parallel.DistributedDataParallel(Model()), {}, "found DistributedDataParallel"),
    "twice": (lambda: data_parallel(Model(), flat()), {}, "Model is data parallel already"),
    "a part of one": (lambda: data_parallel(Model(), flat()).layers[0], {}, "inside one that is data parallel"),
    "no parameters": (without_parameters, {}, "expects a model with parameters"),
    "mode": (Model, {"mode": "ddp"}, "mode of 'fully_shard', 'hybrid_shard', 'replicate', found 'ddp'"),
    "no mesh": (Model, {"mesh": 4}, "expects a DeviceMesh, found int"),
    "two dimensions": (Model, {"mesh": square}, "expects a mesh of one dimension"),
    "one dimension": (Model, {"mode": "hybrid_shard"}, "expects a mesh of two dimensions"),
    "outside the mesh": (Model, {"mesh": lambda: DeviceMesh("cpu", [1, 2])}, "this rank to be in the mesh"),
    "shard_dim": (Model, {"shard_dim": -1}, "shard_dim to be 0 or more, found -1"),
    "unknown unit": (Model, {"units": ["blocks.*"]}, "'blocks.*', which matches none"),
    "unknown class": (Model, {"units": [nn.Conv1d]}, "Conv1d, which matches none"),
    "unit without forward": (Model, {"units": ["layers"]}, "found ModuleList at 'layers' without one"),
    "scalar": (with_scalar, {}, "'scale' to be an ordinary one, found a scalar"),
    "hook": (with_hook, {}, "'head.weight' to be an ordinary one, found one with gradient hooks"),
    "gradient": (with_gradient, {}, "found one with a gradient"),
    "lazy": (lazy, {}, "found a lazy one without a shape"),
    "the same mesh": (on_the_same_mesh, {}, "cannot be joined with"),
    "a broken tie": (tied_to_an_inner_one, {}, "'head.weight' is tied to 'weight' of a sub-module"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused_and_nothing_changed(name: str) -> None:
    build, options, words = REFUSED[name]
    model = build()
    modules = list(model.modules()) if isinstance(model, nn.Module) else []
    before = [(type(m), dict(m.__dict__), dict(m._parameters)) for m in modules]
    mesh = options.get("mesh", flat)
    with pytest.raises(InstallError, match=re.escape(words)):
        data_parallel(model, **{**options, "mesh": mesh() if callable(mesh) else mesh})
    after = [(type(m), dict(m.__dict__), dict(m._parameters)) for m in modules]
    assert [(a[0], list(a[1]), [id(p) for p in a[2].values()]) for a in after] == [
        (b[0], list(b[1]), [id(p) for p in b[2].values()]) for b in before
    ]


def test_a_scalar_can_be_ignored_or_replicated() -> None:
    model = with_scalar()
    data_parallel(model, flat(), ignored_params=[model.scale])
    replicated = data_parallel(with_scalar(), flat(), "replicate")
    assert replicated.scale.shape == ()


def test_install_and_fully_shard_refuse_a_data_parallel_model() -> None:
    model = data_parallel(Model(), flat())
    with pytest.raises(InstallError, match="is installed already"):
        fsdp_hooks.install(model)
    with pytest.raises(InstallError, match="was not"):
        undo_data_parallel(Model())
    assert RECORD in model.__dict__
