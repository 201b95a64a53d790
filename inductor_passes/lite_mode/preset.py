"""Strict lite: lite mode without the switches that torch leaves on although they change numbers or order."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .. import upstream

STRICT: Mapping[str, Any] = {
    "layout_optimization": False,
    "aten_distributed_optimizations.enable_simple_overlap": False,
    "fallback_random": True,
}


def strict_lite_options() -> dict[str, Any]:
    """Inductor options for ``torch.compile(model, options=strict_lite_options())``, any Inductor backend.

    Lite mode's own, and: no layout optimisation of convolutions (other strides, and in fp32 other numbers), no
    moving of collectives (from torch 2.14), random numbers of marked regions from torch's generator, and a
    partitioner that neither recomputes nor merges equal operators, so that every operator runs once, where the
    program runs it. With the backend of this package: ``options={"strict_lite": True}``.
    """
    present = {name: value for name, value in STRICT.items() if upstream.inductor_option_exists(name)}
    return {
        **upstream.mode_options()["lite"],
        **present,
        "custom_partitioner_fn": upstream.NonRecomputingPartitioner(),
    }
