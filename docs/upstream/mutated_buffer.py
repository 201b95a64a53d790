"""A copy of a buffer is used, then the buffer is mutated: the gradient is computed from the mutated one.

Run: python mutated_buffer.py
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor


def product(x: Tensor, buffer: Tensor) -> Tensor:
    held = buffer.clone()
    buffer.mul_(0.5)
    return x @ held.t()


def twice(x: Tensor, buffer: Tensor) -> Tensor:
    y = x * buffer.clone()
    buffer.mul_(0.5)
    return y * buffer.clone()


def gradient(call: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
    made = torch.Generator().manual_seed(0)
    x, buffer = (torch.randn(4, 6, generator=made) for _ in range(2))
    call(x.requires_grad_(), buffer).sum().backward()
    assert x.grad is not None
    return x.grad


if __name__ == "__main__":
    print(torch.__version__)
    for program in (product, twice):
        for backend in ("aot_eager", "inductor"):
            torch._dynamo.reset()
            found = gradient(torch.compile(program, backend=backend, fullgraph=True))
            print(program.__name__, backend, "differs from eager by", (found - gradient(program)).abs().max().item())
