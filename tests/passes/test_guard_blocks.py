"""The guard looks at so many nodes together: no change escapes it between two such blocks, or at the end."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import fx

from inductor_passes.lite_mode.snapshot import _BLOCK as BLOCK
from inductor_passes.lite_mode.snapshot import Snapshot
from inductor_passes.manager import PassError, Pipeline
from tests.passes.test_guard import CONTEXT, Planted, graph, quiet

aten = torch.ops.aten


def nodes_of(gm: fx.GraphModule) -> list[fx.Node]:
    return [node for node in gm.graph.nodes if node.op == "call_function"]


AT: dict[str, Callable[[fx.GraphModule, fx.Node], Any]] = {
    "args": lambda gm, node: setattr(node, "args", (*node.args, 2)),
    "recompute": lambda gm, node: node.meta.update(recompute=2),
    "custom_edited": lambda gm, node: node.meta["custom"]["deep"].append(1),
    "moved": lambda gm, node: nodes_of(gm)[0].append(node),
    "removed": lambda gm, node: (node.replace_all_uses_with(node.args[0]), gm.graph.erase_node(node)),
}


@pytest.mark.parametrize("name", sorted(AT))
@pytest.mark.parametrize("nodes", [BLOCK - 1, BLOCK, BLOCK + 2])
def test_a_change_anywhere_in_a_long_graph_is_caught(name: str, nodes: int) -> None:
    """At the last of one block, and at those of the next."""
    for place in {BLOCK - 3, nodes - 2}:  # the last node is the output
        gm = graph(nodes - 3)
        assert len(gm.graph.nodes) == nodes
        node = list(gm.graph.nodes)[place]
        node.meta["custom"] = {"deep": []}
        said = "" if name in ("moved", "removed") else node.name
        planted = Planted(lambda gm, node=node: AT[name](gm, node))  # type: ignore[misc]
        with pytest.raises(PassError, match=f"'planted' .*{said}"):
            Pipeline([quiet(), planted]).run(gm, CONTEXT)


def test_a_longer_or_shorter_graph_than_before_is_another() -> None:
    for nodes in (BLOCK - 3, BLOCK, 2 * BLOCK - 3):
        gm = graph(nodes)
        was = Snapshot(gm)
        assert was.differences() == []
        output = gm.graph.output_node()
        with gm.graph.inserting_after(output):
            added = gm.graph.call_function(aten.abs.default, (output.args[0][0],))  # type: ignore[index]
        assert was.differences() == [f"node {added.name} (aten.abs.default) was inserted"]
        gm.graph.erase_node(added)
        gm.graph.erase_node(output)
        assert was.differences() == ["node output was removed"]
