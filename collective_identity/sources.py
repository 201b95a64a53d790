"""Where does an all-gather's data come from? The ``extended`` rule set's additions for parameter gathers.

Torch counts placeholders. Here a size, even one read from another input, a process group, a scale and a
``get_attr`` are no second source, and a parameter that lives in the module is one. What still looks like another
kind stays what torch says.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final, Literal, TypeAlias, TypeVar

import torch
from torch import fx

from . import compat
from .subgraphs import named, submodule_of
from .transports import Launch, is_wait
from .view import SOURCES, View

Kind = Literal["input", "scale", "attribute"]
_Set = frozenset[fx.Node] | None  # None: more sources than told apart
_TOLD_APART: Final = 2  # a parameter and its block scale
_T = TypeVar("_T")
_NONE: Final[frozenset[fx.Node]] = frozenset()
_Sources: TypeAlias = "tuple[_Set, ...]"  # by `_KINDS`
_NO_SOURCE: Final[_Sources] = (_NONE, _NONE, _NONE)
_KINDS: Final[tuple[Kind, ...]] = ("input", "scale", "attribute")

# What may stand between a parameter and its quantised form.
_QUANTISING: Final = frozenset(
    "mul div reciprocal clamp clamp_min clamp_max minimum maximum abs neg round floor ceil sign log2 exp2 "
    "bitwise_and bitwise_or bitwise_xor bitwise_left_shift bitwise_right_shift _to_copy view view_as "
    "_unsafe_view reshape expand unsqueeze squeeze permute transpose t slice split split_with_sizes narrow "
    "select cat stack constant_pad_nd clone contiguous alias detach repeat_interleave repeat full full_like "
    "zeros ones scalar_tensor index expand_as reshape_as zeros_like ones_like new_zeros new_ones new_full "
    "sym_size sym_numel sym_stride sym_storage_offset".split()
)


def parameter_gathers(view: View, asked: Mapping[fx.Node, Launch]) -> set[fx.Node]:
    """The all-gathers of ``asked``, collectives of the view, with one data source."""
    if not asked:
        return set()
    sources = _sources(view)
    found: set[fx.Node] = set()
    pairs: dict[fx.Node, frozenset[fx.Node]] = {}
    for start, launch in asked.items():
        parts = [sources[view.homes[view.number[i]]] for i in launch.inputs]
        inputs, scales, attributes = _joined(parts) if len(parts) != 1 else parts[0]
        if _is_one_source(inputs, scales, attributes):
            found.add(start)
        elif inputs is not None and len(inputs) == 2 and not attributes:
            pairs[start] = inputs
    if pairs:
        quantised = _quantised(view)
        found |= _scaled(view, {n: two for n, two in pairs.items() if quantised.issuperset(asked[n].inputs)})
    return found


def _sources(view: View) -> dict[int, _Sources]:
    """What the data of each junction comes from; whatever hangs below it has the same."""
    table: dict[int, _Sources] = {}
    for junction in view.junctions:
        if view.ops[junction] in SOURCES:
            node = view.nodes[junction]
            own = frozenset((node,))
            kind = _kind(node)
            table[junction] = _NO_SOURCE if kind is None else tuple([own if k == kind else _NONE for k in _KINDS])
        else:
            table[junction] = _joined([table[view.homes[above]] for above in view.data(junction)])
    return table


def _joined(parts: Sequence[_Sources]) -> _Sources:
    distinct = {id(part): part for part in parts}
    if len(distinct) == 1:
        return parts[0]
    return tuple([_union(column) for column in zip(*distinct.values(), strict=True)]) if distinct else _NO_SOURCE


def _quantised(view: View) -> set[fx.Node]:
    """The nodes that only quantising operators part from their sources."""
    found = bytearray(len(view.nodes))
    for i in view.cone:
        node = view.nodes[i]
        passes = _is_quantising(node) or isinstance(value_of(node), (int, torch.SymInt))
        found[i] = view.ops[i] in SOURCES or (passes and all(found[above] for above in view.data(i)))
    return {view.nodes[i] for i in view.cone if found[i]}


def _is_one_source(inputs: _Set, scales: _Set, attributes: _Set) -> bool:
    """Inputs decide; without one the parameters held by the module, or one tensor held; else one scale."""
    if inputs is None or len(inputs) > 1:
        return False
    if len(inputs) == 1:
        return True
    if attributes is None or attributes:
        owned = {n for n in attributes or () if isinstance(named(n), torch.nn.Parameter)}
        return attributes is not None and len(owned or attributes) == 1
    return scales is not None and len(scales) == 1


def _union(parts: Iterable[frozenset[_T] | None]) -> frozenset[_T] | None:
    result: frozenset[_T] = frozenset()
    for part in parts:
        if part is None:
            return None
        if not part <= result:
            result |= part
            if len(result) > _TOLD_APART:
                return None
    return result


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
    return None if node.op != "get_attr" or submodule_of(node) is not None else named(node)


def is_single(value: torch.Tensor) -> bool:
    """Whether a tensor has exactly one element, 0-dim included; a symbolic size counts as more."""
    return all(isinstance(size, int) and size == 1 for size in value.shape)


def is_scalar(node: fx.Node) -> bool:
    """Whether the node holds one element, or no tensor at all (a size, a Python number)."""
    value = value_of(node)
    if isinstance(value, (list, tuple)):
        return False
    return not isinstance(value, torch.Tensor) or is_single(value)


def _is_quantising(node: fx.Node) -> bool:
    if node.target is operator.getitem:
        return True
    namespace, _, name = (compat.op_name(node.target) or "").partition("::")
    cast = (namespace, name) == ("prims", "convert_element_type")
    return cast or (namespace == "aten" and name in _QUANTISING)


def _scaled(view: View, pairs: Mapping[fx.Node, frozenset[fx.Node]]) -> set[fx.Node]:
    """The gathers, keys of their two inputs, of a parameter and a block-scale tensor that is consumed only with it.

    Only for one byte an element, before or after scaling: anything wider may be an activation and the weight
    of its norm.
    """
    owner: dict[int, int] = {}  # by number of the scale
    gathered: dict[int, list[fx.Node]] = {}
    shared: set[int] = set()
    for start, inputs in pairs.items():
        scale, param = sorted(inputs, key=_elements)
        narrow = all(_width(i) == 1 for i in view.starts[start].inputs) or _width(param) == 1
        if narrow and _divides(value_of(scale), value_of(param)):
            number = view.number[scale]
            if owner.setdefault(number, view.number[param]) != view.number[param]:
                shared.add(number)
            gathered.setdefault(number, []).append(start)
    own = _only_with_their_owner(view, owner) if owner else set()
    return {start for scale in own - shared for start in gathered[scale]}


def _only_with_their_owner(view: View, owner: Mapping[int, int]) -> set[int]:
    """The scales of which every use is their own gather, or meets a node made from the parameter that owns them.

    One pass for all of them: no node is made from each of two scales alone, and of the owners that quantising
    operators and collectives make a node from, no more than `_TOLD_APART` are told apart.
    """
    alone, constant = list(range(len(view.nodes))), -1  # the scale that a node is made from alone, else itself
    made: dict[int, frozenset[int] | None] = {param: frozenset((param,)) for param in owner.values()}
    strayed: set[int] = set()
    for i, node in enumerate(view.nodes):
        if view.ops[i] == "output":
            continue
        if view.ops[i] in SOURCES:
            if _kind(node) not in ("input", "attribute"):
                alone[i] = constant
            continue
        above = view.data(i)
        of = {alone[one] for one in above}
        of.discard(constant)
        if not of:
            alone[i] = constant
            continue
        only = of.pop() if len(of) == 1 else i
        alone[i] = only if only in owner else i
        parts = [made[one] for one in above if one in made]
        if parts and (i in view.launches or _is_quantising(node) or is_wait(node)):
            made[i] = _union(parts)
        met = {param for part in parts for param in part or ()}
        scales = {scale for one in view.inputs[i] if (scale := alone[one]) in owner and scale != alone[i]}
        strayed |= {scale for scale in scales if owner[scale] not in met}
    return set(owner) - strayed


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
