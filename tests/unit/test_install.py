"""`install` and `uninstall` on real ``fully_shard`` models: what they refuse, what they change, what they give back."""

from __future__ import annotations

import inspect
import logging
from collections import OrderedDict, namedtuple
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Replicate
from torch.utils._pytree import tree_map_only

import collective_identity as ci
import fsdp_hooks
from collective_identity import GRAD_REDUCE_SHARD, GRAD_REPLICATE_REDUCE, PARAM_UNSHARD, session
from fsdp_hooks import InstallError, UnsupportedOption, compat, refusals
from fsdp_hooks.refusals import WAY_OUT

pytestmark = pytest.mark.usefixtures("fake_world", "_no_session_left")


@pytest.fixture
def _no_session_left() -> Iterator[None]:
    yield
    if (left := session.current()) is not None:
        left.close()


class Model(nn.Module):
    """Two blocks and a head; every one has parameters."""

    def __init__(self, device: str = "cpu") -> None:
        super().__init__()
        first = nn.Sequential(nn.Linear(8, 8, device=device), nn.Dropout(0.5))
        self.blocks = nn.Sequential(first, nn.Linear(8, 8))
        self.head = nn.Linear(8, 8, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.blocks(x))


def sharded(*, device: str = "cpu", shape: tuple[int, ...] = (4,), **options: Any) -> Model:
    """``fully_shard`` on each block and on the root; `options` and `device` for ``blocks.0`` alone."""
    model = Model(device)
    names = ("shard",) if len(shape) == 1 else ("replicate", "shard")
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
    fully_shard(model.blocks[0], **{"mesh": mesh, **options})
    fully_shard(model.blocks[1], mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def snapshot(model: nn.Module) -> dict[str, Any]:
    """Everything that install touches, of every module, in a form that compares by identity and order."""
    return {
        name: {
            "class": type(module),
            "keys": list(module.__dict__),
            "managed": module.__dict__.get("_is_fsdp_managed_module"),
            "forward": module.__dict__.get("forward"),
            "parameters": [(key, id(value)) for key, value in module._parameters.items()],
            "pre hooks": [(key, hook) for key, hook in module._forward_pre_hooks.items()],
            "hooks": [(key, hook) for key, hook in module._forward_hooks.items()],
            "with kwargs": list(module._forward_pre_hooks_with_kwargs),
            "state dict hooks": len(module._state_dict_pre_hooks),
        }
        for name, module in model.named_modules()
    }


def lazily_initialised(model: nn.Module) -> bool:
    return any(compat.state_of(module, name)._is_root is not None for name, module in compat.fsdp_modules(model))


# ---- options that are refused ----


class Gathered(torch.Tensor):
    """A parameter that gathers itself, as float8 ones do."""

    @staticmethod
    def __new__(cls, data: torch.Tensor) -> Gathered:
        return torch.Tensor._make_wrapper_subclass(cls, data.shape, strides=data.stride(), dtype=data.dtype)

    def __init__(self, data: torch.Tensor) -> None:
        self.data_inside = data

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        args, kwargs = tree_map_only(Gathered, lambda x: x.data_inside, (args, kwargs or {}))
        return tree_map_only(torch.Tensor, Gathered, func(*args, **kwargs))

    def fsdp_pre_all_gather(self, mesh: Any) -> None: ...

    def fsdp_post_all_gather(self, *args: Any, **kwargs: Any) -> None: ...


def own_gather() -> Model:
    model = Model()
    linear = model.blocks[0][0]
    linear.weight = nn.Parameter(Gathered(linear.weight.detach()))
    mesh = init_device_mesh("cpu", (4,))
    fully_shard(model.blocks[0], mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def spmd() -> Model:
    from torch.distributed.fsdp import DataParallelMeshDims

    model = Model()
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    for module in model.blocks[0].modules():
        for name, parameter in module.named_parameters(recurse=False):
            value = DTensor.from_local(parameter.detach(), mesh, [Replicate(), Replicate()], run_check=False)
            module.register_parameter(name, nn.Parameter(value))
    fully_shard(model.blocks[0], mesh=mesh, dp_mesh_dims=DataParallelMeshDims(shard="dp"))
    return model


def replicated() -> Model:
    from torch.distributed._composable.replicate_with_fsdp import replicate

    model = Model()
    replicate(model.blocks[0], mesh=init_device_mesh("cpu", (4,), mesh_dim_names=("replicate",)))
    return model


def call(method: str, *args: Any, **kwargs: Any) -> Callable[[], Model]:
    """A model on whose ``blocks.0`` a setter was called."""

    def build() -> Model:
        model = sharded()
        getattr(model.blocks[0], method)(*args, **kwargs)
        return model

    build.__name__ = f"{method}{args}"
    return build


def grouped() -> Model:
    model = Model()
    mesh = init_device_mesh("cpu", (4,))
    fully_shard([model.blocks[0], model.blocks[1]], mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def grouped_root() -> Model:
    """Without a root above them, FSDP2's lazy initialisation would raise its own error."""
    model = Model()
    fully_shard([model.blocks[0], model.blocks[1]], mesh=init_device_mesh("cpu", (4,)))
    return model


MATERIALISE = "materialise the model first (model.to_empty(device=...), then initialise it), then install"
ONE_BY_ONE = "call fully_shard on each module by itself"
WEIGHT = "(parameter 'blocks.0.0.weight')"
REFUSED: list[tuple[str, Callable[[], nn.Module], str]] = [
    (
        "offload_policy=CPUOffloadPolicy",
        lambda: sharded(offload_policy=CPUOffloadPolicy(pin_memory=False)),
        WAY_OUT,
    ),
    ("a custom all-gather or reduce-scatter object", call("set_custom_all_gather", object()), WAY_OUT),
    ("a custom all-gather or reduce-scatter object", call("set_custom_reduce_scatter", object()), WAY_OUT),
    (
        "a custom all-gather or reduce-scatter object",
        call("set_allocate_memory_from_process_group_for_comm", True),
        WAY_OUT,
    ),
    ("set_all_reduce_hook", call("set_all_reduce_hook", lambda output: None), WAY_OUT),
    ("set_requires_gradient_sync(False)", call("set_requires_gradient_sync", False), WAY_OUT),
    ("set_requires_all_reduce(False)", call("set_requires_all_reduce", False), WAY_OUT),
    ("set_reshard_after_backward(False)", call("set_reshard_after_backward", False), WAY_OUT),
    ("a gradient divide factor", call("set_gradient_divide_factor", 8.0), WAY_OUT),
    ("a gradient divide factor", call("set_reduce_scatter_divide_factor", 8.0), WAY_OUT),
    ("set_unshard_in_backward(False)", call("set_unshard_in_backward", False), WAY_OUT),
    ("reshard_after_forward=<int>", lambda: sharded(reshard_after_forward=2), WAY_OUT),
    ("replicate() (a mesh without a shard dimension)", replicated, WAY_OUT),
    (f"fsdp_pre_all_gather / fsdp_post_all_gather {WEIGHT}", own_gather, WAY_OUT),
    ("a parameter on the meta device ('blocks.0.0.weight')", lambda: sharded(device="meta"), MATERIALISE),
    ("fully_shard([a, b, ...]) over several modules", grouped, ONE_BY_ONE),
    ("fully_shard([a, b, ...]) over several modules", grouped_root, ONE_BY_ONE),
]
if hasattr(FSDPModule, "set_reduce_scatter_unused_params"):  # torch 2.13
    REFUSED.append(
        ("set_reduce_scatter_unused_params(True)", call("set_reduce_scatter_unused_params", True), WAY_OUT)
    )
if "dp_mesh_dims" in inspect.signature(fully_shard).parameters:  # torch 2.12
    REFUSED.append(("dp_mesh_dims (an SPMD mesh)", spmd, WAY_OUT))
if hasattr(FSDPModule, "set_keep_unsharded_storage"):  # torch 2.15
    REFUSED.append((f"keep_unsharded_storage {WEIGHT}", call("set_keep_unsharded_storage", True), WAY_OUT))


@pytest.mark.filterwarnings("ignore:Use `set_gradient_divide_factor`")
@pytest.mark.parametrize(("option", "build", "way_out"), REFUSED)
def test_an_option_is_refused_by_name_and_nothing_changes(
    option: str, build: Callable[[], nn.Module], way_out: str
) -> None:
    model = build()
    before = snapshot(model)
    with pytest.raises(UnsupportedOption) as raised:
        fsdp_hooks.install(model)
    assert str(raised.value) == f"module 'blocks.0': fsdp_hooks does not support {option}: {way_out}"
    assert snapshot(model) == before
    assert not lazily_initialised(model)
    assert session.current() is None


def test_every_refusal_of_this_torch_is_tested() -> None:
    """A row that no model above triggers needs a newer torch than this one."""
    newer = {
        "set_reduce_scatter_unused_params(True)": hasattr(FSDPModule, "set_reduce_scatter_unused_params"),
        "dp_mesh_dims (an SPMD mesh)": "dp_mesh_dims" in inspect.signature(fully_shard).parameters,
        "keep_unsharded_storage": hasattr(FSDPModule, "set_keep_unsharded_storage"),
        "a sharded gradient dtype of its own": False,
    }
    rows = {option for option, _ in (*refusals._GROUP_OPTIONS, *refusals._PARAM_OPTIONS)}
    here = {row for row in rows if newer.get(row, True)}
    tested = {option.removesuffix(f" {WEIGHT}") for option, _, _ in REFUSED}
    assert here <= tested


@pytest.mark.parametrize("option", ["keep_unsharded_storage", "a sharded gradient dtype of its own"])
def test_parameter_options_of_newer_torch(option: str) -> None:
    """The attributes that torch 2.15 has on an ``FSDPParam``, set as it sets them."""
    model = sharded()
    (group,) = compat.groups_of(compat.state_of(model.blocks[1], ""), "")
    attribute = {"keep_unsharded_storage": option}.get(option, "_has_sharded_grad_dtype_override")
    setattr(group.fsdp_params[1], attribute, True)
    with pytest.raises(UnsupportedOption) as raised:
        fsdp_hooks.install(model)
    assert str(raised.value) == (
        f"module 'blocks.1': fsdp_hooks does not support {option} (parameter 'blocks.1.bias'): {WAY_OUT}"
    )


def test_an_option_of_the_root_names_the_root() -> None:
    model = sharded()
    model.set_reshard_after_backward(False, recurse=False)
    with pytest.raises(UnsupportedOption, match="^the root module: .*set_reshard_after_backward"):
        fsdp_hooks.install(model)


def test_the_way_out_works() -> None:
    """Undo the option, install again."""
    model = sharded()
    model.blocks[0].set_unshard_in_backward(False)
    with pytest.raises(UnsupportedOption):
        fsdp_hooks.install(model)
    model.blocks[0].set_unshard_in_backward(True)
    assert fsdp_hooks.install(model) is model


# ---- changes after install ----

PRESENT = {name: only for name, only in refusals._AFTER_INSTALL.items() if hasattr(FSDPModule, name)}
#: They schedule or annotate eager FSDP2's own streams; a captured graph has none of those.
HARMLESS = {
    "set_is_last_backward",
    "set_modules_to_forward_prefetch",
    "set_modules_to_backward_prefetch",
    "set_post_optim_event",
    "set_reduce_scatter_max_input_buffers",
}


def test_every_setter_of_fsdp2_is_refused_or_known_to_be_harmless() -> None:
    setters = {name for name in dir(FSDPModule) if name.startswith("set_")}
    assert setters == (set(PRESENT) - {"unshard"}) | HARMLESS & setters


@pytest.mark.parametrize(("method", "accepted"), PRESENT.items())
def test_a_change_after_install_is_refused(method: str, accepted: bool | None) -> None:
    model = fsdp_hooks.install(sharded())
    block = model.blocks[1]
    name = type(block).__name__
    refused = [(), (None,), (object(),)] if accepted is None else [(not accepted,), (object(),), ()]
    for args in refused:
        with pytest.raises(UnsupportedOption, match=f"^{name}.{method}: .*before fsdp_hooks.install.*uninstall"):
            getattr(block, method)(*args)


@pytest.mark.parametrize(("method", "accepted"), [(m, a) for m, a in PRESENT.items() if a is not None])
def test_setting_what_is_set_already_is_accepted(method: str, accepted: bool) -> None:
    model = fsdp_hooks.install(sharded())
    parameter = list(inspect.signature(getattr(FSDPModule, method)).parameters)[1]
    assert getattr(model, method)(accepted) is None
    assert getattr(model, method)(**{parameter: accepted}) is None
    with pytest.raises(UnsupportedOption):
        getattr(model, method)(**{parameter: not accepted})


def test_setters_work_again_after_uninstall() -> None:
    model = fsdp_hooks.uninstall(fsdp_hooks.install(sharded()))
    model.set_requires_gradient_sync(False)
    (group,) = compat.groups_of(compat.state_of(model, ""), "")
    assert group.reduce_grads is False


# ---- models that cannot be installed ----


def test_no_module() -> None:
    with pytest.raises(InstallError, match="expects an nn.Module, found dict"):
        fsdp_hooks.install({})  # type: ignore[arg-type]


def test_a_model_without_fully_shard() -> None:
    model = Model()
    with pytest.raises(InstallError, match=r"found Model with none: call torch.distributed.fsdp.fully_shard"):
        fsdp_hooks.install(model)


def test_fully_shard_on_nothing() -> None:
    model = fully_shard(nn.Sequential(nn.ReLU()), mesh=init_device_mesh("cpu", (4,)))
    before = snapshot(model)
    with pytest.raises(InstallError, match="found none in FSDPSequential: leave out fsdp_hooks.install"):
        fsdp_hooks.install(model)
    assert snapshot(model) == before


def test_install_twice() -> None:
    model = fsdp_hooks.install(sharded())
    before = snapshot(model)
    with pytest.raises(InstallError, match="^this model is installed already: .*uninstall undoes it"):
        fsdp_hooks.install(model)
    assert snapshot(model) == before


@pytest.mark.parametrize("name", ["blocks.0", "blocks.1", "blocks"])
def test_install_of_a_module_below_an_installed_one(name: str) -> None:
    model = fsdp_hooks.install(sharded())
    with pytest.raises(InstallError, match="is installed already"):
        fsdp_hooks.install(model.get_submodule(name))


def test_install_above_an_installed_module() -> None:
    model = sharded()
    fsdp_hooks.install(model.blocks[1])
    before = snapshot(model)
    with pytest.raises(InstallError, match="^its sub-module 'blocks.1' is installed already"):
        fsdp_hooks.install(model)
    assert snapshot(model) == before


def test_a_compiled_model() -> None:
    model = sharded()
    compiled = torch.compile(model, backend="eager")
    before = snapshot(model)
    with pytest.raises(InstallError, match=r"before torch.compile, found a compiled one: call fsdp_hooks.install"):
        fsdp_hooks.install(compiled)  # type: ignore[arg-type]
    assert snapshot(model) == before


def test_uninstall_without_install() -> None:
    model = sharded()
    with pytest.raises(InstallError, match="found FSDPModel without an installation: pass the root model"):
        fsdp_hooks.uninstall(model)
    fsdp_hooks.uninstall(fsdp_hooks.install(model))
    with pytest.raises(InstallError, match="without an installation"):
        fsdp_hooks.uninstall(model)


def test_uninstall_of_a_part() -> None:
    model = fsdp_hooks.install(sharded())
    with pytest.raises(InstallError, match="not a sub-module"):
        fsdp_hooks.uninstall(model.blocks[0])
    fsdp_hooks.uninstall(model)


# ---- a torch that was never read ----


@pytest.mark.parametrize("version", ["2.10.1", "2.16.0+cu130", "3.0.0"])
def test_an_unsupported_torch(version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = sharded()
    before = snapshot(model)
    monkeypatch.setattr(torch, "__version__", version)
    with pytest.raises(InstallError) as raised:
        fsdp_hooks.install(model)
    assert f"expects torch 2.11 to 2.15, found torch {version}: install a torch in that range" in str(raised.value)
    assert snapshot(model) == before


@pytest.mark.parametrize(
    ("holder", "attribute"),
    [("state", "_mp_policy"), ("group", "mesh_info"), ("param", "fsdp_placement")],
)
def test_unknown_internals_are_named(holder: str, attribute: str) -> None:
    """An attribute of FSDP2 is gone: the message says which, of what, in which module."""
    model = sharded()
    state = compat.state_of(model.blocks[1], "blocks.1")
    (group,) = compat.groups_of(state, "blocks.1")
    owner = {"state": state, "group": group, "param": group.fsdp_params[0]}[holder]
    delattr(owner, attribute)
    before = snapshot(model)
    with pytest.raises(InstallError) as raised:
        fsdp_hooks.install(model)
    assert str(raised.value).startswith(f"module 'blocks.1': expected FSDP2's {type(owner).__name__} to have")
    assert attribute in str(raised.value) and "use a released torch in that range" in str(raised.value)
    assert snapshot(model) == before


def test_unknown_divide_factors_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch.distributed.fsdp._fully_shard import _fsdp_collectives

    monkeypatch.setattr(_fsdp_collectives, "_get_gradient_divide_factors", lambda group, factor: None)
    with pytest.raises(InstallError, match=r"_get_gradient_divide_factors.*found \('group', 'factor'\)"):
        fsdp_hooks.install(sharded())


@pytest.mark.parametrize("name", ["blocks.0", ""])
def test_a_hook_that_another_tool_removed(name: str) -> None:
    """Found while planning, so that no other module was changed before."""
    model = sharded()
    compat.finish_lazy_init(model, "")
    module = model.get_submodule(name)
    compat.state_of(module, name)._post_forward_hook_handle.remove()
    before = snapshot(model)
    with pytest.raises(InstallError, match=f"^module {name!r}: expected FSDP2's forward hook to be registered"):
        fsdp_hooks.install(model)
    assert snapshot(model) == before


def test_a_session_with_another_folder_is_refused_before_anything_changes(tmp_path: Any) -> None:
    model = sharded()
    compat.finish_lazy_init(model, "")
    before = snapshot(model)
    with ci.enable(), pytest.raises(session.SessionError, match="run_dir"):
        fsdp_hooks.install(model, run_dir=tmp_path)
    assert snapshot(model) == before
    fsdp_hooks.install(model, run_dir=tmp_path)


# ---- what install changes, and uninstall gives back ----


def with_user_additions() -> Model:
    """Hooks around FSDP2's own, and a forward replaced on one instance."""
    model = sharded()
    compat.finish_lazy_init(model, "")
    block = model.blocks[1]
    block.register_forward_pre_hook(lambda module, args: None)
    block.register_forward_pre_hook(lambda module, args: None, prepend=True)
    block.register_forward_hook(lambda module, args, output: None)
    block.register_forward_hook(lambda module, args, output: None, prepend=True)
    original = block.forward
    block.forward = lambda x: original(x)  # type: ignore[method-assign]
    return model


def test_uninstall_restores_everything() -> None:
    model = with_user_additions()
    before = snapshot(model)
    fsdp_hooks.install(model)
    during = snapshot(model)
    assert during != before
    assert during["blocks.0.0"]["class"] is not before["blocks.0.0"]["class"]
    fsdp_hooks.uninstall(model)
    after = snapshot(model)
    for one in (*before.values(), *after.values()):
        one["keys"] = sorted(one["keys"])
    assert after == before
    assert all(type(module.weight) is nn.Parameter or isinstance(module.weight, DTensor) for module in model.blocks[1:])


def test_a_second_round_is_like_the_first() -> None:
    model = with_user_additions()
    first = snapshot(fsdp_hooks.install(model))
    fsdp_hooks.uninstall(model)
    second = snapshot(fsdp_hooks.install(model))
    for one in (*first.values(), *second.values()):
        one["class"] = [base.__qualname__ for base in one["class"].__mro__]
        one["keys"] = sorted(one["keys"])
    assert second == first


def test_equal_modules_share_one_class() -> None:
    """One captured class an original one, so that Dynamo's code is shared as before."""
    model = fsdp_hooks.install(sharded())
    assert type(model.blocks[0][0]).__name__ == "Linear"
    assert isinstance(model.blocks[1], FSDPModule) and isinstance(model.blocks[1], nn.Linear)
    other = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))
    for one in other:
        fully_shard(one, mesh=init_device_mesh("cpu", (4,)))
    fsdp_hooks.install(other)
    assert len({type(one) for one in other}) == 1


def test_outside_forward_parameters_are_the_shards() -> None:
    model = sharded()
    before = dict(model.named_parameters())
    fsdp_hooks.install(model)
    assert all(value is before[name] for name, value in model.named_parameters())
    linear = model.blocks[0][0]
    assert linear.weight is linear._parameters["weight"] and isinstance(linear.weight, DTensor)


def test_an_unsharded_model_is_resharded_first() -> None:
    """After an eager forward of a root that is not resharded, install still finds shards."""
    model = sharded()
    model(torch.ones(2, 8))
    assert not isinstance(model.head.weight, DTensor)
    fsdp_hooks.install(model)
    assert isinstance(model.head.weight, DTensor)
    assert model(torch.ones(2, 8)).shape == (2, 8)


def test_a_forward_replaced_on_the_instance_still_runs() -> None:
    model = sharded()
    calls: list[torch.Size] = []
    block = model.blocks[1]
    original = block.forward

    def forward(x: torch.Tensor) -> torch.Tensor:
        calls.append(block.weight.shape)
        return original(x)

    block.forward = forward  # type: ignore[method-assign]
    fsdp_hooks.install(model)
    model(torch.ones(2, 8))
    assert calls == [(8, 8)], "called once, with the full parameter"
    fsdp_hooks.uninstall(model)
    assert block.__dict__["forward"] is forward


def test_user_hooks_run_in_their_order() -> None:
    """FSDP2's places are taken, not removed; hooks see FSDP2's shards, not gathered parameters."""
    model = with_user_additions()
    order: list[str] = []
    block = model.blocks[1]
    block.register_forward_pre_hook(lambda *_: order.append("pre, first"), prepend=True)
    block.register_forward_pre_hook(lambda *_: order.append("pre, last"))
    block.register_forward_hook(lambda *_: order.append("post, first"), prepend=True)
    block.register_forward_hook(lambda *_: order.append("post, last"))
    keys = list(block._forward_pre_hooks), list(block._forward_hooks)
    fsdp_hooks.install(model)
    assert (list(block._forward_pre_hooks), list(block._forward_hooks)) == keys
    model(torch.ones(2, 8))
    assert order == ["pre, first", "pre, last", "post, first", "post, last"]


def test_a_slice_of_an_installed_container_is_a_plain_one() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8))
    mesh = init_device_mesh("cpu", (4,))
    fully_shard(model[0], mesh=mesh)
    fully_shard(model, mesh=mesh)
    fsdp_hooks.install(model)
    part = model[:2]
    assert type(part) is nn.Sequential and list(part) == [model[0], model[1]]
    assert part(torch.ones(2, 8)).shape == (2, 8)


