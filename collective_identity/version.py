"""The package's version, in one place for the code; ``pyproject.toml`` and the change log are held to it by a test."""

from __future__ import annotations

__version__ = "0.1.0"
