"""How is a joint graph parted in lite mode? Every operator runs once, where the program runs it."""

from __future__ import annotations

import inspect
import operator
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch._functorch.config as functorch_config
from torch import fx
from torch._inductor.custom_graph_pass import CustomPartitionerFn
from torch.utils import _pytree as pytree

from .caches import source_hash
from .nodes import _RECOMPUTED

_PACKAGE = Path(__file__).parent.parent  # all of inductor_passes


class NonRecomputingPartitioner(CustomPartitionerFn):
    """Every operator runs where the program runs it, once: no min-cut, no common-subexpression elimination.

    Nodes that the user or a producer marked for recompute still are (torch/_functorch/partitioners.py,
    ``default_partition``, read in torch 2.11 to 2.15).
    """

    def __call__(self, gm: fx.GraphModule, joint_inputs: Sequence[object], **kwargs: Any) -> Any:
        from torch._functorch.partitioners import default_partition

        known = inspect.signature(default_partition).parameters
        _tag_forward(gm.graph, kwargs["num_fwd_outputs"])
        _draw_in_forward(gm.graph)
        with functorch_config.patch(cse=False):  # type: ignore[attr-defined]
            return default_partition(gm, joint_inputs, **{k: v for k, v in kwargs.items() if k in known})

    def uuid(self) -> Any | None:
        return f"collective_identity.inductor_passes.NonRecomputingPartitioner.{source_hash(_PACKAGE)}"


def _tag_forward(graph: fx.Graph, outputs: int) -> None:
    """Say where forward ends when no node says so; without, ``default_partition`` computes all again in backward.

    Torch's own ``selective_decompose`` traces the joint graph again and loses the tags of the first trace.
    """
    if any("partitioner_tag" in node.meta for node in graph.nodes):
        return
    needed, left = set[fx.Node](), list(pytree.arg_tree_leaves(*graph.output_node().args)[:outputs])
    while left:
        node = left.pop()
        if isinstance(node, fx.Node) and node not in needed:
            needed.add(node)
            left += node.all_input_nodes
    until: fx.Node | None = None
    of_backward = {node for node in graph.find_nodes(op="placeholder") if "tangents" in str(node.target)}
    for node in graph.nodes:
        if not of_backward.isdisjoint(node.all_input_nodes):
            break
        until = node if node in needed else until
    for node in graph.nodes if until is not None else ():
        if node.op in ("call_function", "get_attr"):
            node.meta["partitioner_tag"] = "is_forward"
        if node is until:
            break


def _draw_in_forward(graph: fx.Graph) -> None:
    """Have ``default_partition`` leave what forward draws out of backward.

    It copies into backward whatever needs no gradient, and removes no random operator from there, used or not: the
    generator would be further on in the next step. It also refuses one with several results of which none is used.
    """
    last = next((node for node in reversed(graph.nodes) if node.meta.get("partitioner_tag") == "is_forward"), None)
    for node in list(graph.nodes):
        if torch.Tag.nondeterministic_seeded not in getattr(node.target, "tags", ()):
            continue
        if node.meta.get("partitioner_tag") != "is_forward" or node.meta.get("recompute") in _RECOMPUTED:
            continue
        value = node.meta.get("val")
        if not node.users and isinstance(value, (tuple, list)):
            with graph.inserting_after(node):
                item = graph.call_function(operator.getitem, (node, 0))
            item.meta.update(node.meta, val=value[0])
            last = item if node is last else last
        # by the last node of forward, which has to keep its tag, torch tells where forward ends
        if all(user.op == "output" for user in node.users) or node is not last:
            node.meta["partitioner_tag"] = "must_be_in_forward"
