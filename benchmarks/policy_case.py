"""Policies to measure and prove with, one mixed graph, and what must not change in the process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from inductor_passes.device_policy import OperatorPolicy

aten = torch.ops.aten


def relu_a(x: Any) -> Any:
    return shifted(x, 100)


def relu_b(x: Any) -> Any:
    return shifted(x, 200)


def shifted(x: Any, by: float) -> Any:
    from torch._inductor.lowering import lowerings

    return lowerings[aten.add.Tensor](lowerings[aten.relu.default](x), by)


def gelu_a(x: Any, approximate: str = "none") -> Any:
    return x * 10


def gelu_b(x: Any, approximate: str = "none") -> Any:
    return x * 20


WANTED: dict[str, tuple[float, float | None]] = {"A": (100, 10), "B": (200, 20), "C": (0, None), "none": (0, None)}
"""What each policy adds to relu and multiplies by for gelu on the device (None: torch's gelu)."""


def policy(name: str, device: str) -> OperatorPolicy | None:
    """A and B give wrong numbers that are easy to tell apart; C gives right ones; none is no policy."""
    if name == "A":
        return OperatorPolicy(
            "A", "1", device,
            decompositions={aten.gelu.default: gelu_a},
            remove_decompositions=[aten.silu.default],
            lowerings={aten.relu.default: relu_a},
            fallbacks=[aten.sin.default, aten.silu.default],
        )  # fmt: skip
    if name == "B":
        return OperatorPolicy(
            "B", "1", device,
            decompositions={aten.gelu.default: gelu_b},
            lowerings={aten.relu.default: relu_b},
            fallbacks=[aten.cos.default],
        )  # fmt: skip
    if name == "C":
        return OperatorPolicy("C", "1", device, fallbacks=[aten.sin.default, aten.cos.default])
    return None


def backend(name: str, device: str) -> Any:
    """What to give ``torch.compile``; no policy is torch's own backend."""
    made = policy(name, device)
    return "inductor" if made is None else made.backend()


def mixed(x: torch.Tensor, y: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """The same operators on the device (``x``, ``w``) and on the CPU (``y``)."""
    return F.relu(x) * w, F.relu(y), torch.sin(x), torch.sin(y), F.gelu(x), F.gelu(y), F.silu(x), F.silu(y)


def inputs(device: str, size: int = 8) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Device, CPU, and a device tensor that wants a gradient."""
    return (
        torch.linspace(-1, 1, size).to(device),
        torch.linspace(-1, 1, size),
        torch.full((size,), 1.0).to(device).requires_grad_(True),
    )


def wrong(compiled: Callable[..., Any], name: str, device: str, size: int = 8) -> list[str]:
    """Run forward and backward and name the outputs that are not what policy ``name`` makes them."""
    add, times = WANTED[name]
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
    """Make the device usable; the second test device is built first."""
    if device == "polydev":
        from tests.policy_device.inductor import install as install_device

        install_device()
