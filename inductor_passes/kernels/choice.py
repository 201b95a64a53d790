"""What packs and unpacks a bucket: a kernel of ours, or an operator of torch that does the same and is faster?"""

from __future__ import annotations

from collections.abc import Set
from typing import Literal

import torch

from .launch import can_move
from .layout import Layout

Way = Literal["cat", "kernel", "plain"]


def way_to_pack(layout: Layout, types: Set[torch.dtype], buffer: torch.dtype, *, kernels: bool) -> Way:
    """What packs members of these types into a buffer of that type. Every way gives the same bits.

    - ``"cat"``: ``torch.cat`` of the flat members, where the buffer is just that: one row, no padding and no cast. It
      was the faster of the two on an H200 at every size (docs/kernels.md).
    - ``"kernel"``: otherwise, where kernels run (`launch.available`, given as ``kernels``) and know the types.
    - ``"plain"``: otherwise: several of torch's operators.
    """
    if layout.rows == 1 and layout.widths == layout.lengths and types == {buffer}:
        return "cat"
    return way_to_unpack(layout, types, buffer, kernels=kernels)


def way_to_unpack(layout: Layout, types: Set[torch.dtype], buffer: torch.dtype, *, kernels: bool) -> Way:
    """What takes members of these types out of a buffer of that type: ``"kernel"`` or ``"plain"``, as above."""
    return "kernel" if kernels and can_move(types, buffer, layout) else "plain"
