"""Device-scoped operator policies: an accelerator's decompositions, lowerings and fallbacks, for one compile.

A policy is an immutable value, resolved node by node by the node's device and part of both compile caches' keys.
No table of the process is touched. See docs/device-policy.md.
"""

from __future__ import annotations

from .backend import PolicyBackend, compile_under
from .faults import FALLBACK, PolicyError
from .identity import NoIdentity, content_identity
from .model import OperatorPolicy
from .registration import Registration, register_policy, registered_policy, replacement_allowed

__all__ = [
    "FALLBACK",
    "NoIdentity",
    "OperatorPolicy",
    "PolicyBackend",
    "PolicyError",
    "Registration",
    "compile_under",
    "content_identity",
    "register_policy",
    "registered_policy",
    "replacement_allowed",
]
