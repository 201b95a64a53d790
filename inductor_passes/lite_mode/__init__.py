"""Inductor's lite mode: is it on for this graph, what keeps its promise, and what makes its marked regions work."""

from __future__ import annotations

from .decompose import OneTraceTable, Selection, select
from .guard import Guard, LiteViolation, check_result, guarded
from .lowering import LiteUnsupported, prepare
from .marks import is_marked, marks_digest
from .plain import one_trace
from .preset import strict_lite_options
from .state import LiteState, lite_parts, lite_state

__all__ = [
    "Guard",
    "LiteState",
    "LiteUnsupported",
    "LiteViolation",
    "OneTraceTable",
    "Selection",
    "check_result",
    "guarded",
    "is_marked",
    "lite_parts",
    "lite_state",
    "marks_digest",
    "one_trace",
    "prepare",
    "select",
    "strict_lite_options",
]
