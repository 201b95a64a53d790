"""Random operators under the strict preset: each draws once, in forward, so that the next step draws what it should."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import collective_identity as ci
from inductor_passes import one_trace, strict_lite_options

WAYS: dict[str, dict[str, Any]] = {
    "backend": {"backend": "collective_identity", "options": {"strict_lite": True}},
    "plain": {"options": strict_lite_options()},
    "retraced": {"options": strict_lite_options()},
}

Program = Callable[[Tensor, Tensor], tuple[Tensor, ...]]


def factories(x: Tensor, buffer: Tensor) -> tuple[Tensor, ...]:
    """Nothing of what is drawn needs a gradient, some of it no gradient needs, and the last node draws."""
    buffer.copy_(torch.rand(4, 6))
    y = x + torch.randn(6) + torch.bernoulli(torch.full((4, 6), 0.4)) + torch.empty(4, 6).uniform_()
    y = y @ torch.rand(6, 6) + torch.randperm(6) + F.dropout(torch.ones(4, 6), 0.5)
    y = F.scaled_dot_product_attention(y[None], y[None], y[None], dropout_p=0.3) + 0.1 * torch.randn_like(y)
    return y, F.dropout(x, 0.3), torch.rand(3)


def unused(x: Tensor, buffer: Tensor) -> tuple[Tensor, ...]:
    """Nothing is done with what is drawn."""
    F.rrelu(x, training=True), F.dropout(x, 0.5), torch.rand(3), torch.multinomial(x.detach().softmax(-1), 2)
    F.scaled_dot_product_attention(x[None], x[None], x[None], dropout_p=0.3)
    return x * 2, x.sin()


@pytest.fixture(scope="module", autouse=True)
def session() -> Iterator[None]:
    with ci.enable(agreement_timeout=0):
        yield


def two_steps(function: Program, *, traced_once: bool = False, **how: Any) -> list[Tensor]:
    """What two training steps return, the gradient, the buffer, and what the generator draws next."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    x, buffer = torch.randn(4, 6, requires_grad=True), torch.zeros(4, 6)
    compiled = torch.compile(function, fullgraph=True, **how)
    found: list[Tensor] = []
    torch.manual_seed(1)
    for _ in range(2):
        with one_trace() if traced_once else nullcontext():
            outputs = compiled(x, buffer)
        sum(one.sum() for one in outputs).backward()  # type: ignore[union-attr]
        found += [one.detach() for one in outputs]
    assert x.grad is not None
    return [*found, x.grad, buffer, torch.rand(1)]


@pytest.mark.parametrize("way", sorted(WAYS))
@pytest.mark.parametrize(("function", "as_"), [(factories, "aot_eager"), (unused, "eager")])
def test_the_second_step_draws_what_it_should(function: Program, as_: str, way: str) -> None:
    """``aot_eager`` leaves out what is drawn and not used; eager and the preset do not."""
    expected = two_steps(function, backend=as_)
    found = two_steps(function, traced_once=way == "plain", **WAYS[way])
    assert [torch.equal(a, b) for a, b in zip(expected, found, strict=True)] == [True] * len(expected)
