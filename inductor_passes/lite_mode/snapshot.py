"""One graph as it was before a pass, and what is no longer so: the guard's comparison (guard.py says what it sees)."""

from __future__ import annotations

import marshal
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import chain, repeat
from typing import Any

import torch
from torch import fx

_FIELDS = ("node", "op", "target", "args", "kwargs", "val", "custom", "recompute")
_WIDTH, _CUSTOM = len(_FIELDS), _FIELDS.index("custom")
_BLOCK = 512
"""Nodes looked at together, all their fields at once: a near cache holds so many, and no graph that is large."""


class Snapshot:
    """One graph as it is now."""

    def __init__(self, gm: fx.GraphModule) -> None:
        self._gm, self._graph = gm, gm.graph
        self._blocks = [(rows, _copied(rows[_CUSTOM::_WIDTH])) for rows in _blocks(gm.graph)]
        self._held = _held(gm)

    def differences(self, allowed: frozenset[str] = frozenset()) -> list[str]:
        """What is no longer as it was, one line each; [] when nothing changed."""
        if self._gm.graph is not self._graph:
            return ["another graph in the module"]
        found: list[str] = []
        if not self._identical():
            found += self._node_differences(allowed)
            found += self._edited_in_place()
        held = _held(self._gm)
        found += [
            f"attribute {name!r} of the module was {_said(self._held.get(name))}, is {_said(held.get(name))}"
            for name in {**self._held, **held}
            if not _same(self._held.get(name), held.get(name))
        ]
        return found

    def _identical(self) -> bool:
        """Every field is the very object that it was, and no ``custom`` was edited: as nearly always."""
        nodes = chain(self._graph.nodes, repeat(None))
        for rows, copies in self._blocks:
            fields = iter(rows)
            rows_and_nodes = zip(*(fields,) * _WIDTH, nodes, strict=False)  # the fields of one node, and the next node
            for node, op, target, args, kwargs, val, custom, recompute, now in rows_and_nodes:
                if (
                    now is not node or now.op is not op or now.target is not target
                    or now._args is not args or now._kwargs is not kwargs
                    or (meta := now.meta).get("val") is not val
                    or meta.get("custom") is not custom or meta.get("recompute") is not recompute
                ):  # fmt: skip
                    return False
            if not _as_copied(rows[_CUSTOM::_WIDTH], copies):
                return False
        return next(nodes) is None

    def _node_differences(self, allowed: frozenset[str]) -> Iterator[str]:
        before = [one for rows, _ in self._blocks for one in rows]
        now = [one for rows in _blocks(self._graph) for one in rows]
        nodes = now[::_WIDTH]
        if before[::_WIDTH] != nodes:
            yield _order_difference(before[::_WIDTH], nodes)
            return
        for at, field in enumerate(_FIELDS):
            for node, was, found in zip(nodes, before[at::_WIDTH], now[at::_WIDTH], strict=True):
                if was is not found and field not in allowed and not _equal(field, was, found):
                    yield f"{field} of {node.name} was {_said(was)}, is {_said(found)}"

    def _edited_in_place(self) -> Iterator[str]:
        for rows, copies in self._blocks:
            held = rows[_CUSTOM::_WIDTH]
            if _as_copied(held, copies):
                continue
            for node, one, was in zip(rows[::_WIDTH], held, _restored(copies), strict=True):
                if not _same(_frozen(one), was):
                    yield f"meta['custom'] of {node.name} was {was!r}, is {one!r} (edited in place)"


def _blocks(graph: fx.Graph) -> Iterator[list[Any]]:
    """The fields of every node, one node's after the other's, in lists of ``_BLOCK`` nodes."""
    rows: list[Any] = []
    for node in graph.nodes:
        meta = node.meta
        rows += [
            node, node.op, node.target, node._args, node._kwargs,
            meta.get("val"), meta.get("custom"), meta.get("recompute"),
        ]  # fmt: skip
        if len(rows) == _BLOCK * _WIDTH:
            yield rows
            rows = []
    yield rows


def _held(gm: fx.GraphModule) -> dict[str, Any]:
    """What belongs to the module and not to a node: constants, parameters, sub-modules, meta, forward, code generator.

    ``recompile`` may run: it sets ``forward`` on the module's class.
    """
    return {
        **{f"meta[{key!r}]": _frozen(value) for key, value in gm.meta.items()},
        "forward": gm.__dict__.get("forward"),
        "graph._codegen": gm.graph._codegen,
        "graph._codegen._body_transformer": getattr(gm.graph._codegen, "_body_transformer", None),
        "graph.owning_module": gm.graph.owning_module,  # whose create and erase hooks run
        **_tensors(gm),
    }


