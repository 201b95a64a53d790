"""What a compiled artifact contained, kept beside Inductor's cache, so that a cache hit can still be reported.

On a hit none of our passes runs. The tables of collectives that the passes saw when the artifact was made are
stored under a key made of everything that made it: the captured graph's code, its inputs, the options, the
versions. A missing or unreadable record only means that the report says "from cache".
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import logging
import os
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import fx
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from collective_identity.digest import CollectiveRow
from collective_identity.ledger import GraphKind

from .upstream import cache_dir

logger = logging.getLogger("collective_identity.inductor_passes")

Tables = Mapping[GraphKind, tuple[Sequence[CollectiveRow], Sequence[CollectiveRow]]]
"""By kind of graph: the collectives as captured, and as they were after our passes."""


def coverage_key(gm: fx.GraphModule, inputs: Sequence[Any], tag: str) -> str:
    """The key of one captured graph: sha256 hex."""
    text = [torch.__version__, tag]
    for name, module in gm.named_modules():
        if isinstance(module, fx.GraphModule):
            text.append(name)
            # not the module's code, which nothing else asks for
            text += [str(node.format_node()) for node in module.graph.nodes]
    text += [describe(value) for value in inputs]
    return hashlib.sha256("\n".join(text).encode()).hexdigest()


def load(key: str) -> Tables | None:
    """The tables recorded under ``key``, None when there are none."""
    path = _path(key)
    try:
        kinds = json.loads(path.read_text())
        return {kind: (_rows(before), _rows(after)) for kind, (before, after) in kinds.items()}
    except FileNotFoundError:
        return None
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        logger.debug("coverage record %s is unreadable: %s", path, error)
        return None


def save(key: str, tables: Tables) -> None:
    """Record the tables of freshly compiled graphs beside those of others under that key; whole or not at all.

    Ranks with equal graphs share a key, and one may have compiled what the other then found in the cache.
    """
    path = _path(key)
    tables = {**(load(key) or {}), **tables}
    text = json.dumps(
        {kind: [[dataclasses.asdict(row) for row in rows] for rows in both] for kind, both in tables.items()}
    )
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(dir=path.parent, suffix=".part")
        with os.fdopen(handle, "w") as file:
            file.write(text)
        os.replace(temporary, path)
    except OSError as error:
        logger.debug("coverage record %s was not written: %s", path, error)


def _path(key: str) -> Path:
    return cache_dir() / "collective_identity" / f"{key}.json"


def _rows(items: Sequence[Mapping[str, Any]]) -> tuple[CollectiveRow, ...]:
    def row(item: Mapping[str, Any]) -> CollectiveRow:
        values: dict[str, Any] = {key: tuple(v) if isinstance(v, list) else v for key, v in item.items()}
        return CollectiveRow(**values)

    return tuple(map(row, items))


def describe(value: Any) -> str:
    """One graph input as text: type, dtype, sizes, device; of a tensor subclass also what this rank holds of it.

    Torch's own key takes a ``DTensor`` by its global size. Two ranks whose shards are uneven would share one key,
    and one of them would run code made for the other's sizes (seen in torch 2.13.0, docs/upstream).
    """
    if not isinstance(value, torch.Tensor):
        return repr(value)
    text = (
        f"{type(value).__name__} {value.dtype} {tuple(value.shape)} {tuple(value.stride())} {value.device} "
        f"{value.requires_grad}"
    )
    if is_traceable_wrapper_subclass(value):
        names, _ = value.__tensor_flatten__()
        text += "".join(f" {name}=({describe(getattr(value, name))})" for name in names)
    return text
