"""What do the collectives of a graph look like, to another rank and to a cache? Tables and sha256 digests."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import torch
from torch import fx

from . import compat, store
from .canonical import canonical, is_dict, plain, sha256
from .subgraphs import graph_modules
from .transports import Launch, Transport, launches

if TYPE_CHECKING:
    from .classify import Classification

_HOOK_NAMESPACE: Final = "fsdp_hooks::"
_GROUPS: Final = frozenset({"group", "reduce_group", "replicate_group"})  # the operators' process-group arguments


@dataclass(frozen=True, slots=True)
class CollectiveRow:
    """One collective of a graph, as reports and other ranks see it.

    Attributes:
        index: position among the start nodes of the graph and its sub-graphs.
        node: name of the start node.
        transport, form, group, group_size, reduce_op: as in `Launch`.
        role, source, producer, params, param_group: of the classified identity, None without one.
        dtype: of the first tensor sent, ``"bfloat16"``.
        numel: elements of the first tensor sent; None when a size is symbolic.
        nbytes: bytes of all tensors sent; None when a size is symbolic.
        absence: kind of absence when there is no role.
        code: id of the reason, ``"CI006"``, when there is one.
        backward: emitted by backward code, or a recomputed copy in a backward graph.
        members: of a merged collective the node names of those it was made of, in bucket order.
    """

    index: int
    node: str
    transport: str
    form: str
    role: str | None
    source: str | None
    producer: str | None
    group: str | None
    group_size: int | None
    reduce_op: str | None
    dtype: str | None
    numel: int | None
    nbytes: int | None
    params: tuple[str, ...] | None
    param_group: str | None
    absence: str | None
    code: str | None
    backward: bool
    members: tuple[str, ...] | None = None


def collective_table(gm: fx.GraphModule, classification: Classification | None = None) -> tuple[CollectiveRow, ...]:
    """Every collective of the graph and its sub-graphs, in graph order. Reads only.

    Args:
        gm: the graph.
        classification: what to report as identities; classified here (extended rules) when None.
    """
    if classification is None:
        from .classify import classify_report

        classification = classify_report(gm)
    in_backward = _is_backward_graph(gm)
    rows: list[CollectiveRow] = []
    for module in graph_modules(gm):
        for node, launch in launches(module).items():
            identity = classification.identities.get(node)
            absence = classification.absences.get(node)
            sizes = [_numel(n) for n in launch.inputs]
            merged = store.members_of(node)
            rows.append(
                CollectiveRow(
                    index=len(rows),
                    node=node.name,
                    transport=launch.transport.value,
                    form=launch.form,
                    role=identity.role if identity else None,
                    source=identity.source.value if identity else None,
                    producer=identity.producer if identity else None,
                    group=launch.group,
                    group_size=launch.group_size,
                    reduce_op=launch.reduce_op,
                    dtype=_dtype(launch.inputs[0]) if launch.inputs else None,
                    numel=sizes[0] if sizes else None,
                    nbytes=_nbytes(launch),
                    params=identity.params if identity else None,
                    param_group=identity.param_group if identity else None,
                    absence=absence.kind if absence else None,
                    code=absence.code.id if absence and absence.code else None,
                    backward=in_backward or store.runs_in_backward(node),
                    members=None if merged is None else tuple(member.name for member in merged.members),
                )
            )
    return tuple(rows)


def logical_groups(names: Iterable[str | None]) -> dict[str | None, str]:
    """Name the process groups of one graph so that the names mean the same on every rank.

    A group's own name, and its members, differ from rank to rank. Here it is called by its place in its mesh (the
    dimension that `DeviceMesh` gave it, else the distances between its members' ranks) and by its number among the
    graph's groups of that place, in the order this process created them, as ``new_group`` must be called in the same
    order everywhere. Groups that are not registered are numbered in order of first appearance.

    Two groups never share a name. One group's name may differ by rank, which makes equal graphs look different, where
    `DeviceMesh` made none and groups that belong together are spaced differently (ranks 0, 3 and 1, 2), or where
    several communicators of one place were created interleaved with those of other ranks.
    """
    seen = dict.fromkeys(names)
    places = {name: compat.group_place(name) if name is not None else None for name in seen}
    orders = {name: compat.group_order(name) if name is not None else None for name in seen}
    ordered = sorted(seen, key=lambda name: _last_if_unknown(orders[name]))
    numbers: Counter[tuple[str, ...] | None] = Counter()
    found: dict[str | None, str] = {}
    for name in ordered:
        place = places[name]
        found[name] = f"{'/'.join(place) if place is not None else 'unknown'} {numbers[place]}"
        numbers[place] += 1
    return found


def _last_if_unknown(order: int | None) -> int:
    return sys.maxsize if order is None else order


def digest(gm: fx.GraphModule) -> str:
    """sha256 over the graph's collectives and every payload, the same on every rank of a sane program.

    Covered in graph order: transport, form, logical group and size, reduce op, dtype, number of elements sent
    (not of all-to-all, whose sizes may differ by rank; none for symbolic sizes), and the raw payload with the
    logical group in place of its group name (`logical_groups` says where two ranks may still differ). Payloads
    found beside a collective count as its own where `normalize` would move them; any other payload counts once,
    wherever it lies. Node names, helper nodes (a rank with an uneven shard pads where others do not) and
    provenance are left out.

    Returns:
        64 hexadecimal digits.
    """
    from .normalize import plan_normalization

    starts = [found for module in graph_modules(gm) for found in launches(module).items()]
    plan = plan_normalization(gm)
    groups = logical_groups(launch.group for _, launch in starts)
    rows: list[object] = []
    covered = set()
    for node, launch in starts:
        covered.add(node)
        payloads = plan.payloads_at(node)
        sizes = [] if launch.transport is Transport.ALL_TO_ALL else [_numel(n) for n in launch.inputs]
        rows.append(
            [
                launch.transport.value,
                launch.form,
                [groups[launch.group], launch.group_size],
                launch.reduce_op,
                [_dtype(n) for n in launch.inputs],
                sizes,
                {key: _portable(value, groups) for key, value in payloads.items()},
            ]
        )
    moved = {move.origin for move in plan.moves}
    strays = {
        canonical(_portable(value, groups))
        for module in graph_modules(gm)
        for node in module.graph.nodes
        if node not in covered and node not in moved
        for value in store.raw_payloads(node).values()
    }
    return sha256([rows, sorted(strays)])


def payload_digest(gm: fx.GraphModule, *, logical_groups: bool = False) -> str:
    """sha256 over everything a producer wrote, for cache keys and for comparing ranks.

    Covered: each payload and recorded loss of each node with its position, sub-graphs of every kind included, and the
    literal arguments of every ``torch.ops.fsdp_hooks.*`` call with their positions. Valid or not makes no difference:
    two graphs differ here if any field that the contract reads differs in value or type, or any other field in what
    `canonical.plain` tells apart (of an object that is no primitive and no container only the type; containers to 32
    deep; a list is a tuple). A payload that cannot be looked up at all, which counts as absent, is only that.

    Args:
        gm: the graph, as captured.
        logical_groups: replace process-group names by their order of first appearance. Names are kept for a
            cache, which is per process; ranks on other sub-groups of one mesh use other names for the same thing.
            Two groups swapped throughout are equal then; `digest` tells those apart.
            Positions then count payloads, not nodes.

    Returns:
        64 hexadecimal digits, equal in every process for equal payloads.
    """
    rows: list[object] = []
    order: dict[str, str] = {}

    def group(name: object) -> object:
        return order.setdefault(name, f"group {len(order)}") if logical_groups and isinstance(name, str) else name

    for path, module in gm.named_modules():
        if not isinstance(module, fx.GraphModule):
            continue
        for position, node in enumerate(module.graph.nodes):
            place = len(rows) if logical_groups else position  # a rank with an uneven shard has other nodes in between
            for key, value in store.raw_records(node).items():
                rows.append([path, place, key, plain(_regrouped(value, group))])
            operator = compat.op_name(node.target) or ""
            if operator.startswith(_HOOK_NAMESPACE):
                given = {k: group(v) if k in _GROUPS else v for k, v in compat.arguments(node).items()}
                rows.append([path, place, operator, plain(given)])
    return sha256(rows)


def payload_groups(gm: fx.GraphModule) -> tuple[str, ...]:
    """The process groups that the producers' operators of a captured graph name, in order of first appearance."""
    found: dict[str, None] = {}
    for module in graph_modules(gm):
        for node in module.graph.nodes:
            if (compat.op_name(node.target) or "").startswith(_HOOK_NAMESPACE):
                given = compat.arguments(node)
                found.update(dict.fromkeys(name for key in sorted(_GROUPS) if isinstance(name := given.get(key), str)))
    return tuple(found)


