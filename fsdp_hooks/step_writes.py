"""What does a traced forward change in Python, which no replay would? It is put back, and refused where it matters.

A graph updates tensors in place. Another tensor, or another number, put in a module's attribute is seen once, while
tracing. That matters where a later step would read it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx, nn

from .errors import UnsupportedOption

_NUMBERS = bool, int, float, complex
_INTERNAL = frozenset(vars(nn.Module()))


@dataclass(frozen=True)
class Held:
    """One attribute of one module, or a list or dict there with what it held."""

    where: str
    module: nn.Module
    attribute: str
    value: Any
    items: Any

    def put_back(self) -> Iterator[Any]:
        """Undo what changed; yields what had been there before."""
        now = self.module.__dict__
        if self.attribute not in now or _differs(self.value, now[self.attribute]):
            now[self.attribute] = self.value
            yield self.value
        if isinstance(self.value, list) and _differs(self.items, list(self.value)):
            yield from (a for a, b in _pairs(self.items, self.value) if _differs(a, b))
            self.value[:] = self.items
        elif isinstance(self.value, dict) and _differs(self.items, dict(self.value)):
            yield from (a for key, a in self.items.items() if _differs(a, self.value.get(key)))
            self.value.clear()
            self.value.update(self.items)


class Kept:
    """The attributes of all modules of a model, as they are before a step is traced."""

    def __init__(self, model: nn.Module) -> None:
        self._modules = [(name, module, set(module.__dict__)) for name, module in model.named_modules()]
        self._held = [
            Held(f"{name}.{key}" if name else key, module, key, value, _copied(value))
            for name, module, keys in self._modules
            for key, value in module.__dict__.items()
            if key not in _INTERNAL
        ]

    def put_back(self) -> list[tuple[str, Any]]:
        """Undo what tracing changed; the places of what was replaced, and what had been there."""
        changed = [(held.where, before) for held in self._held for before in held.put_back()]
        for _, module, keys in self._modules:
            for key in set(module.__dict__) - keys:  # nothing that a next step read
                del module.__dict__[key]
        return changed


def check_writes(changed: list[tuple[str, Any]], gm: fx.GraphModule) -> None:
    """Refuse what a next step would have read otherwise: a number, or a tensor that the graph reads.

    Raises:
        UnsupportedOption: naming the attribute and the way out.
    """
    read = {id(getattr(gm, str(node.target), None)) for node in gm.graph.nodes if node.op == "get_attr"}
    for where, before in changed:
        if isinstance(before, _NUMBERS) or (isinstance(before, torch.Tensor) and id(before) in read):
            raise refused(where, f"the {type(before).__name__}")


def refused(where: str, what: str) -> UnsupportedOption:
    """The error for one place that a forward puts something else in."""
    return UnsupportedOption(
        f"trace_train_step expects forward to leave {where!r} as it is, found {what} replaced there, which eager "
        "training does at every step and a graph once: make it a buffer and update that in place (copy_, mul_, add_)"
    )


def _copied(value: Any) -> Any:
    return list(value) if isinstance(value, list) else dict(value) if isinstance(value, dict) else None


def _pairs(before: list[Any], after: list[Any]) -> Iterator[tuple[Any, Any]]:
    for place, one in enumerate(before):
        yield one, after[place] if place < len(after) else None


def _differs(a: Any, b: Any) -> bool:
    if a is b:
        return False
    if isinstance(a, _NUMBERS):
        return type(a) is not type(b) or a != b
    if isinstance(a, list) and isinstance(b, list):
        return len(a) != len(b) or any(_differs(*pair) for pair in zip(a, b, strict=True))
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() != b.keys() or any(_differs(a[key], b[key]) for key in a)
    return True