def _tensors(module: torch.nn.Module, path: str = "") -> dict[str, Any]:
    """Tensors, each as its `_Place`, and sub-modules; the graphs among those have snapshots of their own."""
    held: dict[str, Any] = {}
    for values in (module._parameters, module._buffers, module._modules, module.__dict__):
        for name, value in values.items():
            if isinstance(value, torch.Tensor):
                held[path + name] = _Place.of(value)
            elif isinstance(value, torch.nn.Module):
                held[path + name] = value
                if not isinstance(value, fx.GraphModule):
                    held.update(_tensors(value, f"{path}{name}."))
    return held


@dataclass(frozen=True, slots=True)
class _Place:
    """A tensor and what an edit of it changes; the storage is held, so that no address is used twice."""

    tensor: torch.Tensor
    storage: torch.UntypedStorage | None
    said: tuple[Any, ...]

    @classmethod
    def of(cls, tensor: torch.Tensor) -> _Place:
        version = None if tensor.is_inference() else tensor._version
        try:
            storage = tensor.untyped_storage()
        except (NotImplementedError, RuntimeError):  # a layout without one
            storage = None
        where = None if storage is None else hex(storage._cdata)
        return cls(tensor, storage, (_shape(tensor), f"version {version}", f"storage {where}"))

    def same(self, other: _Place) -> bool:
        return self.tensor is other.tensor and self.said == other.said

    def __repr__(self) -> str:
        return str(self.said)


def _copied(values: list[Any]) -> Any:
    """A copy that no later edit reaches; of plain values their bytes, in a tenth of the time.

    Equal bytes are equal values. Other bytes need not be other values: from version 3 on, which is faster, they depend
    on how often a value is referenced, in version 2 they do not.
    """
    try:
        return marshal.dumps(values, 4)
    except ValueError:  # a value that is not plain
        return _frozen(values)


def _as_copied(values: list[Any], copies: Any) -> bool:
    """Whether the values are what they were when copied."""
    if not isinstance(copies, bytes):
        return _same(_frozen(values), copies)
    now = _copied(values)
    return now == copies or (isinstance(now, bytes) and marshal.dumps(values, 2) == marshal.dumps(_restored(copies), 2))


def _restored(copies: Any) -> Any:
    return marshal.loads(copies) if isinstance(copies, bytes) else copies


def _frozen(value: Any, inside: tuple[Any, ...] = ()) -> Any:
    """A copy in which leaves are kept as they are, tensors with their place; a container in itself is one more leaf."""
    if isinstance(value, torch.Tensor):
        return _Place.of(value)
    if not isinstance(value, (dict, list, tuple, set)) or any(value is one for one in inside):
        return value
    inside = (*inside, value)
    if isinstance(value, dict):
        return {key: _frozen(one, inside) for key, one in value.items()}
    if isinstance(value, set):
        return set(value)
    return type(value)(_frozen(one, inside) for one in value) if type(value) in (list, tuple) else value


def _same(was: Any, now: Any) -> bool:
    """Equal in type and value, without asking a tensor or a symbolic number for its truth."""
    if was is now:
        return True
    if type(was) is not type(now):
        return False
    if isinstance(was, Mapping):
        return was.keys() == now.keys() and all(_same(was[key], now[key]) for key in was)
    if isinstance(was, (list, tuple)):
        return len(was) == len(now) and all(map(_same, was, now))
    if isinstance(was, slice):
        return _same((was.start, was.stop, was.step), (now.start, now.stop, now.step))
    if isinstance(was, _Place):
        return was.same(now)
    plain = isinstance(was, (int, float, complex, str, bytes, set, frozenset, torch.dtype, torch.device))
    return plain and bool(was == now)


def _equal(field: str, was: Any, now: Any) -> bool:
    return bool(_shape(was) == _shape(now)) if field == "val" else _same(was, now)


def _shape(value: Any) -> Any:
    """What a fake value says; symbolic sizes by their text, so that none is specialised."""
    if isinstance(value, torch.Tensor):
        dense = value.layout is torch.strided
        strides = (*map(str, value.stride()), f"from {value.storage_offset()}") if dense else None
        kind = f"{type(value).__name__}{' with gradient' if value.requires_grad else ''}"
        return (kind, str(value.dtype), str(value.device), str(value.layout), tuple(map(str, value.shape)), strides)
    if isinstance(value, (list, tuple)):
        return tuple(map(_shape, value))
    return f"{type(value).__name__} {value}" if isinstance(value, (int, float, bool)) else str(value)


def _order_difference(before: list[fx.Node], after: list[fx.Node]) -> str:
    gone, new = set(before) - set(after), set(after) - set(before)
    if new:
        node = next(node for node in after if node in new)
        return f"node {node.name} ({_said(node.target)}) was inserted"
    if gone:
        return f"node {next(node for node in before if node in gone).name} was removed"
    return f"node {next(a for b, a in zip(before, after, strict=True) if a is not b).name} was moved"


def _said(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return str(_shape(value))
    if isinstance(value, torch.nn.Module):
        return type(value).__name__
    return str(value)
