"""What one compile is given under a policy, and registration; nothing is compiled here."""

from __future__ import annotations

import functools
import pickle
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed._symmetric_memory  # registers symm_mem
from torch import fx
from torch._inductor import lowering
from torch._subclasses import FakeTensorMode

from inductor_passes import symmetric
from inductor_passes.contract import PassContext
from inductor_passes.device_policy import OperatorPolicy, PolicyError, register_policy, registered_policy, torch_names
from inductor_passes.device_policy.backend import scope
from inductor_passes.device_policy.lowering import NodeLowering, retarget
from inductor_passes.device_policy.registration import replacement_allowed
from inductor_passes.fusion import FusionPlan, plan_fusions
from inductor_passes.lite_mode import LiteState, is_marked
from inductor_passes.options import BackendOptions
from inductor_passes.passes import Fuse
from inductor_passes.upstream import UnsupportedTorch
from tests.graphs import Builder

aten = torch.ops.aten
EMPTY = fx.GraphModule(torch.nn.Module(), fx.Graph())
PAGE = Path(__file__).resolve().parents[2] / "docs" / "device-policy.md"


def times_ten(x: Any, approximate: str = "none") -> Any:
    return x * 10


FACTOR = 2


def scaled(x: Any) -> Any:
    return x * FACTOR


def policy(**more: Any) -> OperatorPolicy:
    return OperatorPolicy("p", "1", "cuda", decompositions={aten.gelu.default: times_ten}, fallbacks=[aten.sin], **more)


def test_the_page_runs() -> None:
    code = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.S)[0]
    made: dict[str, Any] = {"__name__": "acme", "DEVICE": "cuda"}
    exec(code, made)
    assert sum(map(bool, code.splitlines())) <= 30 and callable(made["compiled"])


@pytest.mark.parametrize(
    "mode",
    [
        {"cpp_wrapper": True}, {"fx_wrapper": True}, {"freezing": True}, {"fallback_by_default": True},
        {"use_post_grad_passes": False}, {"disabled_passes": "some,Post_Grad_Custom_Post_Pass"},
    ],
    ids=str,
)  # fmt: skip
def test_modes_refused_by_name(mode: dict[str, Any]) -> None:
    for options, setting in ((mode, {}), ({}, mode)):
        with torch._inductor.config.patch(setting), pytest.raises(PolicyError) as caught:
            scope(policy(), EMPTY, options)
        assert [next(iter(mode)) in fault for fault in caught.value.faults] == [True]


def test_a_backward_lowered_after_a_change_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """It would be saved under the identity of the policy as it was built."""
    made = OperatorPolicy("p", "1", "cuda", decompositions={aten.gelu.default: scaled})
    last = scope(made, EMPTY, {})["patches"]["post_grad_custom_post_pass"]
    last(fx.Graph())
    monkeypatch.setitem(globals(), "FACTOR", 3)
    with pytest.raises(PolicyError, match="changed after the policy was built"):
        last(fx.Graph())


def test_other_compile_modes_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch._inductor import compile_fx
    from torch._inductor.virtualized import V

    with V.set_aot_compilation(True), pytest.raises(PolicyError, match="AOTInductor"):
        scope(policy(), EMPTY, {})
    monkeypatch.setattr(compile_fx, "fx_compile_mode", compile_fx.FxCompileMode.SUBPROCESS)
    with pytest.raises(PolicyError, match="SUBPROCESS"):
        scope(policy(), EMPTY, {})


def test_a_torch_with_other_names_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch._inductor import lowering

    torch_names.check_names()
    monkeypatch.delattr(lowering, "validate_ir")
    monkeypatch.setattr(lowering, "fallback_handler", lambda op: op)
    with pytest.raises(UnsupportedTorch, match=r"lowering.validate_ir, .*fallback_handler\(add_to_fallback_set=\)"):
        scope(policy(), EMPTY, {})


