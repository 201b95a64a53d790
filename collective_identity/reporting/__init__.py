"""How is a run told? Records on disk, the report built from them, and its rendering in a terminal."""

from __future__ import annotations

from .jsonl import RunFolderError, read_run
from .records import SCHEMA
from .report import Report, build_report

__all__ = ["SCHEMA", "Report", "RunFolderError", "build_report", "read_run"]
