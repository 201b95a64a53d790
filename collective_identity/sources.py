"""Where does an all-gather's data come from? The ``extended`` rule set's additions for parameter gathers.

Torch counts placeholders. Here a size symbol, a process group, a scale and a ``get_attr`` are no second
source, and a parameter that lives in the module is one. What still looks like another kind stays what torch
says.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Sequence
from typing import Any, Final, Literal

import torch
from torch import fx

from . import compat
from .transports import Launch, is_wait, launch_of, submodule_of

Kind = Literal["input", "scale", "attribute"]
_Set = frozenset[fx.Node] | None  # None: more sources than told apart
_TOLD_APART: Final = 2  # a parameter and its block scale
_NONE: Final[frozenset[fx.Node]] = frozenset()
_KINDS: Final[tuple[Kind, ...]] = ("input", "scale", "attribute")

# What may stand between a parameter and its quantised form.
_QUANTISING: Final = frozenset(
    "mul div reciprocal clamp clamp_min clamp_max minimum maximum abs neg round floor ceil sign log2 exp2 "
    "bitwise_and bitwise_or bitwise_xor bitwise_left_shift bitwise_right_shift _to_copy view view_as "
    "_unsafe_view reshape expand unsqueeze squeeze permute transpose t slice split split_with_sizes narrow "
    "select cat stack constant_pad_nd clone contiguous alias detach repeat_interleave repeat full full_like "
    "zeros ones scalar_tensor index".split()
)


def is_source(node: fx.Node) -> bool:
    """Whether data enters the graph here."""
    return node.op in ("placeholder", "get_attr")


def parameter_gathers(order: Sequence[fx.Node], asked: Sequence[tuple[fx.Node, Launch]]) -> set[fx.Node]:
    """The all-gathers of ``asked`` with one data source.

    Args:
        order: at least all their ancestors, in topological order.
        asked: all-gathers.
    """
    sources: dict[Kind, dict[fx.Node, _Set]] = {kind: {} for kind in _KINDS}
    quantised: set[fx.Node] = set()
    for node in order if asked else ():
        own = _kind(node) if is_source(node) else None
        data = _data(node)
        for kind, table in sources.items():
            if is_source(node):
                table[node] = frozenset((node,)) if own == kind else _NONE
            else:
                table[node] = _union(table.get(i, _NONE) for i in data)
        if is_source(node) or (_is_quantising(node) and quantised.issuperset(data)):
            quantised.add(node)
    found = set()
    for start, launch in asked:
        inputs, scales, attributes = (_union(sources[kind].get(i, _NONE) for i in launch.inputs) for kind in _KINDS)
        if _is_one_source(inputs, scales, attributes) or (
            not attributes and quantised.issuperset(launch.inputs) and _is_scaled_pair(inputs, launch)
        ):
            found.add(start)
    return found


def _is_one_source(inputs: _Set, scales: _Set, attributes: _Set) -> bool:
    """Inputs decide; without one the parameters held by the module, or one tensor held; else one scale."""
    if inputs is None or len(inputs) > 1:
        return False
    if len(inputs) == 1:
        return True
    if attributes is None or attributes:
        owned = {n for n in attributes or () if isinstance(_attribute(n), torch.nn.Parameter)}
        return attributes is not None and len(owned or attributes) == 1
    return scales is not None and len(scales) == 1


def _union(parts: Iterable[_Set]) -> _Set:
    result = _NONE
    for part in parts:
        if part is None:
            return None
        if not part <= result:
            result |= part
            if len(result) > _TOLD_APART:
                return None
    return result


def _data(node: fx.Node) -> tuple[fx.Node, ...]:
    """What flows into a node as data: of a collective the tensors sent, not its buffer, group or ordering."""
    launch = launch_of(node)
    return tuple(node.all_input_nodes) if launch is None else launch.inputs


def _kind(node: fx.Node) -> Kind | None:
    """What a source brings; None for a size symbol, a group, a mesh, a sub-graph."""
    value = value_of(node)
    if not isinstance(value, torch.Tensor):
        # A placeholder nothing is known about is taken for data.
        return "input" if value is None and node.op == "placeholder" else None
    if is_single(value):
        return "scale"
    return "input" if node.op == "placeholder" else "attribute"


def value_of(node: fx.Node) -> Any:
    """The node's example value: ``meta["val"]``, or what a ``get_attr`` names; None when unknown."""
    if "val" in node.meta:
        return node.meta["val"]
    return None if node.op != "get_attr" or submodule_of(node) is not None else _attribute(node)


