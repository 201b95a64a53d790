"""Run passes over a graph with synthetic identities and report what became of them."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeAlias

from torch import fx

from ..lineage import Takeover
from ..losses import matches, snapshot
from ..store import members_of
from ..subgraphs import graph_modules
from ..transports import launches
from .findings import Finding, compare
from .recorder import Recorder, Stack
from .report import DebugifyReport, PassReport
from .stamps import STAMPS, Origin, stamp_all

Pass: TypeAlias = Callable[[fx.GraphModule], Any]
Passes: TypeAlias = Pass | Mapping[str, Pass] | Sequence[Pass | tuple[str, Pass]]


class DebugifyError(RuntimeError):
    """A pass raised or left an invalid graph, or the graph cannot be copied; the text names the pass."""


def debugify(passes: Passes, gm: fx.GraphModule, *, stamps: Sequence[str] = tuple(STAMPS)) -> DebugifyReport:
    """Run each pass on a copy of the graph with synthetic identities, and say what became of each.

    Every set of `STAMPS` is run through the whole pipeline; before each pass the collectives are stamped anew, so
    that each pass is judged alone, on the graph that the passes before it left.

    Args:
        passes: a callable, or several by name, as ``(name, callable)`` or bare. A pass takes the GraphModule and
            changes it in place, or returns another.
        gm: any FX graph with collectives; it is not changed.
        stamps: which sets of identities.

    Raises:
        DebugifyError: a pass raised or left a graph that does not lint, or the graph cannot be copied.
        ValueError: no such set of identities, no pass, or two of one name.
    """
    named = _named(passes)
    found: list[PassReport] = []
    for stamp in stamps:
        current = _copy(gm)
        for name, one in named:
            report, current = _run(name, one, current, stamp)
            found.append(report)
    return DebugifyReport(tuple(found))


def _run(name: str, one: Pass, gm: fx.GraphModule, stamp: str) -> tuple[PassReport, fx.GraphModule]:
    origins = stamp_all(gm, stamp)
    before, code = snapshot(gm), _code(gm)
    recorder = Recorder()
    try:
        with recorder.recording(gm):
            result = _call_pass(one, gm)
        after = result if isinstance(result, fx.GraphModule) else gm
        after.graph.lint()
    except Exception as error:
        raise DebugifyError(f"{type(error).__name__}: {error} (in pass {name!r}, identities {stamp!r})") from error
    after.recompile()
    descent = _descent(origins, recorder, after)
    if after is not gm or not any(node in descent for node in origins):
        for was, now in matches(before, snapshot(after)).items():
            if now.node not in descent:
                descent[now.node] = (origins[was],)
    place = _place(one)
    findings = [_placed(finding, place) for finding in compare(origins, descent, after, recorder)]
    return PassReport(name, stamp, _code(after) != code, tuple(findings)), after


def _call_pass(one: Pass, gm: fx.GraphModule) -> Any:
    return one(gm)


def _descent(
    origins: Mapping[fx.Node, Origin], recorder: Recorder, gm: fx.GraphModule
) -> dict[fx.Node, tuple[Origin, ...]]:
    """Start node → the collectives whose work it does, by node and by what took over from what."""
    held: dict[fx.Node, dict[Origin, None]] = {node: {origin: None} for node, origin in origins.items()}
    for takeover in recorder.log:
        if not isinstance(takeover, Takeover):
            held = {takeover.get(node, node): parts for node, parts in held.items()}
            continue
        parts = held.pop(takeover.erased, {})
        for node in takeover.by:
            held.setdefault(node, {}).update(parts)
    alive = {node for module in graph_modules(gm) for node in launches(module)}
    by_name = {origin.name: origin for origin in origins.values()}
    for node in alive - set(origins):
        record = members_of(node)  # the pass itself says what it merged
        if record is not None and not held.get(node):
            held[node] = {by_name[one.name]: None for one in record.members if one.name in by_name}
    return {
        node: tuple(sorted(parts, key=lambda origin: origin.number))
        for node, parts in held.items()
        if parts and node in alive
    }


def _named(passes: Passes) -> list[tuple[str, Pass]]:
    if callable(passes):
        given: list[Any] = [passes]
    else:
        given = list(passes.items()) if isinstance(passes, Mapping) else list(passes)
    named = [one if isinstance(one, tuple) else (_name(one), one) for one in given]
    names = [name for name, _ in named]
    if not named or len(set(names)) < len(names):
        found = ", ".join(names) or "none"
        raise ValueError(f"passes: expected at least one, each with a name of its own, found {found}")
    for name, one in named:
        if not callable(one):
            raise ValueError(f"passes: expected a callable for {name!r}, found {type(one).__name__}")
    return named


def _name(one: Any) -> str:
    return str(getattr(one, "__qualname__", type(one).__qualname__))


def _place(one: Pass) -> Stack:
    """Where the pass itself is, for what was done without an event that we see."""
    function = inspect.unwrap(one) if inspect.isfunction(one) else getattr(type(one), "__call__", one)  # noqa: B004
    code = getattr(function, "__code__", None) or getattr(getattr(function, "__func__", None), "__code__", None)
    return (f"{code.co_filename}:{code.co_firstlineno} {_name(one)}",) if code is not None else (_name(one),)


def _placed(finding: Finding, place: Stack) -> Finding:
    return replace(finding, stack=place) if finding.fault and not finding.stack else finding


def _code(gm: fx.GraphModule) -> str:
    return "\n".join(str(module.graph) for module in graph_modules(gm))


def _copy(gm: fx.GraphModule) -> fx.GraphModule:
    try:
        return copy.deepcopy(gm)
    except Exception as error:
        raise DebugifyError(
            f"expected a graph that copy.deepcopy can copy, found one that raises {type(error).__name__}: {error}; "
            "give debugify the graph of a post-grad pass, with plain or fake tensors as parameters"
        ) from error
