"""Random graphs, and everything that must hold on each: against the installed torch, and of our own rules.

``python -m tests.random_graphs [--graphs N] [--seed S]`` runs as many as wanted; a failure names its seed.
"""

from __future__ import annotations

import argparse
import copy
import random
import time
from collections import Counter
from typing import Any

import torch
from torch import fx

from collective_identity import (
    GRAD_REDUCE_SHARD,
    GRAD_REPLICATE_REDUCE,
    PARAM_UNSHARD,
    Source,
    Transport,
    classify,
    classify_report,
    digest,
    launch_of,
    normalize,
    plan_normalization,
    start_nodes,
    store,
)
from tests.graphs import Builder, annotate, aten, payload

C = torch.ops._c10d_functional

PAYLOADS: tuple[Any, ...] = (
    payload(PARAM_UNSHARD),
    payload(PARAM_UNSHARD, source="inferred"),
    payload(PARAM_UNSHARD, group="g0", params=["w"]),
    payload(GRAD_REDUCE_SHARD, group="g1"),
    payload(GRAD_REPLICATE_REDUCE),
    payload("tp.activation_gather", params=["a", "b"]),
    payload("unshard"),
    payload(PARAM_UNSHARD, version=2),
    {"role": PARAM_UNSHARD},
    "fsdp.param_unshard",
    None,
)


VALUES = tuple((shape,) for shape in ((4, 8), (4, 8), (8, 4), (4, 1), (4,), (2, 2, 8), (1,), ()))
"""Shapes of inputs; all of a width that is never a quantised parameter's."""


