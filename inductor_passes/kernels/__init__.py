"""Pack a bucket's members into its buffer and unpack them, in one launch each; see `ops`."""

from __future__ import annotations

from .launch import available, can_move
from .layout import Layout, layout_of
from .ops import pack, unpack

__all__ = ["Layout", "available", "can_move", "layout_of", "pack", "unpack"]