def _is_backward_graph(gm: fx.GraphModule) -> bool:
    """Whether this is the partitioner's backward half: it takes tangents and returns nothing of the forward.

    The joint graph takes tangents too, but returns the forward's outputs (PyTorch ``partitioners.py``).
    """
    takes_tangents = any(n.op == "placeholder" and str(n.target).startswith("tangents") for n in gm.graph.nodes)
    returned: list[fx.Node] = next((n.all_input_nodes for n in reversed(gm.graph.nodes) if n.op == "output"), [])
    forward = any(n.op == "call_function" and n.meta.get("partitioner_tag") == "is_forward" for n in returned)
    return takes_tangents and not forward


def _numel(node: fx.Node) -> int | None:
    value = node.meta.get("val")
    if not isinstance(value, torch.Tensor):
        return None
    count = 1
    for size in value.shape:
        if not isinstance(size, int):
            return None
        count *= size
    return count


def _dtype(node: fx.Node) -> str | None:
    value = node.meta.get("val")
    return str(value.dtype).removeprefix("torch.") if isinstance(value, torch.Tensor) else None


def _nbytes(launch: Launch) -> int | None:
    total = 0
    for node in launch.inputs:
        count = _numel(node)
        if count is None:
            return None
        total += count * node.meta["val"].dtype.itemsize
    return total if launch.inputs else None


def _portable(value: object, groups: Mapping[str | None, str]) -> object:
    """A payload with its group name replaced by the logical group."""
    return plain(_regrouped(value, lambda name: groups.get(name, "other")))


def _regrouped(value: object, group: Callable[[str], object]) -> object:
    try:
        held = dict(dict.items(value)) if is_dict(value) else {}
        if type(held.get("group")) is not str:
            return value
        return {**held, "group": group(held["group"])}
    except Exception:  # a key may be any object, with any behaviour
        return value
