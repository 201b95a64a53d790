"""Which nodes will the partitioner make one?"""

from __future__ import annotations

import inspect

import torch._functorch.config as functorch_config
import torch._inductor.config as inductor_config
from torch import fx
from torch.utils import _pytree as pytree


def removes_common_subexpressions(*, inductor: bool) -> bool:
    """Whether the partitioner that is about to run makes equal nodes one.

    Torch's min-cut partitioner does (``torch._functorch.config.cse``), no other function of torch's. With
    ``inductor``, a ``custom_partitioner_fn`` stands in its place, and what that does is not known.
    """
    replaced = inductor and inductor_config.custom_partitioner_fn is not None
    return not replaced and bool(getattr(functorch_config, "cse", True))


def without_common_subexpressions(graph: fx.Graph) -> fx.Graph:
    """The copy of a graph that the partitioner goes on with. Marks mutation regions in ``graph``, as it will itself.

    From torch 2.14 on it merges no value that only forward needs with one that backward needs (``partition_key`` in
    torch/_functorch/partitioners.py, read in torch 2.14.1 and 2.15.0; torch 2.11 to 2.13 have no such key).
    """
    from torch._functorch.compile_utils import fx_graph_cse

    if "extra_node_key" not in inspect.signature(fx_graph_cse).parameters:
        return fx_graph_cse(graph)
    return fx_graph_cse(graph, extra_node_key=_needed_by_backward(graph).__contains__)  # type: ignore[call-arg]


def _needed_by_backward(graph: fx.Graph) -> set[fx.Node]:
    """Everything that gradients are computed from; they come last among the outputs, as their ``desc`` says."""
    (output,) = graph.find_nodes(op="output")
    said = pytree.arg_tree_leaves(output.meta.get("desc", ()))
    first = next((i for i, one in enumerate(said) if one is not None and one.is_grad()), None)
    needed: set[fx.Node] = set()
    left = [] if first is None else pytree.arg_tree_leaves(*output.args)[first:]
    while left:
        node = left.pop()
        if isinstance(node, fx.Node) and node not in needed:
            needed.add(node)
            left += node.all_input_nodes
    return needed
