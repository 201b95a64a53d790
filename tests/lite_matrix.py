"""Programs of every kind in lite mode against ``aot_eager``, bit for bit: outputs, gradients, buffers.

tests/lite_matrix_programs.py has the programs, tests/passes/test_lite_matrix.py runs them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from inductor_passes import one_trace, strict_lite_options

WAYS: Mapping[str, dict[str, Any]] = {
    "backend": {"backend": "collective_identity", "options": {"strict_lite": True}},
    "plain": {"options": strict_lite_options()},
}


@dataclass(frozen=True, slots=True)
class Program:
    """One program with its inputs, made anew for each way to compile it.

    Attributes:
        run: what is compiled.
        inputs: its arguments; gradients of those that need them are compared, and the final values of the others.
        model: whose parameters' gradients and whose buffers are compared.
        dynamic: compile for any size.
        dynamo: Dynamo's configuration.
        whole: as one graph, so that nothing which fails falls back to eager unseen; False where Dynamo itself breaks.
    """

    run: Callable[..., Any]
    inputs: tuple[Tensor, ...]
    model: nn.Module | None = None
    dynamic: bool | None = None
    dynamo: Mapping[str, Any] = field(default_factory=dict)
    whole: bool = True


Make = Callable[[], Program]


def results(make: Make, *, traced_once: bool = False, **how: Any) -> dict[str, list[Tensor]]:
    """Outputs, gradients and what was or may be mutated, after one forward and, where anything needs it, backward."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    program = make()
    once: AbstractContextManager[Any] = one_trace() if traced_once else nullcontext()
    torch.manual_seed(42)
    with torch._dynamo.config.patch(dict(program.dynamo)), once:
        compiled = torch.compile(program.run, dynamic=program.dynamic, fullgraph=program.whole, **how)
        outputs = [one for one in tree_leaves(compiled(*program.inputs)) if isinstance(one, Tensor)]
        needy = [one for one in outputs if one.requires_grad]
        if needy:
            torch.stack([(one.abs() if one.is_complex() else one).double().sum() for one in needy]).sum().backward()
    leaves = [*program.inputs, *(program.model.parameters() if program.model is not None else ())]
    buffers = program.model.buffers() if program.model is not None else ()
    return {
        "outputs": [one.detach().clone(memory_format=torch.preserve_format) for one in outputs],
        "gradients": [one.grad for one in leaves if one.grad is not None],
        "buffers": [one.detach() for one in (*leaves, *buffers)],
    }


def differences(expected: Mapping[str, list[Tensor]], found: Mapping[str, list[Tensor]]) -> list[str]:
    """What is not the same bit for bit, one line each."""
    lines = [
        f"{len(found[kind])} {kind}, expected {len(expected[kind])}"
        for kind in expected
        if len(expected[kind]) != len(found[kind])
    ]
    return lines or [
        f"{kind}[{at}]: {_difference(was, now)}"
        for kind in expected
        for at, (was, now) in enumerate(zip(expected[kind], found[kind], strict=True))
        if not _identical(was, now)
    ]


def _identical(a: Tensor, b: Tensor) -> bool:
    if (a.dtype, a.shape, a.stride()) != (b.dtype, b.shape, b.stride()):
        return False
    a, b = (torch.view_as_real(one) if one.is_complex() else one for one in (a, b))
    return bool(((a == b) | (a.isnan() & b.isnan())).all())


def _difference(a: Tensor, b: Tensor) -> str:
    if a.shape != b.shape or a.dtype != b.dtype:
        return f"{a.dtype} {tuple(a.shape)}, found {b.dtype} {tuple(b.shape)}"
    if a.stride() != b.stride():
        return f"strides {a.stride()}, found {b.stride()}"
    return f"largest difference {(a.to(torch.complex128) - b.to(torch.complex128)).abs().max().item():.3g}"