def is_single(value: torch.Tensor) -> bool:
    """Whether a tensor has exactly one element, 0-dim included; a symbolic size counts as more."""
    return all(isinstance(size, int) and size == 1 for size in value.shape)


def _attribute(node: fx.Node) -> Any:
    found: Any = node.graph.owning_module
    for part in str(node.target).split("."):
        found = getattr(found, part, None)
    return found


def _is_quantising(node: fx.Node) -> bool:
    if node.target is operator.getitem:
        return True
    namespace, _, name = (compat.op_name(node.target) or "").partition("::")
    cast = (namespace, name) == ("prims", "convert_element_type")
    return cast or (namespace == "aten" and name in _QUANTISING)


def _is_scaled_pair(inputs: _Set, launch: Launch) -> bool:
    """Whether the two inputs are a parameter and its block-scale tensor, consumed only with it.

    Only for one byte an element, before or after scaling: anything wider may be an activation and the weight
    of its norm.
    """
    if inputs is None or len(inputs) != 2:
        return False
    scale, param = sorted(inputs, key=_elements)
    narrow = all(_width(i) == 1 for i in launch.inputs) or _width(param) == 1
    return narrow and _divides(value_of(scale), value_of(param)) and _only_with(scale, param)


def _only_with(scale: fx.Node, param: fx.Node) -> bool:
    """Whether every use of ``scale`` is its own gather, or meets a node made from ``param``."""
    seen = {scale}
    queue = [scale]
    while queue:
        for user in queue.pop().users:
            if user in seen or user.op == "output":
                continue
            others = [i for i in _data(user) if i not in seen and not _is_constant(i)]
            if not others:
                seen.add(user)
                queue.append(user)
            elif not any(_comes_from(i, param) for i in others):
                return False
    return True


def _is_constant(node: fx.Node) -> bool:
    return _kind(node) not in ("input", "attribute") if is_source(node) else not node.all_input_nodes


def _comes_from(node: fx.Node, source: fx.Node) -> bool:
    """Whether ``source`` reaches ``node`` through quantising operators and collectives alone."""
    seen = {node}
    queue = [node]
    while queue:
        current = queue.pop()
        if current is source:
            return True
        if is_source(current) or not (_is_quantising(current) or is_wait(current) or launch_of(current)):
            continue
        for above in _data(current):
            if above not in seen:
                seen.add(above)
                queue.append(above)
    return False


def _elements(node: fx.Node) -> int:
    value = value_of(node)
    if not isinstance(value, torch.Tensor) or not all(isinstance(s, int) for s in value.shape):
        return 0
    return int(value.numel())


def _width(node: fx.Node) -> int | None:
    value = value_of(node)
    return value.dtype.itemsize if isinstance(value, torch.Tensor) else None


def _divides(scale: Any, param: Any) -> bool:
    """Whether a block-scale tensor of this shape can belong to a parameter of that shape."""
    if not isinstance(scale, torch.Tensor) or not isinstance(param, torch.Tensor):
        return False
    small, large = list(scale.shape), list(param.shape)
    if not all(isinstance(s, int) and s > 0 for s in small + large) or scale.numel() >= param.numel():
        return False
    if len(small) == 1 < len(large):
        return bool(large[0] % small[0] == 0)
    return len(small) == len(large) and all(b % a == 0 for a, b in zip(small, large, strict=True))
