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
from dataclasses import dataclass, field
from typing import Any, Final, Literal

import networkx as nx
from torch import fx

from . import compat
from .gradients import gradient_scatters
from .roles import GRAD_REDUCE_SHARD, GRAD_REPLICATE_REDUCE, PARAM_UNSHARD
from .sources import is_source, parameter_gathers
from .transports import Launch, Transport, waits_of

Rules = Literal["extended", "compatible"]
RULES: Final[tuple[Rules, ...]] = ("extended", "compatible")

# The forms that torch's own heuristics recognise.
_UPSTREAM_FORMS: Final = {
    Transport.ALL_GATHER: ("default", "out"),
    Transport.REDUCE_SCATTER: ("default",),
    Transport.ALL_REDUCE: ("default",),
}
_CAST: Final = "prims::convert_element_type"


@dataclass(frozen=True, slots=True)
class View:
    """The cones of one graph that can decide about its collectives, as a networkx graph, input → user.

    Attributes:
        dag: nodes are FX nodes.
        order: its nodes in topological order.
        starts: the collectives asked about, in graph order.
    """

    dag: Any
    order: tuple[fx.Node, ...]
    starts: tuple[tuple[fx.Node, Launch], ...]
    waits: dict[fx.Node, list[fx.Node]] = field(default_factory=dict)


def build_view(starts: Sequence[tuple[fx.Node, Launch]], rules: Rules) -> View:
    """Collect the ancestors of all-gathers and the descendants of reduce-scatters, and what they lean on.

    Linear in the nodes and edges of those cones.
    """
    waits = {node: waits_of(node) for node, _ in starts}
    gathers = [n for n, launch in starts if launch.transport is Transport.ALL_GATHER]
    waited = [w for n, launch in starts if launch.transport is Transport.REDUCE_SCATTER for w in waits[n]]
    nodes = _ancestors(gathers) | _descendants(waited)
    if rules == "extended" and waited:
        # What a gradient meets later: is it state, or an activation?
        nodes |= _descendants(n for n in _ancestors(nodes) if is_source(n))
    dag: Any = nx.DiGraph()
    dag.add_nodes_from(nodes)
    dag.add_edges_from((i, n) for n in nodes for i in n.all_input_nodes if i in nodes)
    return View(dag, tuple(nx.topological_sort(dag)), tuple(starts), waits)


def structural_roles(
    view: View, rules: Rules, *, fsdp_groups: Iterable[str] = (), settled: Container[fx.Node] = ()
) -> dict[fx.Node, str | None]:
    """The ``fsdp.`` role that structure gives each collective of the view, None for none.

    Args:
        view: from `build_view` with the same rules.
        rules: the rule set.
        fsdp_groups: groups already known to carry FSDP collectives, because an explicit role says so.
        settled: collectives whose role is known; structure's word on them marks no group.
    """
    verdicts = {
        Transport.ALL_GATHER: _gathers(view, rules),
        Transport.REDUCE_SCATTER: _scatters(view, rules),
    }
    roles: dict[fx.Node, str | None] = {}
    groups = set(fsdp_groups)
    for node, launch in view.starts:
        fsdp = node in verdicts.get(launch.transport, ())
        role = PARAM_UNSHARD if launch.transport is Transport.ALL_GATHER else GRAD_REDUCE_SHARD
        roles[node] = role if fsdp else None
    groups.update(_inferred_groups(view, rules, {n: r for n, r in roles.items() if n not in settled}))
    return roles | dict(_reduces(view, rules, groups))


def _inferred_groups(view: View, rules: Rules, roles: dict[fx.Node, str | None]) -> Iterator[str]:
    """Groups that an inferred role marks; torch looks at gathers only, so a backward may have none there."""
    for node, launch in view.starts:
        counts = launch.transport is Transport.ALL_GATHER or rules == "extended"
        if counts and roles.get(node) is not None and launch.group is not None:
            yield launch.group


