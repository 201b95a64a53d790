"""What does the shape of the graph say? The networkx fallback for collectives without an explicit identity.

Two rule sets. ``compatible`` is the verdict of the installed torch, exactly. ``extended`` is the same and
more (`sources`, `gradients`). Torch walks the ancestry again for every collective; here each rule is one pass
over the cones.

PyTorch ``torch/_inductor/fx_passes/fsdp.py``: 2.11 (``is_fsdp_all_gather_wait``: a placeholder, or its cast),
2.12 (``is_fsdp_all_gather``: a chain of single inputs), 2.13–2.15 (exactly one placeholder ancestor;
``is_fsdp_reduce_scatter_wait``: only unary operators up to the outputs; ``identify_fsdp_groups``).
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator, Sequence
from typing import Final

import torch
from torch import fx

from . import compat
from .gradients import gradient_scatters
from .roles import GRAD_REDUCE_SHARD, GRAD_REPLICATE_REDUCE, PARAM_UNSHARD
from .sources import parameter_gathers, value_of
from .transports import WAIT, Launch, Transport
from .view import Rules, View

# The forms that torch's own heuristics recognise.
_UPSTREAM_FORMS: Final = {
    Transport.ALL_GATHER: ("default", "out"),
    Transport.REDUCE_SCATTER: ("default",),
    Transport.ALL_REDUCE: ("default",),
}
_SUMS: Final = ("sum", "avg", None)  # how gradients are reduced; None where the operator does not say
_CAST: Final = "prims::convert_element_type"


def structural_roles(
    views: Sequence[View], rules: Rules, *, fsdp_groups: Iterable[str] = (), settled: Container[fx.Node] = ()
) -> dict[fx.Node, str | None]:
    """The ``fsdp.`` role that structure gives each collective of the views, None for none.

    Args:
        views: of a graph and its sub-graphs, from `view.build_view` with the same rules.
        rules: the rule set.
        fsdp_groups: groups already known to carry FSDP collectives, because an explicit role says so.
        settled: collectives whose role is known; structure's word on them marks no group.
    """
    roles: dict[fx.Node, str | None] = {}
    said: set[object] = set(fsdp_groups)
    marked: list[set[object]] = []
    measures: set[fx.Node] = set()
    for view in views:
        scatters, measured = _scatters(view, rules)
        found = _gathers(view, rules) | scatters
        measures |= measured
        roles |= dict.fromkeys(view.starts)
        for node in found:
            gathers = view.starts[node].transport is Transport.ALL_GATHER
            roles[node] = PARAM_UNSHARD if gathers else GRAD_REDUCE_SHARD
        marked.append(set(_inferred_groups(view, rules, (node for node in found if node not in settled))))
    everywhere: set[object] = set().union(*marked)
    for view, own in zip(views, marked, strict=True):
        # Torch looks at one graph alone; a group is FSDP's wherever it is seen.
        roles.update(_reduces(view, rules, (said, own if rules == "compatible" else everywhere), measures))
    return roles


def _inferred_groups(view: View, rules: Rules, found: Iterable[fx.Node]) -> Iterator[object]:
    """Groups that an inferred role marks; torch looks at gathers only, so a backward may have none there."""
    for node in found:
        launch = view.starts[node]
        if launch.transport is Transport.ALL_GATHER or rules == "extended":
            group = _group(node, launch, rules)
            if group is not None:
                yield group


def _group(node: fx.Node, launch: Launch, rules: Rules) -> object:
    """What stands for a collective's group: its name, without one the node given as the group, else None.

    Torch compares what was given, and knows no name of a node.
    """
    if launch.group is not None and rules == "extended":
        return launch.group
    given = compat.arguments(node).get("group_name")
    return given if isinstance(given, (str, fx.Node)) else launch.group


def _reduces(
    view: View, rules: Rules, known: tuple[set[object], ...], measures: Container[fx.Node]
) -> Iterator[tuple[fx.Node, str | None]]:
    """All-reduces have no shape of their own: on an FSDP group they count as FSDP (torch 2.13 on).

    Where a group is known by what its producer says, and not by torch's heuristics, what cannot be gradients does not.
    """
    knows_groups = rules == "extended" or compat.torch_version() >= (2, 13)
    said, inferred = known
    for node, launch in view.starts.items():
        if launch.transport is Transport.ALL_REDUCE:
            meant = _is_upstreams(node, launch) if rules == "compatible" else launch.reduce_op in _SUMS
            told = launch.group in said and (rules == "compatible" or not (node in measures or _is_number(launch)))
            fsdp = knows_groups and meant and (told or _group(node, launch, rules) in inferred)
            yield node, GRAD_REPLICATE_REDUCE if fsdp else None


def _is_number(launch: Launch) -> bool:
    """Whether it sends a loss or a norm: a shard's gradient has the dimension that is sharded, at least."""
    values = [value_of(one) for one in launch.inputs]
    return bool(values) and all(isinstance(value, torch.Tensor) and value.dim() == 0 for value in values)


