"""The guard catches every kind of change, names the pass, and costs little."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch._inductor.config as inductor_config
from torch import fx

import inductor_passes.lite_mode.guard as guard_module
from inductor_passes.contract import LiteBehaviour, PassContext, PassContract, PassOutcome
from inductor_passes.lite_mode import LiteState, LiteViolation, check_result, guarded, lite_parts
from inductor_passes.manager import PassError, Pipeline, ScheduleError, run_user_passes
from inductor_passes.options import BackendOptions
from tests.graphs import Builder

aten = torch.ops.aten
CONTEXT = PassContext(kind="forward", lite=LiteState.FULL, observe=False, options=BackendOptions(), log=None)
Change = Callable[[fx.GraphModule], Any]


def graph(nodes: int = 3) -> fx.GraphModule:
    """x -> neg -> add(neg, x) -> ... with an annotated node, a constant and a sub-graph."""
    b = Builder()
    x = b.placeholder("x", (4, 4))
    last = b.graph.call_function(aten.neg.default, (x,))
    last.meta.update(val=x.meta["val"], custom={"compile_with_inductor": 0, "deep": {"a": [1]}})
    for _ in range(nodes):
        last = b.graph.call_function(aten.add.Tensor, (last, x))
        last.meta["val"] = x.meta["val"]
    b.output(last)
    gm = b.module()
    gm.register_buffer("constant", torch.ones(2))
    gm.add_module("part", torch.nn.Linear(2, 2))
    gm.meta["deep"] = []
    inner = fx.Graph()
    inner.output((inner.call_function(aten.neg.default, (inner.placeholder("y"),)),))
    gm.add_submodule("inside", fx.GraphModule(torch.nn.Module(), inner))
    return gm


def find(gm: fx.GraphModule, target: Any) -> fx.Node:
    return next(node for node in gm.graph.nodes if node.target is target)


def value(gm: fx.GraphModule) -> torch.Tensor:
    found: torch.Tensor = find(gm, aten.neg.default).meta["val"]
    return found


def insert(gm: fx.GraphModule) -> fx.Node:
    node = find(gm, aten.neg.default)
    with gm.graph.inserting_after(node):
        return gm.graph.call_function(aten.abs.default, (node,))


def insert_then_remove(gm: fx.GraphModule) -> None:
    gm.graph.erase_node(insert(gm))


def move(gm: fx.GraphModule) -> None:
    first, second = [node for node in gm.graph.nodes if node.op == "call_function"][:2]
    second.append(first)


def remove(gm: fx.GraphModule) -> None:
    last = [node for node in gm.graph.nodes if node.op == "call_function"][-1]
    last.replace_all_uses_with(last.args[0])
    gm.graph.erase_node(last)


def other_graph(gm: fx.GraphModule) -> None:
    gm.graph = fx.Graph()


CHANGES: dict[str, Change] = {
    "target": lambda gm: setattr(find(gm, aten.add.Tensor), "target", aten.sub.Tensor),
    "args": lambda gm: setattr(find(gm, aten.add.Tensor), "args", find(gm, aten.add.Tensor).args[::-1]),
    "kwargs": lambda gm: setattr(find(gm, aten.add.Tensor), "kwargs", {"alpha": 2}),
    "value": lambda gm: find(gm, aten.neg.default).meta.update(val=torch.empty(4, 4, dtype=torch.float64)),
    "value_offset": lambda gm: find(gm, aten.neg.default).meta.update(val=value(gm).new_empty(8, 4)[4:]),
    "value_gradient": lambda gm: find(gm, aten.neg.default).meta.update(val=value(gm).clone().requires_grad_()),
    "value_stride": lambda gm: find(gm, aten.neg.default).meta.update(val=torch.empty(4, 4).t()),
    "custom_edited": lambda gm: find(gm, aten.neg.default).meta["custom"].update(x=1),
    "custom_edited_deep": lambda gm: find(gm, aten.neg.default).meta["custom"]["deep"]["a"].append(2),
    "custom_key_deleted": lambda gm: find(gm, aten.neg.default).meta["custom"].pop("deep"),
    "custom_deleted": lambda gm: find(gm, aten.neg.default).meta.pop("custom"),
    "custom_added": lambda gm: find(gm, aten.add.Tensor).meta.update(custom={}),
    "recompute_mark": lambda gm: find(gm, aten.neg.default).meta.update(recompute=2),
    "insert": insert,
    "insert_then_remove": insert_then_remove,
    "move": move,
    "remove": remove,
    "other_graph": other_graph,
    "constant_replaced": lambda gm: setattr(gm, "constant", torch.zeros(2)),
    "constant_edited": lambda gm: gm.constant.add_(1),
    "constant_added": lambda gm: gm.register_buffer("second", torch.ones(1)),
    "constant_removed": lambda gm: delattr(gm, "constant"),
    "constant_on_other_memory": lambda gm: setattr(gm.constant, "data", torch.ones(2)),
    "constant_restrided": lambda gm: gm.constant.as_strided_((2,), (0,)),
    "constant_of_a_part": lambda gm: gm.part.weight.detach().zero_(),
    "forward": lambda gm: setattr(gm, "forward", lambda x: x),
    "owning_module": lambda gm: fx.GraphModule(gm, gm.graph) and None,
    "code_transformer": lambda gm: gm.graph.on_generate_code(lambda _: lambda body: body) and None,
    "code_generator": lambda gm: gm.graph.set_codegen(fx.graph.CodeGen()),
    "module_meta": lambda gm: gm.meta.update(nested_region_config=1),
    "module_meta_edited": lambda gm: gm.meta["deep"].append(1),
    "subgraph": lambda gm: setattr(find(gm.inside, aten.neg.default), "target", aten.abs.default),
    "subgraph_inserted_then_removed": lambda gm: insert_then_remove(gm.inside),
    "subgraph_replaced": lambda gm: setattr(gm, "inside", fx.GraphModule(torch.nn.Module(), fx.Graph())),
}


class Planted:
    """A pass of any declared behaviour that makes one change."""

    def __init__(self, change: Change, *, name: str = "planted", lite: Any = LiteBehaviour.READ_ONLY) -> None:
        self._change, self.contract = change, PassContract(name=name, lite=lite)

    def __call__(self, gm: fx.GraphModule, context: PassContext) -> Any:
        result = self._change(gm)
        return result if isinstance(result, fx.GraphModule) else PassOutcome(changed=False)


@pytest.mark.parametrize("name", sorted(CHANGES))
@pytest.mark.parametrize("lite", [LiteBehaviour.READ_ONLY, LiteBehaviour.CAPTURE])
def test_every_change_is_caught(name: str, lite: LiteBehaviour) -> None:
    with pytest.raises(PassError, match="'planted' must not change the graph in lite mode"):
        Pipeline([Planted(CHANGES[name], lite=lite)]).run(graph(), CONTEXT)


def test_a_returned_module_is_caught() -> None:
    with pytest.raises(PassError, match="'planted' .* returned a new GraphModule"):
        Pipeline([Planted(lambda gm: graph())]).run(graph(), CONTEXT)
    gm = graph()
    check_result(gm, gm, "the same is fine")
    check_result(None, gm, "so is nothing")


def quiet(name: str = "quiet") -> Planted:
    return Planted(lambda gm: None, name=name)


def test_a_row_of_passes_shares_one_snapshot(monkeypatch: pytest.MonkeyPatch) -> None:
    taken: list[fx.GraphModule] = []

    class Counted(guard_module.Snapshot):
        def __init__(self, gm: fx.GraphModule) -> None:
            taken.append(gm)
            super().__init__(gm)

    monkeypatch.setattr(guard_module, "Snapshot", Counted)
    gm = graph()
    Pipeline([quiet("one"), quiet("two"), quiet("three")]).run(gm, CONTEXT)
    assert taken == [gm, gm.inside]
    run_user_passes(gm, [lambda gm: None, lambda gm: None])
    assert taken == [gm, gm.inside], "outside lite mode there is nothing to guard"


@pytest.mark.parametrize("name", sorted(CHANGES))
def test_a_change_is_caught_in_a_later_pass_as_well(name: str) -> None:
    with pytest.raises(PassError, match="'planted' must not change the graph in lite mode"):
        Pipeline([quiet(), Planted(CHANGES[name])]).run(graph(), CONTEXT)


def test_what_capture_marked_is_given_to_the_next_pass() -> None:
    mark = Planted(CHANGES["recompute_mark"], name="reshard", lite=LiteBehaviour.CAPTURE)
    Pipeline([quiet("one"), mark, quiet("two")]).run(graph(), CONTEXT)
    unmark = Planted(lambda gm: find(gm, aten.neg.default).meta.pop("recompute"))
    with pytest.raises(PassError, match="'planted' .* recompute of neg_default was 2, is None"):
        Pipeline([quiet(), mark, unmark]).run(graph(), CONTEXT)


def test_a_users_pass_of_an_exempt_name_may_not_mark_either() -> None:
    def reshard(gm: fx.GraphModule) -> None:
        CHANGES["recompute_mark"](gm)

    reshard.__qualname__ = "reshard"
    switches = {"fallback_by_default": True}
    with inductor_config.patch(switches), pytest.raises(PassError, match="'reshard' must not .* recompute of neg"):
        run_user_passes(graph(), [reshard])


def test_what_an_unguarded_pass_wrote_is_given_to_the_next() -> None:
    observed = dataclasses.replace(CONTEXT, lite=LiteState.OFF, observe=True)
    gm = graph()
    Pipeline([quiet("one"), Planted(insert, lite=LiteBehaviour.CAPTURE), quiet("two")]).run(gm, observed)
    assert find(gm, aten.abs.default)
    with pytest.raises(PassError, match="'planted' must not change the graph in an observe session"):
        capture = Planted(insert, name="capture", lite=LiteBehaviour.CAPTURE)
        Pipeline([quiet(), capture, Planted(move)]).run(graph(), observed)


@pytest.mark.parametrize("edited", [False, True])
def test_annotations_that_someone_else_holds_now(edited: bool) -> None:
    """How often a value is referenced is no change, and hides none."""
    gm, held = graph(), []

    def hold(gm: fx.GraphModule) -> None:
        deep = find(gm, aten.neg.default).meta["custom"]["deep"]
        held.extend([deep, deep["a"], *deep])
        if edited:
            deep["a"][0] = True  # equals 1

    passes = [Planted(hold), quiet()]
    if edited:
        with pytest.raises(PassError, match=r"'planted' .*\[1\].*, is .*\[True\].* \(edited"):
            Pipeline(passes).run(gm, CONTEXT)
    else:
        Pipeline(passes).run(gm, CONTEXT)


@pytest.mark.parametrize("lite", [LiteState.PARTIAL, LiteState.REGION])
def test_every_lite_state_is_guarded(lite: LiteState) -> None:
    with pytest.raises(PassError, match="planted"):
        Pipeline([Planted(insert)]).run(graph(), dataclasses.replace(CONTEXT, lite=lite))


@pytest.mark.parametrize("odd", [object(), torch.ones(2), LiteState.FULL], ids=["object", "tensor", "enum"])
def test_annotations_that_are_not_plain_are_compared_one_by_one(odd: Any) -> None:
    gm = graph()
    find(gm, aten.add.Tensor).meta["custom"] = {"odd": odd, "list": [1]}
    Pipeline([Planted(lambda gm: None)]).run(gm, CONTEXT)
    with pytest.raises(PassError, match=r"custom.*of neg_default .*'x': 1.*edited in place"):
        Pipeline([Planted(CHANGES["custom_edited"])]).run(gm, CONTEXT)
    with pytest.raises(PassError, match=r"custom.*of add_.*edited in place"):
        Pipeline([Planted(lambda gm: find(gm, aten.add.Tensor).meta["custom"].update(odd=None))]).run(gm, CONTEXT)


def test_a_tensor_in_an_annotation_is_watched_and_a_cycle_is_not_followed() -> None:
    gm, tensor, around = graph(), torch.ones(2), {"deep": [1]}
    around["around"] = around  # type: ignore[assignment]
    find(gm, aten.add.Tensor).meta["custom"] = {"tensor": tensor, "around": around}
    Pipeline([Planted(lambda gm: None)]).run(gm, CONTEXT)
    with pytest.raises(PassError, match=r"custom.*of add_.*edited in place"):
        Pipeline([Planted(lambda gm: tensor.add_(1))]).run(gm, CONTEXT)
    with pytest.raises(PassError, match=r"custom.*of add_.*edited in place"):
        Pipeline([Planted(lambda gm: around["deep"].append(2))]).run(gm, CONTEXT)


def test_constants_without_version_or_storage() -> None:
    gm = graph()
    with torch.inference_mode():
        gm.constant = torch.ones(2)
    gm.sparse = torch.ones(2).to_sparse()
    Pipeline([Planted(lambda gm: None)]).run(gm, CONTEXT)
    with pytest.raises(PassError, match="'sparse'"):
        Pipeline([Planted(lambda gm: setattr(gm, "sparse", torch.zeros(2).to_sparse()))]).run(gm, CONTEXT)


def test_what_changes_nothing_passes() -> None:
    def equal_args(gm: fx.GraphModule) -> None:
        for node in gm.graph.nodes:
            if node.op == "call_function":
                node.args = (*node.args,)
                node.meta["notes_of_a_pass"] = 1

    Pipeline([Planted(equal_args)]).run(graph(), CONTEXT)
    Pipeline([Planted(lambda gm: gm.recompile() and None)]).run(graph(), CONTEXT)


def test_recompute_marks_are_capture_by_name_and_nothing_else_is() -> None:
    marked = Planted(CHANGES["recompute_mark"], name="reshard", lite=LiteBehaviour.CAPTURE)
    Pipeline([marked]).run(graph(), CONTEXT)
    with pytest.raises(PassError, match="'reshard' must not change"):
        Pipeline([Planted(insert, name="reshard", lite=LiteBehaviour.CAPTURE)]).run(graph(), CONTEXT)


def test_nothing_is_guarded_where_lite_is_off() -> None:
    off = dataclasses.replace(CONTEXT, lite=LiteState.OFF)
    Pipeline([Planted(insert)]).run(graph(), off)


def test_a_lite_region_of_a_normal_graph_is_guarded() -> None:
    off = dataclasses.replace(CONTEXT, lite=LiteState.OFF)
    gm = graph()
    gm.inside.meta["nested_region_config"] = SimpleNamespace(inductor_config_patches={"fallback_by_default": True})
    assert lite_parts(gm) == (gm.inside,)
    Pipeline([Planted(insert)]).run(gm, off)
    with pytest.raises(PassError, match="planted"):
        Pipeline([Planted(CHANGES["subgraph"])]).run(gm, off)


def test_a_users_pass_is_guarded() -> None:
    with inductor_config.patch(torch._inductor.list_mode_options("lite")):
        run_user_passes(graph(), [lambda gm: None])
        with pytest.raises(PassError, match="insert"):
            run_user_passes(graph(), [insert])
        with pytest.raises(PassError, match="returned a new GraphModule"):
            run_user_passes(graph(), [lambda gm: graph()])


@pytest.mark.parametrize("way", ["configuration", "meta"])
def test_no_pass_can_switch_the_guard_off_for_the_next(way: str) -> None:
    off = {"fallback_by_default": False}

    def switch(gm: fx.GraphModule) -> None:
        if way == "configuration":
            inductor_config.fallback_by_default = False
        else:
            gm.meta["nested_region_config"] = SimpleNamespace(inductor_config_patches=off)

    with inductor_config.patch(torch._inductor.list_mode_options("lite")):
        with pytest.raises(PassError, match="insert" if way == "configuration" else "switch"):
            run_user_passes(graph(), [switch, insert])


def test_a_pass_must_declare_its_lite_behaviour() -> None:
    with pytest.raises(TypeError, match="lite"):
        PassContract(name="undeclared")  # type: ignore[call-arg]
    with pytest.raises(ScheduleError, match="declares lite=None"):
        Pipeline([Planted(insert, lite=None)])


def test_the_hooks_are_gone_afterwards() -> None:
    gm = graph()
    with pytest.raises(LiteViolation), guarded([gm], "planted"):
        insert(gm)
    assert not gm._create_node_hooks and not gm._erase_node_hooks
