"""By which functions do torch's passes tell what is FSDP's?"""

from __future__ import annotations

import importlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

FX_PASSES = "torch._inductor.fx_passes"


@dataclass(frozen=True, slots=True)
class Classifier:
    """A function of torch's by which its passes tell what is FSDP's (PyTorch ``torch/_inductor/fx_passes``).

    Attributes:
        module: where it is defined, below `FX_PASSES`.
        function: its name.
        parameters: names of its parameters.
        since: first version that has it so.
        until: last one, None for every later one.
        rebound: modules that bind it again, each with the first version that does.
    """

    module: str
    function: str
    parameters: tuple[str, ...]
    since: tuple[int, int] = (2, 11)
    until: tuple[int, int] | None = None
    rebound: tuple[tuple[str, tuple[int, int]], ...] = ()


_REPLACED = ("low_contention_collectives", "_replace_collective", ("node", "graph", "symm_mem", "is_ag", "group_name"))


_MANUAL = (("overlap_manual_scheduling", (2, 11)),)


CLASSIFIERS: Mapping[str, Classifier] = MappingProxyType(
    {
        "gather": Classifier(
            "fsdp", "is_fsdp_all_gather", ("n",), (2, 12), rebound=(("overlap_preserving_bucketer", (2, 12)),)
        ),
        "gather by wait": Classifier("fsdp", "is_fsdp_all_gather_wait", ("wait",)),
        "scatter by wait": Classifier("fsdp", "is_fsdp_reduce_scatter_wait", ("wait",)),
        "gather in the bucketer": Classifier(
            "bucketing", "is_fsdp_all_gather", ("node", "all_node_ancestors"), rebound=_MANUAL
        ),
        "scatter in the bucketer": Classifier("bucketing", "is_fsdp_reduce_scatter", ("node",), rebound=_MANUAL),
        "groups": Classifier("fsdp", "identify_fsdp_groups", ("gm",), (2, 13)),
        "all-reduces": Classifier(
            "fsdp", "bucket_fsdp_all_reduce", ("gm", "bucket_cap_mb_by_bucket_idx", "fsdp_groups"), (2, 13)
        ),
        "low contention": Classifier(*_REPLACED, (2, 13), (2, 13)),
        "low contention with a target": Classifier(*_REPLACED[:2], (*_REPLACED[2], "target"), (2, 14)),
    }
)
"""Every such function by what it is asked."""


ALL_REDUCES_BY_MB = ("fsdp", "bucket_all_reduce_by_mb")
"""What merges the all-reduces that ``bucket_fsdp_all_reduce`` chose: module and function (2.13 on)."""


def fx_passes_module(name: str) -> Any:
    """One of torch's modules of passes.

    Raises:
        ImportError: this torch lacks it.
    """
    return importlib.import_module(f"{FX_PASSES}.{name}")


def group_names(found: Iterable[str]) -> Any:
    """Names in the container that ``identify_fsdp_groups`` returns."""
    from torch.utils._ordered_set import OrderedSet

    return OrderedSet(found)
