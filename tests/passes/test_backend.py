"""The backend in one process, on captured FSDP2 in a fake world of 4 ranks: configuration in, graphs and report out."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch._functorch.config as functorch_config
import torch._inductor.config as inductor_config
import torch.compiler.config as compiler_config
from torch import fx, nn
from torch._inductor import compile_fx
from torch._inductor.custom_graph_pass import CustomGraphPass
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import collective_identity as ci
import fsdp_hooks
import inductor_passes
from collective_identity import GRAD_REDUCE_SHARD, PARAM_UNSHARD
from collective_identity.transports import Transport, default_overload
from inductor_passes import backend, upstream
from inductor_passes.upstream import UnsupportedTorch, versions

pytestmark = pytest.mark.usefixtures("fake_world")

ALL_GATHER = default_overload(Transport.ALL_GATHER)


@pytest.fixture(autouse=True)
def handle() -> Iterator[ci.Handle]:
    """A session that asks no other rank: there is none."""
    torch._dynamo.reset()
    with ci.enable(agreement_timeout=0) as opened:
        yield opened


def installed(depth: int = 1) -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(depth)))
    mesh = init_device_mesh("cpu", (4,))
    for layer in model:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return fsdp_hooks.install(model)


def compiled(model: nn.Module, mode: str | None = None, **options: Any) -> Callable[[torch.Tensor], torch.Tensor]:
    if mode is not None:
        return torch.compile(model, backend="collective_identity", fullgraph=True, mode=mode)
    return torch.compile(model, backend="collective_identity", fullgraph=True, options=options)


def batch(rows: int = 3) -> torch.Tensor:
    return torch.ones(rows, 8, requires_grad=True)


def graphs(handle: ci.Handle) -> dict[str, dict[str, Any]]:
    return {graph["phase"]: graph for graph in handle.report().to_dict()["graphs"]}


def passes(graph: dict[str, Any]) -> list[str]:
    return [one["name"] for one in graph["passes"]]


# ---- what a compile does ----


def test_optimize_buckets(handle: ci.Handle) -> None:
    compiled(installed(), inner="aot_eager")(batch()).sum().backward()
    found = graphs(handle)
    assert list(found) == ["joint", "forward", "backward"]
    assert found["forward"]["captured"] == {PARAM_UNSHARD: 2} and found["forward"]["after"] == {PARAM_UNSHARD: 1}
    assert found["backward"]["captured"][GRAD_REDUCE_SHARD] == 2
    assert found["backward"]["after"][GRAD_REDUCE_SHARD] == 1
    assert passes(found["joint"]) == ["reshard"]
    assert passes(found["forward"]) == passes(found["backward"]) == ["normalize", "bucket"]


def test_options_decide_which_passes_run(handle: ci.Handle) -> None:
    compiled(installed(), inner="aot_eager", bucketing=False, reshard=False)(batch()).sum().backward()
    found = graphs(handle)
    assert list(found) == ["forward", "backward"]
    assert all(passes(graph) == ["normalize"] for graph in found.values())
    assert all(graph["captured"] == graph["after"] for graph in found.values())


@pytest.mark.parametrize("users", [None, "post_grad_custom_pre_pass", "reorder_for_locality_in_training"])
def test_passes_come_before_inductor_unless_something_else_has_to(users: str | None) -> None:
    """Inductor looks at every node once at its beginning; at nodes that are new after that it looks again and again."""
    if users is not None and not upstream.inductor_option_exists(users):
        pytest.skip(f"this torch has no {users}")
    gathers: list[int] = []

    def look(gm: fx.GraphModule, *args: Any, **kwargs: Any) -> Any:
        gathers.append(len(gm.graph.find_nodes(op="call_function", target=ALL_GATHER)))
        return propagate(gm, *args, **kwargs)

    class Nothing(CustomGraphPass):
        def __call__(self, graph: fx.Graph) -> None: ...

        def uuid(self) -> str:
            return "nothing"

    propagate = compile_fx.fake_tensor_prop
    values = {None: {}, "post_grad_custom_pre_pass": {"post_grad_custom_pre_pass": Nothing()}}
    with patch.object(compile_fx, "fake_tensor_prop", look):
        with inductor_config.patch(values.get(users, {users: True})):
            compiled(installed())(batch())
    assert gathers == [1 if users is None else 2]


@pytest.mark.parametrize("inner", ["inductor", "aot_eager"])
def test_the_collector_rests_while_a_graph_is_compiled(inner: str) -> None:
    """In a backward that compiles later too; and it goes on after a compile that fails."""
    seen: list[bool] = []

    def look(gm: fx.GraphModule) -> None:
        seen.append(gc.isenabled())

    def fail(gm: fx.GraphModule) -> None:
        raise ValueError("on purpose")

    options = {} if inner == "inductor" else {"inner": inner}
    compiled(installed(), pre_passes=[look], **options)(batch()).sum().backward()
    assert seen == [False, False] and gc.isenabled()
    torch._dynamo.reset()
    with pytest.raises(Exception, match="on purpose"):
        compiled(installed(), pre_passes=[fail], **options)(batch())
    assert gc.isenabled()


def test_inference(handle: ci.Handle) -> None:
    with torch.no_grad():
        compiled(installed(), inner="aot_eager")(batch())
    assert {phase: graph["after"] for phase, graph in graphs(handle).items()} == {"inference": {PARAM_UNSHARD: 1}}


def test_observe_changes_no_graph(handle: ci.Handle) -> None:
    codes: dict[str, tuple[str, ...]] = {}
    handle.close()
    for mode in ("observe", "optimize"):
        torch._dynamo.reset()
        seen: list[fx.GraphModule] = []
        with ci.enable(mode=mode, agreement_timeout=0) as session:  # type: ignore[arg-type]
            options = {"inner": "aot_eager", "pre_passes": [seen.append], "bucketing": mode == "observe"}
            compiled(installed(), **options)(batch()).sum().backward()
            found = graphs(session)
        codes[mode] = tuple(gm.code for gm in seen)
        assert found["forward"]["captured"] == found["forward"]["after"] == {PARAM_UNSHARD: 2}
        assert not [one for graph in found.values() for one in graph["passes"] if one["changed"]]
    assert codes["observe"] == codes["optimize"], "the same code as with bucketing off"
    assert passes(found["forward"]) == ["normalize"]


@pytest.mark.parametrize("start", ["subprocess", "fork"])
def test_kernels_are_compiled_once_the_passes_have_run(start: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of each graph as it will be lowered, before any of it runs; not beside workers that are forked."""
    seen: list[list[str]] = []
    ours = ("pack", "unpack")

    def note(gm: fx.GraphModule) -> None:
        names = (getattr(node.target, "_opname", "") for node in gm.graph.nodes)
        seen.append([name for name in names if name in ours])

    monkeypatch.setattr(backend, "compile_kernels_of", note)
    with inductor_config.patch(worker_start_method=start):
        loss = compiled(installed(), inner="aot_eager", kernels="triton")(batch()).sum()
        loss.backward()
    assert seen == ([["pack", "unpack"], ["pack"]] if start == "subprocess" else [])


