"""What does an FX target call, and whose Python code runs while it is traced?"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import torch

TORCHS_NAMESPACES = frozenset(
    "_c10d_functional _c10d_functional_autograd _dtensor aten c10d c10d_functional debug_mode_ops debugprims export "
    "flex_lib fsdp inductor mkl mkldnn onednn onnx onnx_symbolic prim prims quantized quantized_decomposed rngprims "
    "streams symm_mem".split()
)
"""Namespaces of torch's own operators that have Python kernels; one that is missing costs a cache hit."""


_KERNELS = frozenset(
    "CPU CUDA XPU MPS HPU MTIA PrivateUse1 Meta BackendSelect CompositeExplicitAutograd "
    "CompositeExplicitAutogradNonFunctional".split()
)
"""Dispatch keys below the tracer: it has recorded the operator before their code runs."""


def operators(target: Any) -> list[torch._ops.OpOverload]:
    """The overloads that an FX target may call; none for what is no operator."""
    if isinstance(target, torch._ops.OpOverload):
        return [target]
    if isinstance(target, torch._ops.OpOverloadPacket):
        return [getattr(target, name) for name in target.overloads()]
    return []


def python_above_kernels(op: torch._ops.OpOverload) -> bool:
    """Whether tracing ``op`` runs Python code of its owner's instead of recording the operator alone.

    Registered through ``torch.library`` (``_impls`` there holds ``"namespace/name.overload/key"``), by
    ``custom_op`` (which always registers an autograd kernel of torch's; the owner's part is its backward), by
    ``register_torch_dispatch``, or on the overload itself (``py_impl``).
    """
    from torch._library import simple_registry
    from torch._library.custom_ops import _maybe_get_opdef

    schema = op._schema
    name = f"{schema.name.split('::')[-1]}{'.' if schema.overload_name else ''}{schema.overload_name}"
    prefix = f"{schema.name.split('::')[0]}/{name}/"
    keys = {key.removeprefix(prefix) for key in torch.library._impls if key.startswith(prefix)} - _KERNELS
    definition = _maybe_get_opdef(op)
    if definition is not None:
        keys -= {"Autograd", "ADInplaceOrView"}
        if definition._backward_fn is not None:
            return True
    rules = simple_registry.singleton.find(schema.name).torch_dispatch_rules._data
    above = [key for key in op.py_kernels if getattr(key, "name", "") not in _KERNELS]
    return bool(keys or rules or above or op.python_key_table)


def module_of(function: Any) -> str:
    """The module that a decomposition was written in."""
    while isinstance(function, functools.partial):
        function = function.func
    return str(getattr(function, "__module__", None) or type(function).__module__)


def decomposition_table() -> Mapping[Any, Callable[..., Any]]:
    """Inductor's decompositions under the configuration of the moment."""
    from torch._inductor.decomposition import select_decomp_table

    return select_decomp_table()
