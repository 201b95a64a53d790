"""Compiles in lite mode: equal to aot_eager, marked regions compiled, what cannot be is refused or pinned."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch._inductor.config as inductor_config
import torch.fx.traceback as fx_traceback
import torch.nn.functional as F
from torch import Tensor, nn
from torch._inductor.utils import run_and_get_code

import collective_identity as ci
from benchmarks.selective_decompose import capture, shape_of
from inductor_passes import one_trace, strict_lite_options

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


# ---- programs that plain lite mode gets wrong or cannot compile ----


def mutating_operator() -> Callable[[Tensor], Tensor]:
    @torch.library.custom_op("collective_identity_tests::double_into", mutates_args=("y",))
    def double_into(x: Tensor, y: Tensor) -> None:
        y.copy_(x * 2)

    double_into.register_fake(lambda x, y: None)

    def f(x: Tensor) -> Tensor:
        y = x.cos()
        kept = y * 1
        torch.ops.collective_identity_tests.double_into(x.sin(), y)
        return y.cos() + kept

    return f


def scanned(x: Tensor) -> Any:
    from torch._higher_order_ops.scan import scan

    return scan(lambda c, y: ((c + y).clone(), c * y), torch.zeros(4), x, dim=0)


def mapped(x: Tensor) -> Tensor:
    from torch._higher_order_ops.map import map as over_rows

    return over_rows(lambda row: row.sin() * 2, x)


def same_as_aot_eager(f: Callable[[Tensor], Any], x: Tensor, model: nn.Module | None = None, **how: Any) -> None:
    found = []
    for way in ({"backend": "aot_eager"}, how):
        torch._dynamo.reset()
        torch.manual_seed(3)
        leaf = x.detach().clone().requires_grad_(x.requires_grad)
        out = torch.compile(f, **way)(leaf)
        results = [one.detach().clone() for one in (out if isinstance(out, tuple) else (out,))]
        if x.requires_grad:
            (out if isinstance(out, Tensor) else out[0]).sum().backward()
            results.append(leaf.grad)
        if model is not None:
            results += [p.grad for p in model.parameters()]
            model.zero_grad(set_to_none=True)
        found.append(results)
    assert all(map(torch.equal, *found))


@pytest.mark.parametrize(
    ("f", "x"),
    [
        (mutating_operator(), torch.linspace(-1, 1, 8)),
        (scanned, torch.linspace(-1, 1, 20).view(5, 4)),
        (mapped, torch.linspace(-1, 1, 20).view(5, 4)),
    ],
    ids=["mutating_operator", "scan", "map"],
)
def test_what_lite_mode_cannot_lower_is_rewritten(f: Callable[[Tensor], Any], x: Tensor) -> None:
    same_as_aot_eager(f, x, **OURS)


def test_convolution_and_batch_norm_by_the_preset() -> None:
    torch.manual_seed(0)
    x = torch.randn(2, 3, 10, 10).requires_grad_()
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8, track_running_stats=False), nn.ReLU())
    same_as_aot_eager(model, x, model, options=strict_lite_options())


def test_marked_random_numbers_are_torchs_by_the_preset() -> None:
    def f(x: Tensor) -> Tensor:
        with mark():
            y = x * torch.rand_like(x)
        return y + torch.rand_like(x)

    same_as_aot_eager(f, torch.ones(16), **OURS)


def test_an_unmarked_flex_attention_is_refused() -> None:
    from torch.nn.attention.flex_attention import flex_attention

    q = torch.randn(1, 2, 128, 64)
    with pytest.raises(Exception, match="LiteUnsupported.*'flex_attention'.*compile_with_inductor"):
        torch.compile(lambda q: flex_attention(q, q, q, score_mod=lambda s, *_: s * s), **OURS)(q)


@pytest.mark.filterwarnings("ignore")
def test_dropout_of_a_transposed_gradient_is_torchs_limit() -> None:
    """Torch's fake tensors give ``native_dropout_backward`` other strides than its kernel; docs/lite-mode.md."""
    x = torch.ones(4, 6, requires_grad=True)
    out = torch.compile(lambda x: F.dropout(x, 0.5).t().contiguous(), **OURS)(x)
    with pytest.raises(AssertionError, match="expected size .* stride"):
        out.backward(torch.ones(6, 4))
