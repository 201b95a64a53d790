"""Overlap: FSDP's gathers one parameter group ahead of their use, its reductions behind the next group's compute."""

from __future__ import annotations

from .apply import apply_overlap
from .plan import OverlapPlan, plan_overlap

__all__ = ["OverlapPlan", "apply_overlap", "plan_overlap"]
