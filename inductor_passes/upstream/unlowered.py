"""What cannot be lowered as it is, where lite mode leaves out the pass that would rewrite it?"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import fx

LOWERED_AFTER_GRAD = (
    "auto_functionalized", "auto_functionalized_v2", "map_impl", "scan", "triton_kernel_wrapper_functional"
)  # fmt: skip
"""Higher-order operators without a lowering: torch rewrites them in its post-grad passes, which lite mode skips."""


def rewrite_unlowered(gm: fx.GraphModule) -> bool:
    """Rewrite what cannot be lowered as it is, with torch's own rewrites; True when there was something.

    Read in torch/_inductor/fx_passes/post_grad.py, ``post_grad_passes``; 2.15 runs the one for user-written Triton
    kernels in lite mode itself, for the same reason. A mutated tensor is always copied first: the pass that would
    find copies to spare does not run in lite mode, and without its answer torch spares every copy.
    """
    from torch._inductor.fx_passes import post_grad

    found = False
    for module in [module for module in gm.modules() if isinstance(module, fx.GraphModule)]:
        names = {name: node for node in module.graph.nodes if (name := _higher_order_name(node)) in LOWERED_AFTER_GRAD}
        if not names:
            continue
        found = True
        for node in module.graph.nodes:
            _copy_all_mutated(node)
        with _scalars_allowed(module):
            post_grad.decompose_triton_kernel_wrapper_functional(module.graph)
            post_grad.decompose_auto_functionalized(module.graph)
            post_grad.decompose_scan_to_while_loop(module)
            post_grad.decompose_map_to_while_loop(module)
        module.recompile()
    return found


@contextmanager
def _scalars_allowed(gm: fx.GraphModule) -> Iterator[None]:
    """Let the rewrites of loops read their index, whatever ``capture_scalar_outputs`` says of the user's program.

    torch/_subclasses/fake_tensor.py, ``FakeTensorMode.allow_scalar_outputs`` (read in torch 2.11.0, 2.13.0 and 2.14.1).
    """
    from torch._guards import detect_fake_mode

    mode = detect_fake_mode([node.meta.get("val") for node in gm.graph.nodes])
    if mode is None:
        yield
        return
    was, mode.allow_scalar_outputs = getattr(mode, "allow_scalar_outputs", False), True
    try:
        with mode:  # as it is while Inductor compiles
            yield
    finally:
        mode.allow_scalar_outputs = was


def _higher_order_name(node: fx.Node) -> str:
    return node.target.name() if isinstance(node.target, torch._ops.HigherOrderOperator) else ""


def _copy_all_mutated(node: fx.Node) -> None:
    """Torch's passes leave here what must be copied (torch/_higher_order_ops/auto_functionalize.py)."""
    name = _higher_order_name(node)
    if name == "auto_functionalized_v2":
        node.meta["only_clone_these_tensors"] = list(range(len(node.kwargs["_all_bases"])))  # type: ignore[arg-type]
    elif name == "auto_functionalized":
        from torch._higher_order_ops.auto_functionalize import get_mutable_args

        node.meta["only_clone_these_tensors"] = list(get_mutable_args(node.args[0])[0])  # type: ignore[arg-type]
