"""Regions that the user marked for compilation: ``fx_traceback.annotate({"compile_with_inductor": ...})``."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any

from torch import fx

KEY = "compile_with_inductor"
"""The annotation that lite mode obeys (torch/fx/passes/regional_inductor.py, read in torch 2.11.0 to 2.15.0)."""


def is_marked(node: fx.Node) -> bool:
    """True when the user asked for this node to be compiled: the only nodes that may change in lite mode."""
    custom = node.meta.get("custom")
    return isinstance(custom, Mapping) and KEY in custom


def marks_digest(gm: fx.GraphModule) -> str:
    """sha256 over which nodes are marked, and how, sub-graphs included.

    For cache keys: torch's caches do not look at annotations (seen in 2.13.0: a graph without marks was given the
    code of its marked twin). Equal in every process for equal marks.
    """
    marks = [
        (path, at, _plain(node.meta["custom"][KEY]))
        for path, module in gm.named_modules()
        if isinstance(module, fx.GraphModule)
        for at, node in enumerate(module.graph.nodes)
        if is_marked(node)
    ]
    return hashlib.sha256(json.dumps(marks).encode()).hexdigest()


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {"dict": sorted(([repr(key), _plain(one)] for key, one in value.items()), key=repr)}
    if isinstance(value, (list, tuple)):
        return [type(value).__name__, *map(_plain, value)]
    if isinstance(value, (str, int, float, bool, type(None))):
        return [type(value).__name__, repr(value)]
    return [type(value).__name__, getattr(value, "__qualname__", "")]
