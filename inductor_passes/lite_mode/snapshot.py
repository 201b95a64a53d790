"""One graph as it was before a pass, and what is no longer so: the guard's comparison (guard.py says what it sees)."""

from __future__ import annotations

import marshal
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import repeat
from typing import Any

import torch
from torch import fx

_FIELDS = ("node", "op", "target", "args", "kwargs", "val", "custom", "recompute")
_CUSTOM = _FIELDS.index("custom")


class Snapshot:
    """One graph as it is now."""

    def __init__(self, gm: fx.GraphModule) -> None:
        self._gm, self._graph = gm, gm.graph
        self._columns = _columns(gm.graph)
        self._custom = _copied(self._columns[_CUSTOM])
        self._held = _held(gm)

    def differences(self, allowed: frozenset[str] = frozenset()) -> list[str]:
        """What is no longer as it was, one line each; [] when nothing changed."""
        if self._gm.graph is not self._graph:
            return ["another graph in the module"]
        found: list[str] = []
        if not self._identical():
            found += self._node_differences(_columns(self._graph), allowed)
        found += self._edited_in_place()
        held = _held(self._gm)
        found += [
            f"attribute {name!r} of the module was {_said(self._held.get(name))}, is {_said(held.get(name))}"
            for name in {**self._held, **held}
            if not _same(self._held.get(name), held.get(name))
        ]
        return found

    def _identical(self) -> bool:
        """Every field is the very object that it was: one cheap loop, as nearly always."""
        nodes = list(self._graph.nodes)
        if len(nodes) != len(self._columns[0]):
            return False
        for now, node, op, target, args, kwargs, val, custom, recompute in zip(nodes, *self._columns, strict=True):
            get = now.meta.get
            if (
                now is not node or now.op is not op or now.target is not target
                or now._args is not args or now._kwargs is not kwargs
                or get("val") is not val or get("custom") is not custom or get("recompute") is not recompute
            ):  # fmt: skip
                return False
        return True

    def _node_differences(self, now: list[list[Any]], allowed: frozenset[str]) -> Iterator[str]:
        before, after = list(self._columns[0]), list(now[0])
        if before != after:
            yield _order_difference(before, after)
            return
        for field, column, columns_now in zip(_FIELDS, self._columns, now, strict=True):
            for node, was, found in zip(after, column, columns_now, strict=True):
                if was is not found and field not in allowed and not _equal(field, was, found):
                    yield f"{field} of {node.name} was {_said(was)}, is {_said(found)}"

    def _edited_in_place(self) -> Iterator[str]:
        held = self._columns[_CUSTOM]
        copies = _copied(held)
        if isinstance(copies, bytes) and isinstance(self._custom, bytes):
            if copies == self._custom or marshal.dumps(held, 2) == marshal.dumps(_restored(self._custom), 2):
                return
        for node, one, was in zip(self._columns[0], held, _restored(self._custom), strict=True):
            if not _same(_frozen(one), was):
                yield f"meta['custom'] of {node.name} was {was!r}, is {one!r} (edited in place)"


def _columns(graph: fx.Graph) -> list[list[Any]]:
    """Every field of every node, one list a field."""
    nodes = list(graph.nodes)
    metas = [node.meta for node in nodes]
    return [
        nodes,
        [node.op for node in nodes],
        [node.target for node in nodes],
        [node._args for node in nodes],
        [node._kwargs for node in nodes],
        *(list(map(dict.get, metas, repeat(key))) for key in _FIELDS[5:]),
    ]


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
