"""Every way a payload can be wrong: its code, its message, and a graph that behaves as if there were no payload."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch import fx

from collective_identity import (
    GRAD_REDUCE_SHARD,
    PARAM_UNSHARD,
    absence_of,
    classify_report,
    codes,
    collective_table,
    digest,
    identity_of,
    normalize,
    parse,
    payload_digest,
    plan_normalization,
    start_nodes,
    store,
)
from tests.graphs import PAYLOAD_KEY, Builder, annotate, aten, identity, payload

VALID = payload(PARAM_UNSHARD, group="dp", param_group="layers.0", params=["w"])
LONG = "x" * 1_000_000


class Hostile:
    """Raises whatever is asked of it."""

    def __getattribute__(self, name: str) -> Any:
        raise RuntimeError(name)

    __eq__ = __hash__ = __repr__ = __iter__ = None  # type: ignore[assignment]


def endless() -> list[Any]:
    inner: list[Any] = []
    inner.append(inner)
    return inner


def doubled(times: int) -> list[Any]:
    """2 ** times leaves in a few aliased lists."""
    value: list[Any] = ["x"]
    for _ in range(times):
        value = [value, value]
    return value


def without(field: str) -> dict[str, Any]:
    return {name: value for name, value in VALID.items() if name != field}


MATRIX: Mapping[str, tuple[Callable[[], Any], codes.Code, str]] = {
    # no payload at all in the place of one
    "None": (lambda: None, codes.WRONG_TYPE, "expected a dict as payload, found NoneType"),
    "a str": (lambda: PARAM_UNSHARD, codes.WRONG_TYPE, "expected a dict as payload, found str"),
    "a list of pairs": (lambda: list(VALID.items()), codes.WRONG_TYPE, "expected a dict as payload, found list"),
    "any object": (object, codes.WRONG_TYPE, "expected a dict as payload, found object"),
    "hostile": (Hostile, codes.WRONG_TYPE, "expected a dict as payload, found Hostile"),
    "a tensor": (lambda: torch.ones(2), codes.WRONG_TYPE, "expected a dict as payload, found Tensor"),
    "empty": (dict, codes.MISSING_FIELD, "missing version, role, source, producer"),
    "nested": (lambda: {"payload": VALID}, codes.MISSING_FIELD, "missing version, role, source, producer"),
    # each field
    "no version": (lambda: without("version"), codes.MISSING_FIELD, "missing version"),
    "no role": (lambda: without("role"), codes.MISSING_FIELD, "missing role"),
    "no source": (lambda: without("source"), codes.MISSING_FIELD, "missing source"),
    "no producer": (lambda: without("producer"), codes.MISSING_FIELD, "missing producer"),
    "str version": (lambda: VALID | {"version": "1"}, codes.WRONG_TYPE, "expected an int in 'version', found str"),
    "bool version": (lambda: VALID | {"version": True}, codes.WRONG_TYPE, "expected an int in 'version', found bool"),
    "float version": (lambda: VALID | {"version": 1.0}, codes.WRONG_TYPE, "expected an int in 'version', found float"),
    "past version": (lambda: VALID | {"version": 0}, codes.UNKNOWN_VERSION, "expected version 1, found 0"),
    "future version": (lambda: VALID | {"version": 2}, codes.UNKNOWN_VERSION, "expected version 1, found 2"),
    "huge version": (lambda: VALID | {"version": 10**6000}, codes.UNKNOWN_VERSION, "found an int of 19932 bits"),
    "no str role": (lambda: VALID | {"role": 3}, codes.WRONG_TYPE, "expected a str in 'role', found int"),
    "unhashable role": (lambda: VALID | {"role": [PARAM_UNSHARD]}, codes.WRONG_TYPE, "in 'role', found list"),
    "hostile role": (lambda: VALID | {"role": Hostile()}, codes.WRONG_TYPE, "a str in 'role', found Hostile"),
    "empty role": (lambda: VALID | {"role": ""}, codes.BAD_ROLE, "expected a namespaced role, found ''"),
    "bare role": (
        lambda: VALID | {"role": "param_unshard"},
        codes.BAD_ROLE,
        "a namespaced role, found 'param_unshard'",
    ),
    "spaced role": (lambda: VALID | {"role": "fsdp. x"}, codes.BAD_ROLE, "a namespaced role, found 'fsdp. x'"),
    "unknown fsdp role": (
        lambda: VALID | {"role": "fsdp.gather"},
        codes.BAD_ROLE,
        "expected one of fsdp.*'fsdp.gather'",
    ),
    "huge role": (lambda: VALID | {"role": LONG}, codes.BAD_ROLE, "expected a namespaced role, found 'x+"),
    "huge fsdp role": (
        lambda: VALID | {"role": f"fsdp.{LONG}"},
        codes.BAD_ROLE,
        "expected one of fsdp.*found 'fsdp.x+",
    ),
    "unknown source": (lambda: VALID | {"source": "guessed"}, codes.UNKNOWN_SOURCE, "'inferred', found 'guessed'"),
    "shouted source": (lambda: VALID | {"source": "EXPLICIT"}, codes.UNKNOWN_SOURCE, "found 'EXPLICIT'"),
    "huge source": (lambda: VALID | {"source": LONG}, codes.UNKNOWN_SOURCE, "found 'x+"),
    "unhashable source": (lambda: VALID | {"source": {}}, codes.WRONG_TYPE, "a str in 'source', found dict"),
    "no str producer": (lambda: VALID | {"producer": None}, codes.WRONG_TYPE, "a str in 'producer', found NoneType"),
    "no str group": (lambda: VALID | {"group": 7}, codes.WRONG_TYPE, "expected a str in 'group', found int"),
    "no str unit": (lambda: VALID | {"param_group": ["a"]}, codes.WRONG_TYPE, "a str in 'param_group', found list"),
    "one name": (lambda: VALID | {"params": "w"}, codes.WRONG_TYPE, "a list of str in 'params', found str"),
    "a set of names": (lambda: VALID | {"params": {"w"}}, codes.WRONG_TYPE, "a list of str in 'params', found set"),
    "nested names": (lambda: VALID | {"params": [["w"]]}, codes.WRONG_TYPE, "a list of str in 'params', found list"),
    "endless names": (lambda: VALID | {"params": endless()}, codes.WRONG_TYPE, "in 'params', found list"),
    "doubled names": (lambda: VALID | {"params": doubled(60)}, codes.WRONG_TYPE, "in 'params', found list"),
    "huge, one wrong": (lambda: VALID | {"params": ["w"] * 100_000 + [0]}, codes.WRONG_TYPE, "in 'params', found int"),
    # against the node
    "role against transport": (
        lambda: VALID | {"role": GRAD_REDUCE_SHARD},
        codes.ROLE_TRANSPORT,
        "'fsdp.grad_reduce_shard' expects reduce_scatter, found all_gather",
    ),
    "group against node": (
        lambda: VALID | {"group": "tp"},
        codes.GROUP_MISMATCH,
        "the payload names group 'tp', the collective runs on 'dp'",
    ),
    "huge group": (lambda: VALID | {"group": LONG}, codes.GROUP_MISMATCH, "names group 'x+.*runs on 'dp'"),
}


class Graph:
    """Two gathers, one that structure takes for FSDP's and one that it does not, in a graph or below one."""

    def __init__(self, place: str) -> None:
        b = Builder()
        self.nodes: dict[str, fx.Node] = {"placeholder": b.placeholder("w")}
        self.nodes["view"] = b.view(self.nodes["placeholder"], [8, 4])
        alone = b.all_gather(self.nodes["view"])
        joined = b.all_gather(b.call(aten.add.Tensor, b.placeholder("x"), b.placeholder("y")))
        self.nodes |= {"wait": alone.wait, "start": alone.start, "joined": joined.start}
        b.output(alone.wait, joined.wait)
        self.module = b.module()
        if place == "control_deps":
            self._wrap("start", "joined")
        elif place == "sub-graph":
            self._nest()

    def _wrap(self, *keys: str) -> None:
        from torch._inductor.fx_passes.control_dependencies import preserve_node_ordering
        from torch.utils._ordered_set import OrderedSet

        names = {key: self.nodes[key].name for key in keys}
        order = {self.nodes[key]: OrderedSet([self.nodes["placeholder"]]) for key in keys}
        preserve_node_ordering(self.module.graph, order)
        found = {node.name: node for node in self.module.graph.nodes}
        self.nodes |= {key: found[name] for key, name in names.items()}

    def _nest(self) -> None:
        root, graph = torch.nn.Module(), fx.Graph()
        root.body = self.module
        args = [graph.placeholder(name) for name in ("w", "x", "y")]
        graph.output(
            graph.call_function(torch.ops.higher_order.invoke_subgraph, (graph.get_attr("body"), "body", *args))
        )
        self.module = fx.GraphModule(root, graph)
        self.nodes = {key: self._inside(node.name) for key, node in self.nodes.items()}

    def _inside(self, name: str) -> fx.Node:
        return next(node for node in self.module.body.graph.nodes if node.name == name)

    def roles(self) -> list[Any]:
        return list(classify_report(self.module).identities.values())


