"""Which torch do the passes know? The versions, and what is looked for at install."""

from __future__ import annotations

import inspect

import torch
import torch._functorch.config as functorch_config
import torch._inductor.config as inductor_config
import torch.compiler.config as compiler_config
from torch.distributed.tensor import DTensor

from collective_identity.compat import torch_version

from .compilers import _compile_fx

SUPPORTED = ((2, 11), (2, 15))


class UnsupportedTorch(RuntimeError):
    """This torch is not one whose compiler the passes know."""


def check_version() -> None:
    """Refuse a torch outside 2.11 to 2.15, or one whose hooks are not as they were read."""
    low, high = SUPPORTED
    if not low <= torch_version() <= high:
        raise UnsupportedTorch(
            f"inductor_passes expects torch {low[0]}.{low[1]} to {high[0]}.{high[1]}, found {torch.__version__}: "
            "install a torch in that range, or a newer collective-identity"
        )
    missing = [
        f"{module.__name__}.{name}"
        for module, name in (
            (functorch_config, "joint_custom_pass"),
            (inductor_config, "post_grad_custom_pre_pass"),
            (inductor_config, "fallback_by_default"),
            (compiler_config, "cache_key_tag"),
            (DTensor, "_local_tensor"),
            (DTensor, "_spec"),
        )
        if not hasattr(module, name)
    ]
    if "inner_compile" not in inspect.signature(_compile_fx()).parameters:
        missing.append("torch._inductor.compile_fx.compile_fx(inner_compile=)")
    if missing:
        raise UnsupportedTorch(
            f"inductor_passes expects {', '.join(missing)} (seen in torch 2.11 to 2.15), not found in torch "
            f"{torch.__version__}: use a released torch in that range"
        )
