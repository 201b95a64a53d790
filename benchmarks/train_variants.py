"""Which ways to run FSDP2 are measured?"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from collective_identity.compat import torch_version
from inductor_passes.upstream import inductor_option_exists


@dataclass(frozen=True, slots=True)
class Variant:
    """One way to run: eager, each block compiled, captured whole with these backend options, or without FSDP.

    Attributes:
        blocks: compile each block, FSDP2 around it eager.
        bound: without FSDP.
        captured: `fsdp_hooks.install`, and the whole model compiled.
        recorded: the step is recorded as a CUDA graph, and replayed.
        options: of the backend.
        layouts: where it can run.
        upstream: it runs torch's own passes, whose faults are told but fail nothing.
    """

    blocks: bool = False
    bound: bool = False
    captured: bool = False
    recorded: bool = False
    options: Mapping[str, Any] = field(default_factory=dict)
    layouts: tuple[str, ...] = ("fsdp", "hsdp", "fsdp_tp")
    upstream: bool = False

    @property
    def compiles(self) -> bool:
        """Whether anything is compiled."""
        return self.blocks or self.bound or self.captured


def _ours(
    layouts: tuple[str, ...] = ("fsdp", "hsdp", "fsdp_tp"), *, recorded: bool = False, **options: Any
) -> Variant:
    return Variant(captured=True, recorded=recorded, options=options, layouts=layouts)


def _upstream(*, buckets: bool = False, overlap: bool = False) -> Variant:
    """Torch's own passes on the captured graph, ours off: buckets over the whole graph, and the scheduler, which makes
    buckets of its own."""
    options: dict[str, Any] = {"bucketing": False}
    if buckets:
        options |= {"bucket_all_gathers_fx": "all", "bucket_reduce_scatters_fx": "all"}
    if overlap:
        group = "aten_distributed_optimizations"
        options |= {f"{group}.{name}": True for name in ("enable_overlap_scheduling", "insert_overlap_deps")}
        options[f"{group}.collective_bucketing"] = True
        regions = f"{group}.enable_fusion_regions"
        if torch_version() < (2, 13) and inductor_option_exists(regions):
            options[regions] = False  # identities cannot be followed through them before
    return Variant(captured=True, options=options, upstream=True)


GATHERS, BOTH = ("all_gather",), ("all_gather", "reduce_scatter")
VARIANTS: Mapping[str, Variant] = MappingProxyType(
    {
        "eager": Variant(),
        "per_block": Variant(blocks=True),
        "captured": _ours(bucketing=False),
        "not_resharded": _ours(bucketing=False, reshard=False),
        "bucketed": _ours(),
        "overlapped": _ours(overlap=1),
        "overlapped_2": _ours(overlap=2),
        "coalesced": _ours(overlap=1, coalesced=GATHERS),
        "coalesced_2": _ours(overlap=2, coalesced=GATHERS),
        "coalesced_all": _ours(overlap=1, coalesced=BOTH),
        "coalesced_all_2": _ours(overlap=2, coalesced=BOTH),
        "recorded": _ours(recorded=True, overlap=1),
        "recorded_ops": _ours(recorded=True, overlap=1, kernels="ops"),
        "recorded_coalesced": _ours(recorded=True, overlap=1, coalesced=GATHERS),
        "recorded_coalesced_ops": _ours(recorded=True, overlap=1, coalesced=GATHERS, kernels="ops"),
        "recorded_graph": _ours(recorded=True, order="graph", cap_mb=500.0),
        "fused": _ours(("fsdp_tp",), overlap=1, fusion=True),
        "bound": Variant(bound=True, layouts=("fsdp",)),
        "bucketed_graph": _ours(order="graph", cap_mb=500.0),
        "upstream_bucketed": _upstream(buckets=True),
        "upstream_overlap": _upstream(overlap=True),
        "upstream_both": _upstream(buckets=True, overlap=True),
    }
)