PLACES = ("start", "wait", "view", "placeholder", "control_deps", "sub-graph")
ON_START = ("start", "control_deps", "sub-graph")


@pytest.fixture(scope="module")
def absent() -> dict[str, list[Any]]:
    """What each graph's collectives are without any payload."""
    return {place: Graph(place).roles() for place in PLACES}


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("kind", MATRIX)
def test_a_malformed_payload_counts_as_absent(kind: str, place: str, absent: dict[str, list[Any]]) -> None:
    make, code, says = MATRIX[kind]
    graph = Graph(place)
    nodes = ["start", "joined"] if place in ON_START else [place]
    for key in nodes:
        annotate(graph.nodes[key], make())

    report = classify_report(graph.module)
    assert list(report.identities.values()) == absent[place]
    assert not report.mismatches and not report.notes
    for key in nodes if place in ON_START else []:
        node = graph.nodes[key]
        found = absence_of(node)
        assert found is not None and found == report.absences[node]
        assert (found.kind, found.code) == ("malformed", code)
        _says(found.detail, says)
        assert identity_of(node) is None
    for removal in plan_normalization(graph.module).removals:
        assert removal.code is codes.REMOVED_PAYLOAD
        _says(removal.detail, says)
        assert code.id in removal.detail

    assert {row.role for row in collective_table(graph.module)} == {i and i.role for i in absent[place]}
    assert len({digest(graph.module), payload_digest(graph.module)}) == 2
    assert normalize(graph.module) == (place not in ON_START)
    assert graph.roles() == absent[place]