def test_the_table_follows_the_options_of_the_compile() -> None:
    from torch._inductor import decomposition

    plain, given = decomposition.fast_random_decomps(), decomposition.decompositions
    for options, stock in (({}, plain), ({"fallback_random": True}, given)):
        assert scope(policy(), EMPTY, options)["decompositions"].keys() == stock.keys() | {aten.gelu.default}
    assert plain.keys() != given.keys()


def test_lite_mode_is_refused_where_marks_do_not_count() -> None:
    from inductor_passes.backend import collective_identity
    from inductor_passes.options import OptionError

    with pytest.raises(OptionError, match="'policy' expects lite mode with selective_decompose=True"):
        collective_identity(EMPTY, [], options={"policy": policy(), "fallback_by_default": True})
    outer = fx.GraphModule(torch.nn.Module(), fx.Graph())
    outer.inside = fx.GraphModule(torch.nn.Module(), fx.Graph())
    lite = SimpleNamespace(inductor_config_patches={"fallback_by_default": True})
    outer.inside.meta["nested_region_config"] = lite
    with pytest.raises(PolicyError, match="nested region is compiled in lite mode"):
        scope(policy(), outer, {})


def test_in_lite_mode_marked_nodes_alone_are_handed_over() -> None:
    with FakeTensorMode():
        value = torch.empty(4, device="cuda")
    graph = fx.Graph()
    one = graph.placeholder("x")
    one.meta["val"] = value
    nodes = [graph.call_function(aten.sin.default, (one,)) for _ in range(2)]
    for node, custom in zip(nodes, ({}, {"compile_with_inductor": 0}), strict=True):
        node.meta.update(val=value, custom=custom)
    assert retarget(graph, policy(), is_marked) == 1
    assert [isinstance(node.target, NodeLowering) for node in nodes] == [False, True]


def test_nodes_and_decompositions_by_device() -> None:
    added = scope(policy(), EMPTY, {})
    table = added["decompositions"]
    with FakeTensorMode():
        device, host = torch.empty(4, device="cuda"), torch.empty(4)
        graph = fx.Graph()
        for value in (device, host):
            one = graph.placeholder("x")
            one.meta["val"] = value
            graph.call_function(aten.sin.default, (one,)).meta["val"] = value
        assert retarget(graph, policy()) == 1
        assert [isinstance(node.target, NodeLowering) for node in graph.nodes] == [False, True, False, False]
        assert table[aten.gelu.default](device).device.type == "cuda"
    restored = pickle.loads(pickle.dumps(added["provider"]))
    assert pickle.dumps(restored) == pickle.dumps(table)
    with pytest.raises(PolicyError, match="were not kept"):
        restored()


def gives_three(x: Any) -> Any:
    return 3


def gives_integers(x: Any) -> Any:
    return lowering.to_dtype(x, torch.int32)


def gives_a_row(x: Any) -> Any:
    return lowering.expand(x, [2, 4])


def gives_two(x: Any) -> Any:
    return x, x


def gives_itself(x: Any) -> Any:
    return lowering.clone(x)


def test_a_lowering_that_gives_something_else_is_refused_by_name() -> None:
    from torch._inductor.graph import GraphLowering
    from torch._inductor.virtualized import V

    with FakeTensorMode() as mode:
        value = torch.empty(4, device="cuda")
        for function, said in (
            (gives_three, "found a int"), (gives_integers, "expected torch.float32, found torch.int32"),
            (gives_a_row, "expected size [4], found [2, 4]"), (gives_two, "found a tuple"), (gives_itself, ""),
        ):  # fmt: skip
            graph = fx.Graph()
            one = graph.placeholder("x")
            node = graph.call_function(aten.sin.default, (one,))
            graph.output((node,))
            one.meta["val"] = node.meta["val"] = value
            retarget(graph, OperatorPolicy("p", "1", "cuda", lowerings={aten.sin.default: function}))
            lowered = GraphLowering(fx.GraphModule(torch.nn.Module(), graph))
            with V.set_graph_handler(lowered), V.set_fake_mode(mode):
                if said:
                    with pytest.raises(Exception, match=rf"p.aten.sin.default: the lowering (.|\n)*{re.escape(said)}"):
                        lowered.run(value)
                else:
                    lowered.run(value)


