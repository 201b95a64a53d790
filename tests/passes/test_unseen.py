"""What AOTAutograd's trace may add to a captured graph: by operators and subclasses of others with Python code."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch._functorch.config as functorch_config
import torch.utils._pytree as pytree
from torch import fx
from torch.library import Library, custom_op, register_autograd, register_torch_dispatch, triton_op

from inductor_passes import upstream
from inductor_passes.unseen import unseen

ONES = (torch.ones(2),)


def calls(target: Callable[..., Any]) -> fx.GraphModule:
    graph = fx.Graph()
    x = graph.placeholder("x")
    graph.output(graph.call_function(target, (x,)))
    return fx.GraphModule(torch.nn.Module(), graph)


def same(x: torch.Tensor) -> torch.Tensor:
    return x.clone()


@pytest.fixture
def lib() -> Iterator[Library]:
    with torch.library._scoped_library("unseen_test", "FRAGMENT") as library:
        library.define("op(Tensor x) -> Tensor")
        yield library


KERNELS = ["CPU", "Meta", "CompositeExplicitAutograd"]
TRACED = ["", "CompositeImplicitAutograd", "Autograd", "AutogradCPU", "Functionalize"]


@pytest.mark.parametrize("key", KERNELS + TRACED)
def test_python_code_counts_where_the_trace_runs_it(key: str, lib: Library) -> None:
    lib.impl("op", same, key)
    found = () if key in KERNELS else ("operator unseen_test::op",)
    assert unseen(calls(torch.ops.unseen_test.op.default), ONES) == found
    assert unseen(calls(torch.ops.unseen_test.op), ONES) == found, "a packet, as Dynamo keeps it"


def test_a_backward_and_a_rule_for_a_mode_count(lib: Library) -> None:
    from torch._subclasses.functional_tensor import FunctionalTensorMode

    gm = calls(torch.ops.unseen_test.op.default)
    lib.impl("op", same, "CPU")
    assert unseen(gm, ONES) == ()
    register_torch_dispatch(
        "unseen_test::op", FunctionalTensorMode, lambda mode, f, types, args, kwargs: args[0].clone(), lib=lib
    )
    assert unseen(gm, ONES) == ("operator unseen_test::op",)


def test_a_registered_backward_counts(lib: Library) -> None:
    lib.impl("op", same, "CPU")
    register_autograd("unseen_test::op", lambda ctx, g: g, lib=lib)
    assert unseen(calls(torch.ops.unseen_test.op.default), ONES) == ("operator unseen_test::op",)


def test_a_custom_operator_counts_by_its_backward() -> None:
    opaque = custom_op("unseen_custom::opaque", same, mutates_args=())
    whole = custom_op("unseen_custom::whole", same, mutates_args=())
    whole.register_autograd(lambda ctx, g: g)
    seen_through = triton_op("unseen_custom::seen_through", same, mutates_args=())
    assert [unseen(calls(one._opoverload), ONES) for one in (opaque, whole, seen_through)] == [
        (),
        ("operator unseen_custom::whole",),
        ("operator unseen_custom::seen_through",),
    ]


def test_torchs_and_our_operators_are_known() -> None:
    import fsdp_hooks  # noqa: F401

    functional = torch.ops._c10d_functional
    for target in (torch.relu, torch.ops.aten.mm.default, functional.wait_tensor, torch.ops.fsdp_hooks.unshard.default):
        assert unseen(calls(target), ONES) == ()


def test_a_decomposition_of_others_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    op = torch.ops.aten.mm.default
    stock = upstream.decomposition_table()
    monkeypatch.setattr(upstream, "decomposition_table", lambda: {**stock, op: same})
    assert unseen(calls(op), ONES) == ("operator aten::mm",)


def test_sub_graphs_count(lib: Library) -> None:
    lib.impl("op", same, "CompositeImplicitAutograd")
    outer = calls(torch.relu)
    outer.body = calls(torch.ops.unseen_test.op.default)
    assert unseen(outer, ONES) == ("operator unseen_test::op",)


class Wrapper(torch.Tensor):
    """A tensor subclass whose operators Python code of its own computes."""

    inner: torch.Tensor

    @staticmethod
    def __new__(cls, inner: torch.Tensor) -> Wrapper:
        made: Wrapper = torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)  # type: ignore[attr-defined]
        made.inner = inner
        return made

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["inner"], None

    @staticmethod
    def __tensor_unflatten__(parts: dict[str, torch.Tensor], *_: Any) -> Wrapper:
        return Wrapper(parts["inner"])

    @classmethod
    def __torch_dispatch__(cls, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return op(*pytree.tree_map_only(Wrapper, lambda one: one.inner, args), **(kwargs or {}))


def test_a_tensor_subclass_of_others_counts() -> None:
    gm = calls(torch.relu)
    assert unseen(gm, (Wrapper(torch.ones(2)),)) == (f"tensor subclass {__name__}.Wrapper",)
    assert unseen(gm, (Wrapper(Wrapper(torch.ones(2))), 3)) == (f"tensor subclass {__name__}.Wrapper",)


def test_a_joint_pass_of_the_users_counts() -> None:
    with functorch_config.patch(joint_custom_pass=lambda gm, inputs: gm):  # type: ignore[attr-defined]
        assert unseen(calls(torch.relu), ONES) == ("torch._functorch.config.joint_custom_pass",)
    assert unseen(calls(torch.relu), ONES) == ()
