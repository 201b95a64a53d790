"""Pack a bucket's members into its buffer and unpack them, in one launch each; see `ops`."""

from __future__ import annotations

from .launch import available, can_move
from .layout import Layout, layout_of
from .ops import pack, unpack
from .planned import compile_kernels_of

__all__ = ["Layout", "available", "can_move", "compile_kernels_of", "layout_of", "pack", "unpack"]