def test_registration_is_undone() -> None:
    stock, made = torch_names.current_compile_fx(), policy(collectives={})
    with pytest.raises(PolicyError, match="own device 'cuda'"):
        register_policy("xpu", made)
    with register_policy("cuda", made) as registration:
        assert registered_policy("cuda") is made and registered_policy("xpu") is None
        with FakeTensorMode():
            node = fx.Graph().placeholder("x")
            node.meta["val"] = torch.empty(1, device="cuda")
        assert not replacement_allowed(node, "tp.gather", "fused")
        assert replacement_allowed(node, "tp.gather", "fused", policy())
        with pytest.raises(PolicyError, match="has the policy 'p' already"):
            register_policy("cuda", made)
    registration.close()
    assert torch_names.current_compile_fx() is stock and registered_policy("cuda") is None


def test_a_function_around_ours_does_not_keep_a_policy(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another tool may wrap ``compile_fx`` while a policy is registered; closing must reach the policy all the same."""
    calls: list[dict[str, Any]] = []

    def stock(
        gm: Any, inputs: Any, inner_compile: Any = None, config_patches: Any = None, decompositions: Any = None
    ) -> None:
        calls.append(config_patches)

    before = torch_names.current_compile_fx()
    monkeypatch.setattr(torch._inductor.compile_fx, "compile_fx", stock)
    first, second = register_policy("cuda", policy()), register_policy("xpu", OperatorPolicy("q", "1", "xpu"))
    ours = torch_names.current_compile_fx()
    torch_names.set_compile_fx(functools.wraps(ours)(lambda *args, **kwargs: ours(*args, **kwargs)))
    with FakeTensorMode():
        inputs = [torch.empty(1, device="cuda")]
    for registration in (first, second):
        torch_names.current_compile_fx()(EMPTY, inputs)
        registration.close()
    torch_names.current_compile_fx()(EMPTY, inputs)
    assert [bool(patches) for patches in calls] == [True, False, False]
    with register_policy("cuda", policy()):
        assert registered_policy("cuda") == policy()
    monkeypatch.undo()
    assert torch_names.current_compile_fx() is before


def gather_and_product(device: str, role: str) -> fx.GraphModule:
    made = Builder()
    x, w = made.placeholder("x", (4, 8), device=device), made.placeholder("w", (8, 8), device=device)
    made.output(made.call(aten.mm.default, made.all_gather(x, group="tp", role=role).wait, w))
    return made.module()


def test_fusion_asks_the_policy_of_a_collectives_device() -> None:
    """By role, the compile's own policy before the registered one; a device without a policy forbids nothing."""

    def plan(device: str, role: str, **given: Any) -> FusionPlan:
        return plan_fusions(gather_and_product(device, role), enabled=lambda group: True, **given)

    only_gathers = policy(collectives={"tp.gather": ["fused"], "tp.*": ["low_contention"]})
    assert [len(plan("cuda", role, policy=only_gathers).fusions) for role in ("tp.gather", "tp.other")] == [1, 0]
    assert [one.reason.slug for one in plan("cuda", "tp.other", policy=only_gathers).refusals] == ["policy"]
    assert len(plan("cpu", "tp.other", policy=only_gathers).fusions) == 1
    with register_policy("cuda", policy(collectives={})):
        assert [len(plan(device, "tp.gather").fusions) for device in ("cuda", "cpu")] == [0, 1]
        assert len(plan("cuda", "tp.gather", policy=only_gathers).fusions) == 1
    assert len(plan("cuda", "tp.other").fusions) == 1


def test_the_pipelines_fusion_asks_the_compiles_policy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(symmetric, "is_enabled", lambda group: True)
    for allowed in (["fused"], []):
        options = BackendOptions(fusion=True, policy=policy(collectives={"tp.*": allowed}))
        context = PassContext(kind="forward", lite=LiteState.OFF, observe=False, options=options, log=None)
        assert Fuse()(gather_and_product("cuda", "tp.gather"), context).changed == bool(allowed)
