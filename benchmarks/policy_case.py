"""Policies to measure and prove with, and what each makes of the graph in ``policy_graph``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch._decomp
from torch._inductor import lowering

from inductor_passes.device_policy import OperatorPolicy, identity

from .policy_graph import differences

aten = torch.ops.aten
FACTOR = 10


def relu_a(x: Any) -> Any:
    return shifted(x, 100)


def relu_b(x: Any) -> Any:
    return shifted(x, 200)


def shifted(x: Any, by: float, more: float = 0) -> Any:
    return lowering.lowerings[aten.add.Tensor](lowering.lowerings[aten.relu.default](x), by + more)


def shifted_further(x: Any, by: float) -> Any:
    return lowering.lowerings[aten.add.Tensor](lowering.lowerings[aten.relu.default](x), by + 1)


def gelu_a(x: Any, approximate: str = "none") -> Any:
    return x * FACTOR


def gelu_b(x: Any, approximate: str = "none") -> Any:
    return x * 20


def relu_of_torch(x: Any) -> Any:
    return lowering.lowerings[aten.relu.default](x)


def gelu_of_torch(x: Any, approximate: str = "none") -> Any:
    return torch._decomp.decomposition_table[aten.gelu.default](x, approximate)


WANTED: dict[str, tuple[float, float | None]] = {
    "A": (100, 10), "B": (200, 20), "C": (0, None), "torch's": (0, None), "none": (0, None),
    "A, helper": (101, 10), "A, constant": (100, 11), "A, default": (107, 10), "A, python": (100, 10),
}  # fmt: skip
"""What each policy adds to relu and multiplies by for gelu on the device (None: torch's gelu)."""


def policy(name: str, device: str) -> OperatorPolicy | None:
    """A and B give wrong numbers that are easy to tell apart, C right ones; "torch's" asks for what torch does."""
    name = name.partition(",")[0]
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
    if name == "torch's":
        return OperatorPolicy(
            "torch's", "1", device,
            decompositions={aten.gelu.default: gelu_of_torch}, lowerings={aten.relu.default: relu_of_torch},
        )  # fmt: skip
    return None


def change(what: str) -> None:
    """Change one thing that policy A reaches, as an edit of its source would, or as another Python would."""
    if what == "helper":
        globals()["shifted"] = shifted_further
    elif what == "constant":
        globals()["FACTOR"] = 11
    elif what == "default":
        shifted.__defaults__ = (7,)
    elif what == "python":
        identity.PYTHON = "3.99"
    else:
        raise ValueError(f"change() expects helper, constant, default or python, found {what!r}")


def backend(name: str, device: str) -> Any:
    """What to give ``torch.compile``; no policy is torch's own backend."""
    made = policy(name, device)
    return "inductor" if made is None else made.backend()


def wrong(compiled: Callable[..., Any], name: str, device: str, size: int = 8) -> list[str]:
    """Run forward and backward and name the outputs that are not what policy ``name`` makes them."""
    add, times = WANTED[name]
    return differences(compiled, device, add, times, size)