def random_graph(seed: int) -> fx.GraphModule:
    """Inputs, chains, joins and every kind of collective in any order, with fake values of all sorts of shapes.

    Every other graph has groups that are nodes, with a name and without, and one in ten operator packets.
    """
    rng = random.Random(seed)
    b = Builder()
    inputs = [b.placeholder(f"p{i}", *rng.choice(VALUES)) for i in range(rng.randint(1, 4))]
    b.root.held = torch.nn.Parameter(torch.zeros(4, 8))
    held = b.graph.get_attr("held")
    held.meta["val"] = b.empty((4, 8))
    nodes, sizes, groups = [*inputs, held], [4], ["g0", "g1"]
    if rng.random() < 0.5:
        b.root.group, b.root.nameless = "g0", object()
        groups += [b.graph.placeholder("group"), b.graph.get_attr("group"), b.graph.get_attr("nameless")]
    packets = rng.random() < 0.1

    def add(target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        """A value of its first input's shape, though the operator may make another."""
        node = b.graph.call_function(target, args, kwargs)
        like = node.all_input_nodes[0] if node.all_input_nodes else held
        node.meta["val"] = like.meta["val"]
        nodes.append(node)
        return node

    def launch(target: Any, *args: Any, **kwargs: Any) -> None:
        of = (lambda op: op.overloadpacket if packets and rng.random() < 0.3 else op)  # noqa: E731
        start = add(of(target), *args, **kwargs)
        nodes.pop()
        for _ in range(rng.choice([1, 1, 1, 2])):
            add(of(C.wait_tensor.default), start)

    for _ in range(rng.randint(4, 30)):
        x, y = rng.choice(nodes), rng.choice(nodes)
        group = rng.choice(groups)
        match rng.randint(0, 13):
            case 0 | 1:
                add(torch.ops.prims.convert_element_type.default, x, torch.bfloat16)
            case 2:
                add(aten.view.default, x, [8, 4])
            case 3:
                add(aten.add.Tensor, x, y)
            case 4:
                add(aten.cat.default, [x, y, x])
            case 5:
                add(aten.full.default, [4, 8], 0.0)
            case 6 | 7:
                launch(C.all_gather_into_tensor.default, x, 2, group)
            case 8:
                launch(C.all_gather_into_tensor_out.default, x, 2, group, out=y)
            case 9:
                launch(C.reduce_scatter_tensor.default, x, "avg", 2, group)
            case 10:
                launch(C.all_reduce.default, x, "sum", group)
            case 11:
                size = b.graph.call_function(aten.sym_size.int, (x, 0))
                size.meta["val"] = 4
                sizes.append(size)
            case 12:
                add(aten.slice.Tensor, x, 0, 0, rng.choice(sizes))
            case 13:
                add(aten.zeros_like.default, x)
    b.graph.output(tuple(rng.sample(nodes, rng.randint(1, min(6, len(nodes))))))
    gm = fx.GraphModule(b.root, fx.Graph())
    gm._graph = b.graph  # without the code, which nothing here runs
    b.graph.owning_module = gm
    return gm


def annotated(gm: fx.GraphModule, seed: int) -> None:
    """Sprinkle payloads, right and wrong, each dict shared by the nodes that have it."""
    rng = random.Random(seed)
    for node in gm.graph.nodes:
        if node.op != "output" and rng.random() < 0.3:
            annotate(node, rng.choice(PAYLOADS))
        if rng.random() < 0.2:
            node.meta["partitioner_tag"] = rng.choice(["is_forward", "is_backward"])


def torchs_verdict(gm: fx.GraphModule) -> dict[fx.Node, bool]:
    """The installed torch's own verdict on every collective."""
    from torch._inductor.fx_passes import fsdp

    groups = fsdp.identify_fsdp_groups(gm)[0] if hasattr(fsdp, "identify_fsdp_groups") else ()
    verdict = {}
    for node in start_nodes(gm):
        waits = [user for user in node.users if user.target is C.wait_tensor.default]
        if node.target in (C.all_gather_into_tensor.default, C.all_gather_into_tensor_out.default):
            if hasattr(fsdp, "is_fsdp_all_gather"):
                verdict[node] = fsdp.is_fsdp_all_gather(node)
            else:
                verdict[node] = _gathered_by_the_first_torch(node)
        elif node.target is C.reduce_scatter_tensor.default:
            verdict[node] = bool(waits) and all(fsdp.is_fsdp_reduce_scatter_wait(w) for w in waits)
        else:
            verdict[node] = node.target is C.all_reduce.default and node.args[2] in groups
    return verdict


def _gathered_by_the_first_torch(start: fx.Node) -> bool:
    """Torch 2.11 asks a wait alone, and reads nothing of it but its start."""
    from torch._inductor.fx_passes import fsdp

    wait = start.graph.call_function(C.wait_tensor.default, (start,))
    try:
        return bool(fsdp.is_fsdp_all_gather_wait(wait))
    finally:
        start.graph.erase_node(wait)


def one_source(start: fx.Node) -> bool:
    """The extended rule for gathers, walked for one collective alone."""
    seen: set[fx.Node] = set()
    queue = list(launch.inputs) if (launch := launch_of(start)) else []
    while queue:
        node = queue.pop()
        if node not in seen:
            seen.add(node)
            below = launch_of(node)
            if below is not None:
                queue += below.inputs
            elif node.target not in (aten.sym_size.int, aten.zeros_like.default):
                queue += node.all_input_nodes
    data = [n for n in seen if n.op in ("placeholder", "get_attr")]
    scales = [n for n in data if n.op == "placeholder" and n.meta["val"].numel() == 1]
    inputs = [n for n in data if n.op == "placeholder" and n not in scales]
    attributes = [n for n in data if n.op == "get_attr"]
    return len(inputs) == 1 or (not inputs and len(attributes or scales) == 1)


def check(seed: int) -> Counter[tuple[str, bool]]:
    """Build the graph of one seed and check it; how often torch said what."""
    gm = random_graph(seed)
    expected = torchs_verdict(gm)
    narrow, wide = classify(gm, rules="compatible"), classify(gm)
    assert {n: i is not None for n, i in narrow.items()} == expected, f"seed {seed}: not torch's verdict"
    lost = [n for n, i in narrow.items() if i is not None and wide[n] is None]
    assert not lost, f"seed {seed}: extended took {lost} away"
    launches = {node: launch for node in wide if (launch := launch_of(node))}
    for node, found in wide.items():
        if launches[node].transport is Transport.ALL_GATHER:
            assert (found is not None) == (expected[node] or one_source(node)), f"seed {seed}: {node}"
    _check_annotated(gm, seed)
    return Counter((launches[node].transport.value, fsdp) for node, fsdp in expected.items())


def _check_annotated(gm: fx.GraphModule, seed: int) -> None:
    annotated(gm, seed)
    own = {node: store.identity_of(node) for node in start_nodes(gm)}
    before = [copy.deepcopy(node.meta.get("custom")) for node in gm.graph.nodes]
    edges = [(node.name, [i.name for i in node.all_input_nodes]) for node in gm.graph.nodes]
    report = classify_report(gm)
    assert digest(gm) == digest(gm)
    moves = {move.target for move in plan_normalization(gm).moves}
    assert before == [node.meta.get("custom") for node in gm.graph.nodes], f"seed {seed}: reading wrote"
    normalize(gm)
    assert not normalize(gm), f"seed {seed}: normalising twice changes something"
    assert edges == [(node.name, [i.name for i in node.all_input_nodes]) for node in gm.graph.nodes]
    assert not [n for n in gm.graph.nodes if store.has_payload(n) and n not in own], f"seed {seed}: a stray is left"
    again = classify_report(gm)
    assert (again.identities, again.absences) == (report.identities, report.absences), (
        f"seed {seed}: not as if normalised"
    )
    for node, found in again.identities.items():
        said, had = store.identity_of(node), own[node]
        replaced = node in moves and (had is None or (said is not None and said.explicit > had.explicit))
        assert said == had or replaced, f"seed {seed}: {node} was overwritten"
        if said is not None and said.explicit:
            assert found == said, f"seed {seed}: {node} is explicit and was not believed"
        elif found is not None:
            assert found.source is Source.INFERRED, f"seed {seed}: {node} became explicit"
        assert (found is None) <= (node in again.absences), f"seed {seed}: {node} is absent without a kind"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--graphs", type=int, default=100_000, help="how many (default 100000, about half an hour)")
    parser.add_argument("--seed", type=int, default=int(time.time()), help="of the first; each next one is one more")
    given = parser.parse_args()
    seen: Counter[tuple[str, bool]] = Counter()
    for seed in range(given.seed, given.seed + given.graphs):
        seen += check(seed)
    print(f"{given.graphs} graphs from seed {given.seed} hold; torch's verdicts: {dict(seen)}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