def _reduces(view: View, rules: Rules, groups: set[str]) -> Iterator[tuple[fx.Node, str | None]]:
    """All-reduces have no shape of their own: on an FSDP group they count as FSDP (torch 2.13 on)."""
    knows_groups = rules == "extended" or compat.torch_version() >= (2, 13)
    for node, launch in view.starts:
        if launch.transport is Transport.ALL_REDUCE:
            fsdp = knows_groups and launch.group in groups and (rules == "extended" or _upstream_form(launch))
            yield node, GRAD_REPLICATE_REDUCE if fsdp else None


def _upstream_form(launch: Launch) -> bool:
    return launch.form in _UPSTREAM_FORMS.get(launch.transport, ())


def _gathers(view: View, rules: Rules) -> set[fx.Node]:
    asked = [(n, launch) for n, launch in view.starts if launch.transport is Transport.ALL_GATHER]
    version = compat.torch_version()
    if version >= (2, 13):
        one = _one_placeholder(view)
    elif version >= (2, 12):
        one = _single_chain(view)
    else:
        one = {n for n, _ in asked if _is_cast_placeholder(n)}
    found = {n for n, launch in asked if _upstream_form(launch) and n in one}
    if rules == "extended":
        found |= parameter_gathers(view.order, asked)
    return found


def _one_placeholder(view: View) -> set[fx.Node]:
    """Nodes other than placeholders with exactly one placeholder among their ancestors."""
    none, many = object(), object()
    source: dict[fx.Node, object] = {}
    for node in view.order:
        if node.op == "placeholder":
            source[node] = node
            continue
        found = none
        for above in node.all_input_nodes:
            other = source.get(above, none)
            if other is none or other is found:
                continue
            found = other if found is none else many
        source[node] = found
    return {n for n, s in source.items() if n.op != "placeholder" and s is not none and s is not many}


def _single_chain(view: View) -> set[fx.Node]:
    """Nodes from which single inputs lead to a placeholder."""
    found: set[fx.Node] = set()
    for node in view.order:
        inputs = node.all_input_nodes
        if len(inputs) == 1 and (inputs[0].op == "placeholder" or inputs[0] in found):
            found.add(node)
    return found


def _is_cast_placeholder(start: fx.Node) -> bool:
    source = start.args[0] if start.args else None
    if not isinstance(source, fx.Node):
        return False
    if source.op == "placeholder":
        return True
    inner = source.args[0] if source.args else None
    return compat.op_name(source.target) == _CAST and isinstance(inner, fx.Node) and inner.op == "placeholder"


def _scatters(view: View, rules: Rules) -> set[fx.Node]:
    asked = [(n, launch) for n, launch in view.starts if launch.transport is Transport.REDUCE_SCATTER]
    if compat.torch_version() >= (2, 13):
        unary = _unary_to_output(view)
        good = {w for n, _ in asked for w in view.waits[n] if w.users and w in unary}
    else:
        good = {w for n, _ in asked for w in view.waits[n] if _is_cast_output(w)}
    found = {n for n, launch in asked if _upstream_form(launch) and view.waits[n] and good.issuperset(view.waits[n])}
    if rules == "extended":
        found |= gradient_scatters(view.order, asked, view.waits)
    return found


def _unary_to_output(view: View) -> set[fx.Node]:
    """Nodes below which every operator has a single input."""
    found: set[fx.Node] = set()
    for node in reversed(view.order):
        if all(u.op == "output" or (len(u.all_input_nodes) == 1 and u in found) for u in node.users):
            found.add(node)
    return found


def _is_cast_output(wait: fx.Node) -> bool:
    if all(user.op == "output" for user in wait.users):
        return True
    if len(wait.users) != 1:
        return False
    user = next(iter(wait.users))
    return compat.op_name(user.target) == _CAST and all(u.op == "output" for u in user.users)


def _ancestors(nodes: Iterable[fx.Node]) -> set[fx.Node]:
    seen = set(nodes)
    queue = list(seen)
    while queue:
        for above in queue.pop().all_input_nodes:
            if above not in seen:
                seen.add(above)
                queue.append(above)
    return seen


def _descendants(nodes: Iterable[fx.Node]) -> set[fx.Node]:
    seen = set(nodes)
    queue = list(seen)
    while queue:
        for below in queue.pop().users:
            if below not in seen:
                seen.add(below)
                queue.append(below)
    return seen
