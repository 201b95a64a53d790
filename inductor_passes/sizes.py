"""What is known of a size without asking for a guard? The only place that looks into symbolic sizes.

Read in PyTorch 2.11.0, 2.12.0, 2.13.0, 2.14.1 and 2.15.0: ``torch/fx/experimental/symbolic_shapes.py``
(``statically_known_true``, ``ShapeEnv.suppress_guards``) and ``sym_node.py`` (``SymNode.has_hint``, ``.hint``).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch.fx.experimental.symbolic_shapes import statically_known_true

Size = int | torch.SymInt


def surely_equal(a: Size, b: Size) -> bool:
    """Whether two sizes are equal whatever the symbols stand for; adds no guard."""
    if isinstance(a, int) and isinstance(b, int):
        return a == b
    return bool(statically_known_true(a == b))


def surely_same(a: Sequence[Size], b: Sequence[Size]) -> bool:
    """Whether two shapes are equal whatever the symbols stand for."""
    return len(a) == len(b) and all(map(surely_equal, a, b))


def surely_divides(size: Size, by: int) -> bool:
    """Whether ``size`` is a multiple of ``by`` whatever the symbols stand for."""
    return size % by == 0 if isinstance(size, int) else bool(statically_known_true(size % by == 0))


def is_static(value: torch.Tensor) -> bool:
    """Whether shape and strides hold no symbol."""
    return all(isinstance(size, int) for size in (*value.shape, *value.stride()))


def unhinted(value: torch.Tensor) -> list[str]:
    """The symbolic sizes and strides of a tensor whose value is not even hinted at, as text."""
    symbols = [size for size in (*value.shape, *value.stride()) if not isinstance(size, int)]
    return list(dict.fromkeys(str(size) for size in symbols if not size.node.has_hint()))


def hinted_numel(value: torch.Tensor) -> int:
    """The number of elements, a symbolic size standing for its hint."""
    return math.prod(size if isinstance(size, int) else int(size.node.hint) for size in value.shape)


def without_guards(mode: Any) -> AbstractContextManager[Any]:
    """Compute fake values under ``mode`` without adding guards to the graph's shapes."""
    shapes = getattr(mode, "shape_env", None)
    return nullcontext() if shapes is None else shapes.suppress_guards()
