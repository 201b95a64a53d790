"""What lite mode cannot lower as it is: rewritten with torch's own rewrites, or refused with the way out."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

import torch
from torch import fx

from .. import upstream
from .marks import is_marked

NEEDS_MARK: Mapping[str, str] = MappingProxyType(
    {
        "flex_attention": "its score and mask functions are only lowered when they are decomposed",
        "flex_attention_backward": "its score and mask functions are only lowered when they are decomposed",
    }
)
"""Higher-order operators that work in lite mode inside a marked region alone, and why."""


class LiteUnsupported(RuntimeError):
    """An operator that torch cannot compile in lite mode; the message names it and says what to do."""


def prepare(gm: fx.GraphModule) -> None:
    """Make the graph lowerable in lite mode.

    Mutating custom operators, ``scan`` and ``map`` reach Inductor in a form that its post-grad passes rewrite, and
    lite mode skips those. The rewrites are part of lowering, not optimisations, so they are made here.

    Raises:
        LiteUnsupported: an operator of ``NEEDS_MARK`` outside a marked region.
    """
    for module in gm.modules():
        if isinstance(module, fx.GraphModule):
            for node in module.graph.nodes:
                _check(node)
    upstream.rewrite_unlowered(gm)


def _check(node: fx.Node) -> None:
    if not isinstance(node.target, torch._ops.HigherOrderOperator) or is_marked(node):
        return
    name = node.target.name()
    if name in NEEDS_MARK:
        raise LiteUnsupported(
            f"lite mode expects {name!r} inside a region that is marked for compilation, found node {node.name} "
            f"outside one: {NEEDS_MARK[name]}. Put the call under "
            'torch.fx.traceback.annotate({"compile_with_inductor": 0}), or compile it without lite mode'
        )