def _says(detail: str, pattern: str) -> None:
    import re

    assert re.search(pattern, detail), detail
    assert len(detail) < 400, "a message for people, whatever the payload's size"


@pytest.mark.parametrize("kind", MATRIX)
def test_each_kind_in_the_place_of_a_backward_payload(kind: str) -> None:
    """The backward key is read alone there: a valid forward payload does not stand in for a malformed one."""
    make, code, says = MATRIX[kind]
    node = Graph("start").nodes["start"]
    node.meta["partitioner_tag"] = "is_backward"
    node.meta["custom"] = {store.KEY: VALID, store.BACKWARD_KEY: make()}
    found = absence_of(node)
    assert found is not None and found.code is code
    _says(found.detail, says)


VALID_AFTER_ALL: Mapping[str, Callable[[], Any]] = {
    "unknown fields": lambda: VALID | {"colour": "blue", 3: object(), "deep": endless()},
    "fields with any behaviour": lambda: VALID | {"priority": Hostile(), "tensor": torch.ones(2)},
    "None in optional fields": lambda: VALID | {"group": None, "param_group": None, "params": None},
    "a tuple of names": lambda: VALID | {"params": ("w",)},
    "very many names": lambda: VALID | {"params": ["w"] * 100_000},
    "huge names": lambda: VALID | {"producer": LONG, "param_group": LONG},
    "an ordered dict": lambda: __import__("collections").OrderedDict(VALID),
}


@pytest.mark.parametrize("place", ["start", "wait", "sub-graph"])
@pytest.mark.parametrize("kind", VALID_AFTER_ALL)
def test_what_looks_wrong_and_is_valid(kind: str, place: str) -> None:
    graph = Graph(place)
    key = "wait" if place == "wait" else "start"
    annotate(graph.nodes[key], VALID_AFTER_ALL[kind]())
    assert parse(graph.nodes[key].meta["custom"][PAYLOAD_KEY]).code is None
    assert normalize(graph.module) == (place == "wait")
    view = identity_of(graph.nodes["start"])
    assert view is not None and view.role == PARAM_UNSHARD and view.explicit
    assert len({digest(graph.module), payload_digest(graph.module)}) == 2


@pytest.mark.parametrize("custom", [None, 1, "text", [PAYLOAD_KEY], {}, {"mine": 1}, {KeyError: 1}])
def test_a_container_that_holds_no_payload(custom: Any) -> None:
    graph = Graph("start")
    graph.nodes["start"].meta["custom"] = custom
    assert absence_of(graph.nodes["start"]) == store.NEVER_HAD
    assert not normalize(graph.module) and graph.nodes["start"].meta["custom"] is custom


def test_an_aliased_payload_is_read_and_never_written() -> None:
    """One dict on every node of a region, as annotation and copies leave it."""
    graph = Graph("start")
    shared = {PAYLOAD_KEY: dict(VALID), "mine": 1}
    for key in ("placeholder", "view", "start", "wait"):
        graph.nodes[key].meta["custom"] = shared
    before = {PAYLOAD_KEY: dict(VALID), "mine": 1}
    assert normalize(graph.module)
    assert shared == before and graph.nodes["start"].meta["custom"] is shared
    assert [n for n in graph.module.graph.nodes if store.has_payload(n)] == [graph.nodes["start"]]
    store.stamp(graph.nodes["start"], identity(PARAM_UNSHARD))
    assert shared == before and graph.nodes["start"].meta["custom"] is not shared


def test_every_code_of_a_malformed_payload_is_in_the_matrix() -> None:
    malformed = {code for code in codes.CODES.values() if code.text.startswith("malformed payload")}
    assert {code for _, code, _ in MATRIX.values()} == malformed
    assert len(start_nodes(Graph("start").module)) == 2
