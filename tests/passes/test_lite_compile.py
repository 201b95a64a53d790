"""Compiles in lite mode: marked regions are compiled, lite is seen when a graph is compiled, torch's limits."""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch._inductor.compile_fx as compile_fx_module
import torch._inductor.config as inductor_config
import torch.fx.traceback as fx_traceback
import torch.nn.functional as F
from torch import Tensor
from torch._inductor.utils import run_and_get_code
from torch.fx.experimental.proxy_tensor import make_fx

import collective_identity as ci
from benchmarks.selective_decompose import capture, shape_of
from inductor_passes import one_trace
from inductor_passes.lite_mode import prepare
from inductor_passes.lite_mode.decompose import AS_THEIR_KERNELS
from inductor_passes.upstream import compile_fx_replaced

OURS: dict[str, Any] = {"backend": "collective_identity", "options": {"strict_lite": True}}
LITE = torch._inductor.list_mode_options("lite")


@pytest.fixture(autouse=True)
def handle() -> Iterator[ci.Handle]:
    torch._dynamo.reset()
    with ci.enable(agreement_timeout=0) as opened:
        yield opened


def mark() -> Any:
    return fx_traceback.annotate({"compile_with_inductor": 0})


def half_marked(x: Tensor) -> Tensor:
    with mark():
        y = F.gelu(x)
    return F.gelu(y)


def unmarked(x: Tensor) -> Tensor:
    return F.gelu(F.gelu(x))


def codes(function: Callable[[Tensor], Tensor], *, traced_once: bool = False, **how: Any) -> list[str]:
    """The code of forward and backward."""
    torch._dynamo.reset()
    x = torch.ones(8, requires_grad=True)

    def step() -> None:
        compiled = torch.compile(function, **how)
        with one_trace() if traced_once else nullcontext():
            out = compiled(x)
        out.sum().backward()

    return run_and_get_code(step)[1]  # type: ignore[no-any-return]


def compiled_parts(code: list[str]) -> list[bool]:
    return ["cpp_fused" in one for one in code]


@pytest.mark.parametrize(
    ("how", "traced_once"),
    [({"backend": "collective_identity", "mode": "lite"}, False), ({"mode": "lite"}, True)],
    ids=["backend", "plain"],
)
def test_marked_regions_are_compiled_in_both_directions(how: dict[str, Any], traced_once: bool) -> None:
    code = codes(half_marked, traced_once=traced_once, **how)
    assert compiled_parts(code) == [True, True] and all("aten.gelu" in one for one in code), "and the rest falls back"
    assert compiled_parts(codes(unmarked, traced_once=traced_once, **how)) == [False, False]


def test_plain_lite_leaves_marked_regions_to_fall_back() -> None:
    """Why ``one_trace`` exists; the day torch keeps the marks, this says so."""
    assert compiled_parts(codes(half_marked, mode="lite")) == [False, False]


def test_the_two_traces_give_one_graph() -> None:
    theirs, ours = capture(2, 0.5, one_trace=False)[1], capture(2, 0.5, one_trace=True)[1]
    assert shape_of(theirs) == shape_of(ours)
    assert 0 < sum(row[-1] for row in shape_of(ours)) < len(shape_of(ours))


def test_a_marked_cond() -> None:
    def f(x: Tensor) -> Tensor:
        with mark():
            y = torch.cond(x.sum() > 0, lambda x: F.gelu(x), lambda x: F.silu(x), (x,))
        return F.gelu(y)

    x = torch.linspace(-1, 2, 8)
    torch.testing.assert_close(torch.compile(f, **OURS)(x), f(x))


@pytest.mark.parametrize("way", ["patched_options", "one_switch_back"])
def test_lite_is_detected_when_called(handle: ci.Handle, way: str) -> None:
    """With no option given: as with ``TORCHINDUCTOR_LITE_MODE=1`` in torch 2.15, which sets these defaults."""
    back = {"use_dce": True} if way == "one_switch_back" else {}
    with inductor_config.patch({**LITE, **back}):
        torch.compile(unmarked, backend="collective_identity")(torch.ones(8, requires_grad=True)).sum().backward()
    torch._dynamo.reset()
    torch.compile(lambda x: x + 1, backend="collective_identity")(torch.ones(8))
    found = [(graph["phase"], graph["lite"]) for graph in handle.report().to_dict()["graphs"]]
    state = "partial" if back else "full"
    assert found[1:] == [("forward", state), ("backward", state), ("inference", "off")]