def _is_upstreams(node: fx.Node, launch: Launch) -> bool:
    """Whether torch's heuristics look at this operator: these forms, and never a packet as Dynamo's graphs hold it."""
    return launch.form in _UPSTREAM_FORMS.get(launch.transport, ()) and isinstance(node.target, torch._ops.OpOverload)


def _gathers(view: View, rules: Rules) -> set[fx.Node]:
    asked = view.of(Transport.ALL_GATHER)
    if not asked:
        return set()
    version = compat.torch_version()
    if version >= (2, 13):
        one = _one_placeholder(view, asked)
    elif version >= (2, 12):
        one = _single_chain(view, asked)
    else:
        one = {n for n in asked if _is_cast_placeholder(n)}
    found = {n for n, launch in asked.items() if n in one and _is_upstreams(n, launch)}
    if rules == "extended":
        found |= parameter_gathers(view, asked)
    return found


def _one_placeholder(view: View, gathers: Iterable[fx.Node]) -> set[fx.Node]:
    """All-gathers with exactly one placeholder among their ancestors."""
    none, many = -1, -2
    source: dict[int, int] = {}
    for junction in view.junctions:
        if view.ops[junction] == "placeholder":
            source[junction] = junction
            continue
        found = {source[view.homes[above]] for above in view.inputs[junction]}
        found.discard(none)
        source[junction] = none if not found else found.pop() if len(found) == 1 else many
    return {n for n in gathers if source[view.homes[view.number[n]]] >= 0}


def _single_chain(view: View, gathers: Iterable[fx.Node]) -> set[fx.Node]:
    """All-gathers from which single inputs lead to a placeholder."""
    chained: dict[int, bool] = {}
    for junction in view.junctions:
        above = view.inputs[junction]
        chained[junction] = chained[view.homes[above[0]]] if len(above) == 1 else view.ops[junction] == "placeholder"
    return {n for n in gathers if chained[view.homes[view.number[n]]]}


def _is_cast_placeholder(start: fx.Node) -> bool:
    source = start.args[0] if start.args else None
    if not isinstance(source, fx.Node):
        return False
    if source.op == "placeholder":
        return True
    inner = source.args[0] if source.args else None
    return _is_cast(source) and isinstance(inner, fx.Node) and inner.op == "placeholder"


def _is_cast(node: fx.Node) -> bool:
    return isinstance(node.target, torch._ops.OpOverload) and compat.op_name(node.target) == _CAST


def _scatters(view: View, rules: Rules) -> tuple[set[fx.Node], set[fx.Node]]:
    """Reduce-scatters of gradients, and all-reduces that measure these."""
    asked = view.of(Transport.REDUCE_SCATTER)
    if not asked:
        return set(), set()
    upstreams = [n for n, launch in asked.items() if _is_upstreams(n, launch)]
    waits = {n: [w for w in view.waits[n] if w.target is WAIT] for n in upstreams}
    if compat.torch_version() >= (2, 13):
        unary = _unary_to_output(view)
        good = {w for several in waits.values() for w in several if w.users and w in unary}
    else:
        good = {w for several in waits.values() for w in several if _is_cast_output(w)}
    found = {n for n, several in waits.items() if several and good.issuperset(several)}
    if rules == "compatible":
        return found, set()
    more, measures = gradient_scatters(view, asked)
    return found | more, measures


def _unary_to_output(view: View) -> set[fx.Node]:
    """Waits of reduce-scatters below which every operator has a single input."""
    joined = bytearray(len(view.nodes))
    for i in reversed(view.cone):
        above = view.inputs[i]
        if (joined[i] or len(above) != 1) and view.ops[i] != "output":
            for one in above:
                joined[one] = True
    return {wait for several in view.waits.values() for wait in several if not joined[view.number[wait]]}


def _is_cast_output(wait: fx.Node) -> bool:
    if all(user.op == "output" for user in wait.users):
        return True
    if len(wait.users) != 1:
        return False
    user = next(iter(wait.users))
    return _is_cast(user) and all(u.op == "output" for u in user.users)