# ---- the user's configuration ----


class UserPass(CustomGraphPass):
    """A pass of the user's: notes its name, the graph's collectives, the thread, and the cache key it sees."""

    def __init__(self, name: str, seen: list[tuple[Any, ...]]) -> None:
        self.name, self.seen = name, seen

    def __call__(self, graph: fx.Graph) -> None:
        starts = len(ci.start_nodes(graph.owning_module))
        self.seen.append((self.name, starts, threading.current_thread().name, compiler_config.cache_key_tag))

    def uuid(self) -> str:
        return self.name


def backward_in_a_thread(loss: torch.Tensor) -> None:
    """Where no ``config.patch`` of the caller is visible."""
    errors: list[BaseException] = []

    def run() -> None:
        try:
            loss.backward()
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run, name="other")
    thread.start()
    thread.join()
    assert errors == []


def test_user_configuration_is_kept_in_forward_and_in_a_backward_compiled_elsewhere(handle: ci.Handle) -> None:
    """Passes of the user's run first, their cache key comes first, and a lazy backward sees all of it too."""
    seen: list[tuple[Any, ...]] = []
    joint: list[tuple[int, bool]] = []

    def user_joint(gm: fx.GraphModule, inputs: Any) -> fx.GraphModule:
        marks = any("recompute" in node.meta for node in gm.graph.nodes)
        joint.append((len(ci.start_nodes(gm)), marks))
        return gm

    with (
        inductor_config.patch(post_grad_custom_pre_pass=UserPass("mine", seen)),
        functorch_config.patch(joint_custom_pass=user_joint),
        compiler_config.patch(cache_key_tag="user"),
    ):
        loss = compiled(installed(), cap_mb=1.0)(batch()).square().sum()
        assert compiler_config.cache_key_tag == "user"
        assert functorch_config.joint_custom_pass is user_joint
    assert list(graphs(handle)) == ["joint", "forward"], "the backward is compiled later"
    backward_in_a_thread(loss)

    assert joint == [(4, False)], "before our marks"
    assert [(name, starts, thread) for name, starts, thread, _ in seen] == [
        ("mine", 2, "MainThread"),
        ("mine", 3, "other"),
    ], "before our bucketing"
    tags = [tag for *_, tag in seen]
    assert all(tag.startswith("user+collective_identity:") and tag.count("+") == 1 for tag in tags)
    assert len({*tags}) == 2, "each graph's own payloads are in its key"
    found = graphs(handle)
    assert found["forward"]["after"] == {PARAM_UNSHARD: 1}
    assert found["backward"]["captured"] == {PARAM_UNSHARD: 1, GRAD_REDUCE_SHARD: 2}
    assert found["backward"]["after"][GRAD_REDUCE_SHARD] == 1


