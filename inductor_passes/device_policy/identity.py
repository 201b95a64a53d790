"""What makes two Python functions the same: a hash of everything that they will run.

Bytecode, constants, names, defaults, closures, attributes, and every global outside torch and the standard library
that the bytecode reaches, followed to its end. Not source text: the file may have changed since it was imported.
"""

from __future__ import annotations

import sys
import types
from collections.abc import Callable
from typing import Any

from .content import NoIdentity, Reader, kind

__all__ = ["PYTHON", "NoIdentity", "content_identity"]

PYTHON = f"{sys.version_info[0]}.{sys.version_info[1]}"
"""Bytecode differs between minor versions, and so does every identity."""


def content_identity(function: Callable[..., Any]) -> str:
    """SHA-256 of what ``function`` will run, equal in every process that would run the same.

    Raises:
        NoIdentity: a lambda, a bound method, a partial or another callable with state, or one that reaches a
            value without a stable name (a tensor, an instance) or looks content up by text; the message names the
            path to it.
    """
    if isinstance(function, types.MethodType):
        raise NoIdentity("is a bound method, which carries its object: use a module-level function")
    if not isinstance(function, types.FunctionType):
        raise NoIdentity(
            f"is a {kind(function)}, a callable that may carry state: use a module-level function"
        )
    reader = Reader(f"python {PYTHON}")
    try:
        reader.value(function, "")
        reader.attributes()
    except RecursionError:
        raise NoIdentity("reaches values or functions nested too deeply to be read: make them flat") from None
    return reader.hexdigest()