def test_install_says_what_it_did(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="collective_identity"):
        fsdp_hooks.install(sharded())
    assert "installed on FSDPModel: 5 attributes read through 3 fully_shard modules" in caplog.text


# ---- casting of inputs and outputs ----

Pair = namedtuple("Pair", ["left", "right"])


@dataclass
class Record:
    value: torch.Tensor
    flag: bool


class Seen(nn.Module):
    """Keeps what its forward was given, and returns it."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(8))
        self.seen: Any = None

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        self.seen = args, kwargs
        return args


def nested_input() -> tuple[tuple[Any, ...], dict[str, Any]]:
    single = torch.ones(2)
    packed = torch.nn.utils.rnn.pack_sequence([torch.ones(2, 3)])
    args = (
        single,
        (single, [single, torch.ones(2, dtype=torch.int64)]),
        {"a": single, "b": {"c": (single,)}},
        OrderedDict(x=single.double()),
        Record(single, True),
        Pair(single, None),
        {single},
        torch.Size([2, 3]),
        packed,
        "text",
    )
    return args, {"mask": torch.ones(2, dtype=torch.bool), "scale": [single.half()]}


def described(value: Any) -> Any:
    """Types of containers and dtypes of tensors."""
    if isinstance(value, torch.Tensor):
        return value.dtype
    if isinstance(value, Record):
        return "Record", described(value.value), value.flag
    if isinstance(value, dict):
        return type(value).__name__, {key: described(item) for key, item in value.items()}
    if isinstance(value, (list, tuple, set)):
        return type(value).__name__, [described(item) for item in value]
    return value


@pytest.mark.parametrize(
    "policy",
    [
        MixedPrecisionPolicy(param_dtype=torch.bfloat16),
        MixedPrecisionPolicy(param_dtype=torch.bfloat16, output_dtype=torch.float64),
        MixedPrecisionPolicy(param_dtype=torch.bfloat16, cast_forward_inputs=False),
        MixedPrecisionPolicy(output_dtype=torch.float16),
        MixedPrecisionPolicy(),
    ],
    ids=lambda p: f"{p.param_dtype}-{p.output_dtype}-{p.cast_forward_inputs}",
)
def test_inputs_and_outputs_are_cast_as_fsdp2_casts_them(policy: MixedPrecisionPolicy) -> None:
    found = []
    for capture in (False, True):
        model = fully_shard(Seen(), mesh=init_device_mesh("cpu", (4,)), mp_policy=policy)
        if capture:
            fsdp_hooks.install(model)
        args, kwargs = nested_input()
        with torch.no_grad():
            output = model(*args, **kwargs)
        found.append((described(model.seen), described(output)))
    assert found[1] == found[0]


# ---- what is expected ----

Rows = dict[tuple[str, str, str, str], tuple[int | None, int | None]]


def rows_of(model: nn.Module, **options: Any) -> Rows:
    rows = fsdp_hooks.expected_collectives(model, **options).rows
    found = {(r.role, r.phase, r.param_group, r.dtype): (r.count, r.buckets) for r in rows}
    assert len(found) == len(rows)
    return found


def gathers_and_reductions(group: str, count: int, dtype: str = "torch.float32") -> Rows:
    return {
        (PARAM_UNSHARD, "forward", group, dtype): (count, 1),
        (GRAD_REDUCE_SHARD, "backward", group, dtype): (count, 1),
    }


PLAIN = gathers_and_reductions("blocks.0", 2) | gathers_and_reductions("blocks.1", 2) | gathers_and_reductions("", 1)
FLOAT = "torch.float32"


def test_expected_one_dimensional() -> None:
    """The re-gather of what backward needs is unknown until the graph is; the root is not resharded."""
    unknown: Rows = {(PARAM_UNSHARD, "regather", f"blocks.{i}", FLOAT): (None, None) for i in (0, 1)}
    model = sharded()
    assert rows_of(model) == PLAIN | unknown
    assert fsdp_hooks.expected_collectives(model).world == {"shard": 4, "replicate": 1}
    assert fsdp_hooks.expected_collectives(model).model == "FSDPModel"
    fsdp_hooks.install(model)
    assert rows_of(model) == PLAIN | unknown, "the same for an installed model"
    assert fsdp_hooks.expected_collectives(model).model == "FSDPModel"


def test_expected_with_what_backward_needs() -> None:
    saved = {"blocks.1.weight", "blocks.0.0.weight", "head.weight", "no.such"}
    regather: Rows = {(PARAM_UNSHARD, "regather", f"blocks.{i}", FLOAT): (1, 1) for i in (0, 1)}
    assert rows_of(sharded(), saved_for_backward=saved) == PLAIN | regather
    assert rows_of(sharded(), saved_for_backward=()) == PLAIN


def test_expected_without_reshard() -> None:
    model = sharded(reshard_after_forward=False)
    assert rows_of(model) == PLAIN | {(PARAM_UNSHARD, "regather", "blocks.1", FLOAT): (None, None)}
    always = sharded()
    always.set_reshard_after_forward(True)
    saved = {"head.weight"}
    assert rows_of(always, saved_for_backward=saved) == PLAIN | {(PARAM_UNSHARD, "regather", "", FLOAT): (1, 1)}


def test_expected_hybrid() -> None:
    model = sharded(shape=(2, 2))
    replicas: Rows = {
        (GRAD_REPLICATE_REDUCE, "backward", group, FLOAT): (count, 1)
        for group, count in (("blocks.0", 2), ("blocks.1", 2), ("", 1))
    }
    assert rows_of(model, saved_for_backward=()) == PLAIN | replicas
    assert fsdp_hooks.expected_collectives(model).world == {"shard": 2, "replicate": 2}


def test_expected_of_one_rank_a_shard_group() -> None:
    """Nothing to gather or to scatter, only replicas to reduce."""
    assert {key[0] for key in rows_of(sharded(shape=(4, 1)))} == {GRAD_REPLICATE_REDUCE}


def test_expected_frozen() -> None:
    model = sharded()
    model.blocks[1].requires_grad_(False)
    model.blocks[0][0].bias.requires_grad_(False)
    want = dict(PLAIN)
    del want[GRAD_REDUCE_SHARD, "backward", "blocks.1", FLOAT]
    want[GRAD_REDUCE_SHARD, "backward", "blocks.0", FLOAT] = (1, 1)
    assert rows_of(model, saved_for_backward=()) == want


def test_expected_mixed_precision() -> None:
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    found = rows_of(sharded(mp_policy=policy), saved_for_backward=())
    assert found[PARAM_UNSHARD, "forward", "blocks.0", "torch.bfloat16"] == (2, 1)
    assert found[GRAD_REDUCE_SHARD, "backward", "blocks.0", FLOAT] == (2, 1)
    low = rows_of(sharded(mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16)), saved_for_backward=())
    assert low[GRAD_REDUCE_SHARD, "backward", "blocks.0", "torch.bfloat16"] == (2, 1)


def test_expected_is_declared_at_install() -> None:
    with ci.enable() as handle:
        model = fsdp_hooks.install(sharded())
        (record,) = [r for r in handle.session.ledger.records() if type(r).__name__ == "ExpectedRecord"]
    assert record.rows == fsdp_hooks.expected_collectives(model).rows
