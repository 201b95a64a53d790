"""Every private torch name that the passes use, in one place: one module for each question.

Read in torch 2.11.0, 2.12.0, 2.13.0, 2.14.1 and 2.15.0. Configuration is patched for the duration of one compile, in
the thread that compiles, and put back. One function of torch's is replaced, while a user asks for it
(``compile_fx_replaced``), and then for the threads that do.
"""

from __future__ import annotations

from .caches import (
    autograd_cache_bypassed,
    autograd_cache_disabled,
    autograd_cache_is_on,
    cache_dir,
    cache_key,
    caches_disabled,
    source_hash,
)
from .classifiers import ALL_REDUCES_BY_MB, CLASSIFIERS, FX_PASSES, Classifier, fx_passes_module, group_names
from .compilers import GraphCompiler, aot_eager, inductor, kind_of_inner, reading
from .config import (
    LITE_SWITCH,
    CallersConfig,
    callers_config,
    inductor_flag,
    inductor_flags,
    inductor_option_exists,
    is_lite,
    mode_options,
    region_patches,
)
from .equal_nodes import removes_common_subexpressions, without_common_subexpressions
from .hooks import called_kernels, has_joint_pass, joint_pass, post_grad_pass, write_around
from .nodes import custom_value, is_symbolic, mark_recompute, mark_save, misplaced_random_ops, traced_now
from .partitioner import NonRecomputingPartitioner
from .replacing import compile_fx_replaced
from .shards import autograd_is_traced, has_shard, shards_of, takes_shard
from .targets import TORCHS_NAMESPACES, decomposition_table, module_of, operators, python_above_kernels
from .unlowered import LOWERED_AFTER_GRAD, rewrite_unlowered
from .unwaited import unwaited_inputs
from .versions import SUPPORTED, UnsupportedTorch, check_version

__all__ = [
    "ALL_REDUCES_BY_MB",
    "CLASSIFIERS",
    "CallersConfig",
    "Classifier",
    "FX_PASSES",
    "GraphCompiler",
    "LITE_SWITCH",
    "LOWERED_AFTER_GRAD",
    "NonRecomputingPartitioner",
    "SUPPORTED",
    "TORCHS_NAMESPACES",
    "UnsupportedTorch",
    "aot_eager",
    "autograd_cache_bypassed",
    "autograd_cache_disabled",
    "autograd_cache_is_on",
    "autograd_is_traced",
    "cache_dir",
    "cache_key",
    "caches_disabled",
    "called_kernels",
    "callers_config",
    "check_version",
    "compile_fx_replaced",
    "custom_value",
    "decomposition_table",
    "fx_passes_module",
    "group_names",
    "has_joint_pass",
    "has_shard",
    "inductor",
    "inductor_flag",
    "inductor_flags",
    "inductor_option_exists",
    "is_lite",
    "is_symbolic",
    "joint_pass",
    "kind_of_inner",
    "mark_recompute",
    "mark_save",
    "misplaced_random_ops",
    "mode_options",
    "module_of",
    "operators",
    "post_grad_pass",
    "python_above_kernels",
    "reading",
    "region_patches",
    "removes_common_subexpressions",
    "rewrite_unlowered",
    "shards_of",
    "source_hash",
    "takes_shard",
    "traced_now",
    "unwaited_inputs",
    "without_common_subexpressions",
    "write_around",
]
