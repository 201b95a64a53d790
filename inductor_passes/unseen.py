"""What may AOTAutograd's trace put into a graph that is not in the graph which Dynamo captured?

AOTAutogradCache computes its key before that trace. Python code that only the trace runs can open a `role_scope` and
launch collectives; its roles, and its source, are in no part of the key. `FxGraphCache` keys the traced graph, and the
backend digests that.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import fx
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from . import upstream

_KNOWN = frozenset({"torch", "collective_identity", "fsdp_hooks", "inductor_passes"})
"""Packages whose versions are in the keys: torch's own, and ours by a digest of their sources."""


def unseen(gm: fx.GraphModule, inputs: Sequence[Any]) -> tuple[str, ...]:
    """What the trace of a captured graph runs that no key covers, one line each, in order; empty: nothing.

    Looked at, in the graph and its sub-graphs: operators with Python code above their kernels (composite, autograd or
    a rule for a mode), and decompositions, where neither is torch's or ours; tensor subclasses of others among the
    inputs; a joint pass of the user's, which torch keeps out of the key. C++ code is taken to open no `role_scope`.
    """
    found = [f"operator {name}" for name in dict.fromkeys(_operators(gm))]
    found += [f"tensor subclass {name}" for name in dict.fromkeys(name for one in inputs for name in _subclasses(one))]
    if upstream.has_joint_pass():
        found.append("torch._functorch.config.joint_custom_pass")
    return tuple(found)


def _operators(gm: fx.GraphModule) -> Iterable[str]:
    table = upstream.decomposition_table()
    for module in gm.modules():
        if not isinstance(module, fx.GraphModule):
            continue
        for node in module.graph.nodes:
            for op in upstream.operators(node.target):
                namespace = op.name().split("::")[0]
                if namespace in upstream.TORCHS_NAMESPACES or namespace in _KNOWN:
                    python = False
                else:
                    python = upstream.python_above_kernels(op)
                if python or (op in table and not _is_known(upstream.module_of(table[op]))):
                    yield op.name()


def _subclasses(value: Any) -> Iterable[str]:
    if not isinstance(value, torch.Tensor) or not is_traceable_wrapper_subclass(value):
        return
    kind = type(value)
    if not _is_known(kind.__module__):
        yield f"{kind.__module__}.{kind.__qualname__}"
    names, _ = value.__tensor_flatten__()
    for name in names:
        yield from _subclasses(getattr(value, name))


def _is_known(module: str) -> bool:
    return module.split(".")[0] in _KNOWN
