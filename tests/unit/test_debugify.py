"""debugify finds every kind of planted fault and names pass and stack; the examples of the docs page are run."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from torch import fx

import collective_identity as ci
from collective_identity import Identity, Source, identity_of, stamp, start_nodes
from collective_identity.debugify import DebugifyError, DebugifyFault, Kind, debugify
from collective_identity.merge import merge_outcome
from collective_identity.pytest_plugin import debugify as debugify_fixture  # noqa: F401
from collective_identity.store import drop
from collective_identity.transports import WAIT, Transport, default_overload
from tests.graphs import Builder, aten

PAGE = Path(__file__).parents[2] / "docs" / "how-to-update-collective-identity.md"
EXAMPLES = re.findall(r"```python (good|bad: [a-z ]+)\n(.*?)```", PAGE.read_text(), re.S)


def graph(count: int = 3) -> fx.GraphModule:
    b = Builder()
    b.output(*(b.all_gather(b.placeholder(f"p{i}")).wait for i in range(count)))
    return b.module()


def bucket(gm: fx.GraphModule, starts: list[fx.Node]) -> tuple[fx.Node, list[fx.Node]]:
    """One gather of all inputs, behind the last; and what each old wait is replaced by."""
    with gm.graph.inserting_before(starts[-1].next):
        cat = gm.graph.call_function(aten.cat.default, ([start.args[0] for start in starts],))
        new = gm.graph.call_function(starts[0].target, (cat, *starts[0].args[1:]))  # type: ignore[arg-type]
        wait = gm.graph.call_function(WAIT, (new,))
    return new, [wait] * len(starts)


def erase(gm: fx.GraphModule, starts: list[fx.Node], waits: list[fx.Node]) -> None:
    from torch._inductor.pattern_matcher import stable_topological_sort

    for start, wait in zip(starts, waits, strict=True):
        (old,) = start.users
        old.replace_all_uses_with(wait)
        gm.graph.erase_node(old)
        gm.graph.erase_node(start)
    stable_topological_sort(gm.graph)


def example(source: str) -> Callable[[fx.GraphModule], Any]:
    names: dict[str, Any] = {
        one.__name__: one
        for one in (start_nodes, identity_of, stamp, drop, replace, Source, Identity, merge_outcome, bucket, erase)
    }
    exec(compile(source, str(PAGE), "exec"), names)
    (name,) = re.findall(r"^def (\w+)", source, re.M)
    return names[name]  # type: ignore[no-any-return]


@pytest.mark.parametrize(("verdict", "source"), EXAMPLES, ids=[re.findall(r"def (\w+)", s)[0] for _, s in EXAMPLES])
def test_the_page_is_true(verdict: str, source: str) -> None:
    one = example(source)
    report = debugify(one, graph())
    if verdict == "good":
        report.check()
        return
    kind = Kind(verdict.removeprefix("bad: "))
    faults = [finding for _, finding in report.faults if finding.kind is kind]
    assert faults, str(report)
    assert all(any(str(PAGE) in frame and one.__name__ in frame for frame in fault.stack) for fault in faults)
    with pytest.raises(DebugifyFault, match=one.__name__):
        report.check()


def wrong_transport(gm: fx.GraphModule) -> None:
    for start in start_nodes(gm):
        with gm.graph.inserting_before(start):
            args = (start.args[0], "sum", start.args[2])
            new = gm.graph.call_function(default_overload(Transport.ALL_REDUCE), args)
        new.meta = dict(start.meta)
        start.replace_all_uses_with(new)
        gm.graph.erase_node(start)


def duplicate(gm: fx.GraphModule) -> None:
    first, second, *_ = start_nodes(gm)
    with gm.graph.inserting_after(second):
        new = gm.graph.call_function(second.target, second.args)
    found = identity_of(first)
    if found is not None:
        stamp(new, found)


def with_reason(gm: fx.GraphModule) -> None:
    for start in start_nodes(gm):
        drop(start, ci.CODES["CI031"], "with_reason", "on purpose")


@pytest.mark.parametrize(
    ("one", "kind"),
    [(wrong_transport, Kind.TRANSPORT_MISMATCH), (duplicate, Kind.DUPLICATE)],
    ids=["transport", "duplicate"],
)
def test_planted(one: Callable[[fx.GraphModule], None], kind: Kind) -> None:
    faults = [finding for _, finding in debugify(one, graph()).faults if finding.kind is kind]
    assert faults and all(one.__name__ in fault.stack[0] for fault in faults)


def test_no_fault() -> None:
    report = debugify([("nothing", lambda gm: None), with_reason], graph())
    report.check()
    kinds = {one.name: set(one.counts) for one in report.passes}
    assert kinds == {"nothing": {Kind.UNCHANGED}, "with_reason": {Kind.DROP_WITH_REASON}}


def test_a_reason_speaks_for_its_own_collective_only() -> None:
    def silent_beside_recorded(gm: fx.GraphModule) -> None:
        first, second, *_ = start_nodes(gm)
        with gm.graph.inserting_before(first):
            new = gm.graph.call_function(first.target, first.args)
        drop(new, ci.CODES["CI031"], "silent_beside_recorded", "on purpose")
        first.replace_all_uses_with(new)
        gm.graph.erase_node(first)
        (wait,) = second.users
        with gm.graph.inserting_before(wait):
            local = gm.graph.call_function(aten.cat.default, ([second.args[0], second.args[0]],))
        wait.replace_all_uses_with(local)
        gm.graph.erase_node(wait)
        gm.graph.erase_node(second)

    labelled = debugify(silent_beside_recorded, graph()).passes[0]
    assert (labelled.counts[Kind.DROP_WITH_REASON], labelled.counts[Kind.DROP]) == (1, 1)


def test_a_returned_module_is_followed() -> None:
    def retraced(gm: fx.GraphModule) -> fx.GraphModule:
        return fx.Transformer(gm).transform()

    before = graph()
    text = str(before.graph)
    assert {f.kind for _, f in debugify(retraced, before).faults} <= {Kind.DROP, Kind.ALIAS}
    assert str(before.graph) == text and not any(map(identity_of, start_nodes(before)))


def test_a_pass_that_raises_is_named() -> None:
    def broken(gm: fx.GraphModule) -> None:
        raise KeyError("x")

    with pytest.raises(DebugifyError, match=r"KeyError.*broken"):
        debugify(broken, graph())


def test_the_fixture(debugify_fixture: Callable[..., Any]) -> None:  # noqa: F811
    debugify_fixture(lambda gm: None, graph())
    with pytest.raises(DebugifyFault):
        debugify_fixture(example({re.findall(r"def (\w+)", s)[0]: s for _, s in EXAMPLES}["spread"]), graph())
