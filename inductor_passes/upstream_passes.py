"""Which passes of torch's rewrite collectives? Each by name, as a callable over one graph.

Private names, read in PyTorch 2.11.0, 2.12.0, 2.13.0, 2.14.1 and 2.15.0 ``torch/_inductor/fx_passes``; a pass that
this torch lacks is not listed. The order is that of ``post_grad.post_grad_passes``.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any, Final

import torch
import torch._inductor.config as inductor_config
from torch import fx

from collective_identity import compat
from collective_identity.transports import Transport, launch_of

from .upstream import fx_passes_module, inductor_flag, inductor_option_exists

GraphModulePass = Callable[[fx.GraphModule], None]

_ON_MODULE: Final = (
    ("micro_pipeline_tp", "micro_pipeline_tp", "micro_pipeline_tp_pass"),
    ("fuse_ddp_concat", "ddp_fusion", "fuse_ddp_with_concat_op"),
    ("fuse_ddp_coalesced", "ddp_fusion", "fuse_ddp_with_coalesced_op"),
    ("decomp_comms", "decomp_comms", "decomp_comms"),
    ("dedup_reduce_scatters", "fsdp", "dedup_fsdp_reduce_scatter"),
    ("bucket_fsdp_reduce_scatters", "fsdp", "bucket_fsdp_reduce_scatter"),
    ("bucket_reduce_scatters", "bucketing", "bucket_reduce_scatter"),
    ("bucket_all_reduces", "bucketing", "bucket_all_reduce"),
    ("bucket_fsdp_all_gathers", "fsdp", "bucket_fsdp_all_gather"),
    ("bucket_all_gathers", "bucketing", "bucket_all_gather"),
    ("pre_bucket_fsdp", "fsdp", "pre_bucket_fsdp_collectives"),
    ("overlap", "overlap_scheduling", "schedule_overlap_bucketing"),
    ("manual_overlap", "overlap_manual_scheduling", "manual_overlap_bucketing"),
    ("low_contention", "low_contention_collectives", "replace_collectives_with_low_contention"),
)


def _runtime(node: fx.Node, *_: Any) -> float:
    """Milliseconds of any node: estimates of torch's own need a GPU, and graphs are only rewritten here."""
    return 1.0


_SWITCHES: Final = (
    ("bucket_all_gathers_fx", "all"),
    ("bucket_reduce_scatters_fx", "all"),
    ("bucket_all_reduces_fx", "all"),
    ("dedup_reduce_scatters", True),
    ("_micro_pipeline_tp", True),
    ("_fuse_ddp_communication", True),
    ("aten_distributed_optimizations.allow_comms_decompositions", True),
    ("aten_distributed_optimizations.enable_overlap_scheduling", True),
    ("aten_distributed_optimizations.collective_bucketing", True),
    ("aten_distributed_optimizations.insert_overlap_deps", True),
    ("aten_distributed_optimizations.compute_estimator", "analytical"),
    ("aten_distributed_optimizations.custom_runtime_estimation", _runtime),
    ("aten_distributed_optimizations.enable_low_contention_collectives", True),
    ("aten_distributed_optimizations.low_contention_min_bytes_per_rank", 0),
    ("aten_distributed_optimizations.low_contention_skip_overlap_check", True),
)


def all_switches() -> Mapping[str, Any]:
    """Every Inductor option of this torch that makes a pass rewrite collectives, switched on."""
    return {name: value for name, value in _SWITCHES if inductor_option_exists(name)}


def rewrites_collectives() -> bool:
    """Whether any of these passes is switched on, in this thread, now."""
    names = ("_estimat", "min_bytes", "skip_overlap", "insert_overlap", "collective_bucketing")
    return any(
        inductor_flag(name) not in (False, None, "none")
        for name, _ in _SWITCHES
        if inductor_option_exists(name) and not any(part in name for part in names)
    )


REGIONS: Final = "aten_distributed_optimizations.enable_fusion_regions"


def hooks_survive() -> bool:
    """Whether torch's passes can run on a graph with FX hooks on it.

    The scheduler of 2.11 and 2.12 collapses fusion regions and puts them back by replacing a node by a tuple, which
    ``torch/fx/node.py`` cannot tell a replace hook (``replace_with.name``): it raises.
    """
    scheduler = "aten_distributed_optimizations.enable_overlap_scheduling"
    if compat.torch_version() >= (2, 13) or not inductor_option_exists(REGIONS) or not inductor_flag(scheduler):
        return True
    return inductor_flag(REGIONS) is False