def test_one_trace_is_its_threads_alone_and_gone_after_the_last(monkeypatch: pytest.MonkeyPatch) -> None:
    def original(
        model_: str, example_inputs_: Any, inner_compile: Any = 0, config_patches: Any = 0, decompositions: Any = 0
    ) -> str:
        return model_

    def by(original: Callable[..., Any], call: inspect.BoundArguments) -> str:
        return f"{original(*call.args, **call.kwargs)} once"

    def compiled() -> str:
        return str(compile_fx_module.compile_fx("graph", []))  # type: ignore[arg-type]

    def first() -> None:
        with compile_fx_replaced(by):
            seen.append(compiled())
            inside.set()
            assert other_left.wait(10)
            seen.append(compiled())

    monkeypatch.setattr(compile_fx_module, "compile_fx", original)
    seen: list[str] = []
    inside, other_left = threading.Event(), threading.Event()
    thread = threading.Thread(target=first)
    thread.start()
    assert inside.wait(10)
    assert compiled() == "graph"
    with compile_fx_replaced(by), compile_fx_replaced(by):
        assert compiled() == "graph once"
    assert compiled() == "graph" and compile_fx_module.compile_fx is not original
    other_left.set()
    thread.join()
    assert seen == ["graph once"] * 2 and compile_fx_module.compile_fx is original


@pytest.mark.parametrize(
    "function",
    [lambda x: F.layer_norm(x, (6,)), lambda x: F.log_softmax(x, -1), F.dropout],
    ids=["layer_norm", "log_softmax", "dropout"],
)
@pytest.mark.parametrize("traced_once", [False, True], ids=["backend", "plain"])
@pytest.mark.filterwarnings("ignore")
def test_a_transposed_gradient(function: Callable[[Tensor], Tensor], traced_once: bool) -> None:
    """Fake kernels that promise other strides than the real ones give: said as the kernel does it, to the bit."""

    def gradient(**how: Any) -> Tensor:
        torch._dynamo.reset()
        torch.manual_seed(0)
        x = torch.linspace(-1, 1, 24).view(4, 6).requires_grad_()
        compiled = torch.compile(lambda x: function(x.sin()).t().contiguous().exp(), **how)
        with one_trace() if traced_once else nullcontext():
            out = compiled(x)
        out.backward(torch.linspace(0, 3, 24).view(6, 4))
        assert x.grad is not None
        return x.grad

    expected = gradient(backend="aot_eager")
    found = gradient(**{"mode": "lite"} if traced_once else OURS)
    assert torch.equal(found, expected) and found.stride() == expected.stride()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("dropped", [0.1, 0.3, 0.5])
def test_a_transposed_gradient_of_dropout_is_rounded_as_by_the_kernel(dtype: torch.dtype, dropped: float) -> None:
    op = torch.ops.aten.native_dropout_backward.default
    made = torch.Generator().manual_seed(0)
    args = (
        torch.randn(64, 32, generator=made).to(dtype).t(),
        torch.rand(32, 64, generator=made) > dropped,
        1 / (1 - dropped),
    )
    expected, found = op(*args), AS_THEIR_KERNELS[op](op, *args)
    assert torch.equal(found, expected) and (found.dtype, found.stride()) == (expected.dtype, expected.stride())


@pytest.mark.parametrize(
    "options",
    [{"selective_decompose": True}, {"strict_lite": True, "fallback_by_default": False}],
    ids=["alone", "part"],
)
def test_marks_without_fallback_are_refused_with_the_way_out(options: dict[str, Any]) -> None:
    with pytest.raises(Exception, match=r"selective_decompose=True expects fallback_by_default=True.*Set both"):
        torch.compile(unmarked, backend="collective_identity", options=options)(torch.ones(8))
    torch._dynamo.reset()
    with inductor_config.patch(selective_decompose=True):
        eager = torch.compile(unmarked, backend="collective_identity", options={"inner": "aot_eager"})
        assert torch.equal(eager(torch.ones(8)), unmarked(torch.ones(8)))