def test_lite_mode_changes_nothing_and_the_report_says_so(handle: ci.Handle) -> None:
    compiled(installed(), mode="lite")(batch()).sum().backward()
    found = graphs(handle)
    assert [found[phase]["lite"] for phase in ("forward", "backward")] == ["full", "full"]
    for phase in ("forward", "backward"):
        assert found[phase]["captured"] == found[phase]["after"]
        assert not [one for one in found[phase]["passes"] if one["changed"] or one["name"] == "bucket"]
        assert found[phase]["cached"] is False
    assert found["backward"]["after"][GRAD_REDUCE_SHARD] == 2


def test_passes_that_are_switched_off_are_not_taken_for_a_graph_of_the_cache(handle: ci.Handle) -> None:
    torch._dynamo.reset()
    torch.compile(torch.sin, backend="collective_identity", options={"use_post_grad_passes": False})(torch.ones(3))
    report = handle.report().to_dict()
    (found,), (said,) = report["graphs"], report["warnings"]
    assert (found["lite"], found["cached"], found["passes"]) == ("off", False, [])
    assert said["code"] == "CI042" and "use_post_grad_passes=False" in str(said)


def test_cache_key_is_appended_once_and_put_back() -> None:
    tag = "collective_identity:1"
    with upstream.cache_key(tag, ""):
        assert compiler_config.cache_key_tag == tag
        with upstream.cache_key(tag, tag):
            assert compiler_config.cache_key_tag == tag
    with compiler_config.patch(cache_key_tag="user"):
        user = upstream.callers_config({}).cache_key_tag
        with upstream.cache_key(tag, user), upstream.cache_key(tag, user):
            assert compiler_config.cache_key_tag == f"user+{tag}"
        assert compiler_config.cache_key_tag == "user"


def test_caches_are_off_only_where_asked() -> None:
    before = compiler_config.force_disable_caches
    with upstream.caches_disabled(True):
        assert compiler_config.force_disable_caches is True
    with upstream.caches_disabled(False):
        assert compiler_config.force_disable_caches == before
    assert compiler_config.force_disable_caches == before


@pytest.mark.parametrize("user", [None, "one", "several"])
def test_the_combined_post_grad_pass_runs_and_names_all(user: str | None) -> None:
    seen: list[tuple[Any, ...]] = []
    ours: list[int] = []
    passes_of = {None: None, "one": UserPass("a", seen), "several": [UserPass("a", seen), UserPass("b", seen)]}
    names = {None: (), "one": ("a",), "several": ("a", "b")}[user]
    gm = fx.symbolic_trace(nn.Identity())
    with inductor_config.patch(post_grad_custom_pre_pass=passes_of[user]):
        found = upstream.callers_config({}).post_grad_passes
    with upstream.post_grad_pass(lambda g: ours.append(len(seen)), "ours", found):
        both = inductor_config.post_grad_custom_pre_pass
        both(gm.graph)
    assert [name for name, *_ in seen] == list(names) and ours == [len(names)]
    assert both.uuid() == ("ours", *names)


def test_an_option_of_this_compile_counts_more_than_the_thread() -> None:
    mine, other = UserPass("mine", []), UserPass("other", [])
    with inductor_config.patch(post_grad_custom_pre_pass=other):
        assert upstream.callers_config({}).post_grad_passes == (other,)
        assert upstream.callers_config({"post_grad_custom_pre_pass": mine}).post_grad_passes == (mine,)


def test_a_user_pass_without_a_name_keeps_the_graph_out_of_the_cache() -> None:
    with upstream.post_grad_pass(lambda g: None, "ours", (lambda graph: None,)):
        assert inductor_config.post_grad_custom_pre_pass.uuid() is None


# ---- what is refused ----


@pytest.mark.parametrize("version", ["2.10.0", "2.16.0a0+git1", "3.1"])
def test_an_unsupported_torch(version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "__version__", version)
    with pytest.raises(UnsupportedTorch) as raised:
        inductor_passes.collective_identity(fx.symbolic_trace(nn.Identity()), [])
    assert str(raised.value) == (
        f"inductor_passes expects torch 2.11 to 2.15, found {version}: install a torch in that range, "
        "or a newer collective-identity"
    )


def test_missing_hooks_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(versions, "inductor_config", SimpleNamespace(__name__="torch._inductor.config"))
    monkeypatch.setattr(versions, "_compile_fx", lambda: lambda gm, inputs: None)
    with pytest.raises(UnsupportedTorch) as raised:
        upstream.check_version()
    assert str(raised.value).startswith(
        "inductor_passes expects torch._inductor.config.post_grad_custom_pre_pass, "
        "torch._inductor.config.fallback_by_default, torch._inductor.compile_fx.compile_fx(inner_compile=)"
    )


def test_a_bad_option_stops_the_compile() -> None:
    with pytest.raises(Exception, match="option 'order' expects one of") as raised:
        compiled(installed(), order="size")(batch())
    assert "OptionError" in str(raised.value) or type(raised.value).__name__ == "OptionError"


def test_a_failing_pre_pass_is_named() -> None:
    def broken(gm: fx.GraphModule) -> None:
        raise ValueError("no")

    with pytest.raises(Exception, match=r"in a pre_pass of the user, '.*broken'"):
        compiled(installed(), inner="aot_eager", pre_passes=[broken])(batch())
