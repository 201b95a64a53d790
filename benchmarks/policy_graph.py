"""The graph that operator policies are measured and proved with, and what must not change; imports nothing of ours."""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F


def mixed(x: torch.Tensor, y: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """The same operators on the device (``x``, ``w``) and on the CPU (``y``)."""
    return F.relu(x) * w, F.relu(y), torch.sin(x), torch.sin(y), F.gelu(x), F.gelu(y), F.silu(x), F.silu(y)


def copy_of(function: Callable[..., Any], name: str) -> Callable[..., Any]:
    """The same function under another name: for Dynamo another one, with compiled code of its own."""
    code = function.__code__.replace(co_name=name)
    return types.FunctionType(code, function.__globals__, name)


def inputs(device: str, size: int = 8) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Device, CPU, and a device tensor that wants a gradient."""
    return (
        torch.linspace(-1, 1, size).to(device),
        torch.linspace(-1, 1, size),
        torch.full((size,), 1.0).to(device).requires_grad_(True),
    )


def differences(
    compiled: Callable[..., Any], device: str, add: float = 0, times: float | None = None, size: int = 8
) -> list[str]:
    """Run forward and backward; name the outputs that are not torch's.

    Args:
        compiled: `mixed`, compiled.
        device: of the accelerator.
        add: what its policy adds to relu on the device.
        times: what its policy multiplies by for gelu on the device; None: torch's gelu.
        size: elements of each input.
    """
    x, y, w = inputs(device, size)
    out = compiled(x, y, w)
    out[0].sum().backward()
    host = x.cpu()
    want = {
        "relu": F.relu(host) + add, "cpu relu": F.relu(y), "sin": torch.sin(host), "cpu sin": torch.sin(y),
        "gelu": F.gelu(host) if times is None else host * times, "cpu gelu": F.gelu(y),
        "silu": F.silu(host), "cpu silu": F.silu(y),
    }  # fmt: skip
    bad = [
        f"{key}: {got.detach().cpu().tolist()} instead of {value.tolist()}"
        for (key, value), got in zip(want.items(), out, strict=True)
        if not torch.allclose(got.detach().cpu(), value, atol=1e-5)
    ]
    assert w.grad is not None
    if not torch.allclose(w.grad.cpu(), F.relu(host) + add, atol=1e-5):
        bad.append(f"gradient: {w.grad.cpu().tolist()}")
    return bad


class Tables:
    """The process-wide tables, held so that their entries can be compared object for object."""

    def __init__(self) -> None:
        from torch._decomp import global_decomposition_table
        from torch._inductor import decomposition, lowering
        from torch._inductor.codegen import common

        self.tables: dict[str, Any] = {
            "lowerings": dict(lowering.lowerings),
            "fallbacks": list(lowering.fallbacks),
            "needs_realized_inputs": list(lowering.needs_realized_inputs),
            "layout constraints": dict(lowering._maybe_layout_constraints),
            "decompositions": dict(decomposition.decompositions),
            "fast random decompositions": dict(decomposition.fast_random_decomps()),
            **{f"decompositions: {kind}": dict(table) for kind, table in global_decomposition_table.items()},
            "user lowerings": dict(getattr(lowering, "user_lowerings", {})),
            "backend passes": dict(common.custom_backend_passes),
        }

    def changed(self) -> list[str]:
        """Names of tables that are no longer what they were."""
        now = Tables().tables
        return [name for name, before in self.tables.items() if not _same(before, now[name])]


def _same(a: Any, b: Any) -> bool:
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(a[key] is b[key] for key in a)
    return len(a) == len(b) and all(one is other for one, other in zip(a, b, strict=True))


def install(device: str) -> None:
    """Make the device usable, and have torch fill what it fills lazily; the second test device is built first."""
    if device == "polydev":
        from tests.policy_device.inductor import install as install_device

        install_device()
    torch.compile(lambda a, b: (a + 1, b + 1))(torch.ones(4).to(device), torch.ones(4))