def upstream_passes() -> Mapping[str, GraphModulePass]:
    """Torch's passes over collectives by name, each with what it needs around it; in place.

    ``post_grad`` is the whole stage with `all_switches`.
    """
    found: dict[str, GraphModulePass] = {}
    for name, module, function in _ON_MODULE:
        try:
            call = getattr(fx_passes_module(module), function)
        except (ImportError, AttributeError):
            continue
        found[name] = _pass(name, call)
    found["post_grad"] = _post_grad
    return found


def _pass(name: str, call: Callable[..., Any]) -> GraphModulePass:
    def run(gm: fx.GraphModule) -> None:
        given = _arguments(gm, call)
        on_graph = next(iter(inspect.signature(call).parameters)) == "graph"
        with symmetric_memory() if name in ("micro_pipeline_tp", "low_contention") else nullcontext():
            with inductor_config.patch(dict(all_switches())), _fake_mode(gm):  # type: ignore[attr-defined]
                call(gm.graph if on_graph else gm, **given)
        _sort(gm)

    run.__name__ = run.__qualname__ = name
    return run


def _arguments(gm: fx.GraphModule, call: Callable[..., Any]) -> dict[str, Any]:
    parameters = inspect.signature(call).parameters
    parts, reduces = _parts(gm)
    given: dict[str, Any] = {
        "bucket_size_mb": 25,
        "bucket_cap_mb": 100.0,
        "bucket_cap_mb_by_bucket_idx": None,
        "collective_bucketing": True,
        "insert_overlap_deps": not reduces or "module_bucket_plans" not in parameters,
        "compute_estimator": "analytical",
        "custom_runtime_estimation": _runtime,
        "module_bucket_plans": list(dict.fromkeys(parts.values())),
        "module_stack_fn": lambda node: [(parts[node], torch.nn.Module)],
    }
    return {key: value for key, value in given.items() if key in parameters}


def _parts(gm: fx.GraphModule) -> tuple[dict[fx.Node, str], bool]:
    """A module's path for each node, as the manual scheduler asks for, and whether the graph holds an all-reduce.

    A new one at each fourth collective and behind each all-reduce: on a part in which one reduces what another, later
    merged, has scattered the scheduler of 2.13 raises (it puts the bucket behind its last member and leaves what uses
    the first where it was), and that of 2.14 on any such graph when it adds dependencies (they form a ring).
    """
    found: dict[fx.Node, str] = {}
    part = held = 0
    reduced = reduces = False
    for node in gm.graph.nodes:
        launch = launch_of(node)
        if launch is not None:
            if held == 4 or reduced:
                part, held = part + 1, 0
            held, reduced = held + 1, launch.transport is Transport.ALL_REDUCE
            reduces |= reduced
        found[node] = f"model.part{part}"
    return found, reduces


def _post_grad(gm: fx.GraphModule) -> None:
    from torch._inductor.fx_passes.post_grad import post_grad_passes

    switches = inductor_config.patch(dict(all_switches()))  # type: ignore[attr-defined]
    with symmetric_memory(), switches, _fake_mode(gm):
        post_grad_passes(gm, is_inference=False)


def _sort(gm: fx.GraphModule) -> None:
    from torch._inductor.pattern_matcher import stable_topological_sort

    stable_topological_sort(gm.graph)


@contextmanager
def _fake_mode(gm: fx.GraphModule) -> Iterator[None]:
    """As while Inductor compiles: the graph's own fake mode is the current one."""
    from torch._guards import detect_fake_mode
    from torch._inductor.virtualized import V

    mode = detect_fake_mode([node.meta.get("val") for node in gm.graph.nodes])
    if mode is None:
        yield
        return
    with V.set_fake_mode(mode):
        yield


@contextmanager
def symmetric_memory() -> Iterator[None]:
    """Have passes believe that every group can use symmetric memory: graphs are rewritten, nothing runs.

    PyTorch 2.11-2.15 ``torch/distributed/_symmetric_memory`` ``_test_mode``.
    """
    from torch.distributed import _symmetric_memory as symm_mem

    with symm_mem._test_mode():
        yield
