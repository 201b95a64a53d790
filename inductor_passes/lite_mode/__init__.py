"""Inductor's lite mode: is it on for this graph?"""

from __future__ import annotations

from .state import LiteState, lite_state

__all__ = ["LiteState", "lite_state"]