def test_a_kernel_of_the_users_is_rewritten_as_torch_does_after_grad() -> None:
    """It has no lowering otherwise; torch 2.15 rewrites it in lite mode itself. The graph alone needs no GPU."""
    from torch._higher_order_ops import triton_kernel_wrap as wrap

    def f(x: Tensor) -> Tensor:
        made = wrap.triton_kernel_wrapper_functional(
            kernel_idx=wrap.kernel_side_table.add_kernel(object()),
            constant_args_idx=wrap.kernel_side_table.add_constant_args({}),
            grid=[(1, 1, 1)],
            tma_descriptor_metadata={},
            kwargs={"x": x},
            tensors_to_clone=["x"],
        )
        return made["x"] * 2

    gm = make_fx(f, tracing_mode="fake")(torch.ones(4))
    names = [str(node.target) for node in gm.graph.nodes]
    assert "triton_kernel_wrapper_functional" in names
    prepare(gm)
    gm.graph.lint()
    names = [str(node.target) for node in gm.graph.nodes]
    assert "triton_kernel_wrapper_mutation" in names and "triton_kernel_wrapper_functional" not in names
    (kernel,) = (node for node in gm.graph.nodes if str(node.target) == "triton_kernel_wrapper_mutation")
    assert all(node.op == "call_function" for node in kernel.all_input_nodes), "it writes a copy"


# ---- torch's limits; tests/passes/test_lite_matrix.py has what is made right or refused ----


@pytest.mark.filterwarnings("ignore")
def test_elu_of_a_transposed_gradient_is_torchs_limit() -> None:
    """Torch's fake tensors give ``elu_backward`` other strides than its kernel; docs/lite-mode.md has the others."""
    x = torch.ones(4, 6, requires_grad=True)
    out = torch.compile(lambda x: F.elu(x).t().contiguous(), **OURS)(x)
    with pytest.raises(AssertionError, match="expected size .* stride"):
        out.backward(torch.ones(6, 4))


def test_two_draws_of_randn_like_stay_two_by_the_preset() -> None:
    """Until torch 2.14 ``aot_eager`` itself makes them one (docs/upstream/cse-random-like.md)."""

    def f(x: Tensor) -> tuple[Tensor, ...]:
        return x.sin(), torch.randn_like(x) * 2, torch.randn_like(x) * 2

    def drawn_once(**how: Any) -> bool:
        torch._dynamo.reset()
        _, first, second = torch.compile(f, **how)(torch.ones(8, requires_grad=True))
        return torch.equal(first, second)

    assert not drawn_once(**OURS)
    assert drawn_once(backend="aot_eager") == (torch.__version__ < "2.14")


def test_marked_dropout_draws_from_torchs_generator_by_the_preset() -> None:
    def drop(x: Tensor) -> Tensor:
        with mark():
            return F.dropout(x * 2, 0.5)

    def drawn(**how: Any) -> Tensor:
        torch._dynamo.reset()
        torch.manual_seed(0)
        return torch.compile(drop, **how)(torch.ones(256))

    assert torch.equal(drawn(**OURS), drawn(backend="aot_eager"))


def test_a_bfloat16_product_of_an_expanded_tensor_is_torchs_limit() -> None:
    """Torch's fake tensor promises other strides (docs/upstream/fake-strides-bfloat16.md); float32 runs."""

    def product(x: Tensor, y: Tensor) -> Tensor:
        return x.expand(4, 3, 2) * y.t().unsqueeze(-1)

    x, y = torch.ones(3, 2), torch.ones(3, 4)
    compiled = torch.compile(product, **OURS)
    assert torch.equal(compiled(x, y), product(x, y))
    with pytest.raises(AssertionError, match="expected size .* stride"):
        compiled(x.bfloat16(), y.bfloat16())
