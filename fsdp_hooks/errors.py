"""What ``fsdp_hooks`` raises. Every message says what was expected, what was found, where, and what to do."""

from __future__ import annotations


class InstallError(RuntimeError):
    """``install`` cannot work on this model as it is."""


class UnsupportedOption(InstallError):
    """An FSDP2 option that capture does not honour. It is refused, never ignored."""
