"""Per-node lowering: the pass that hands a node to the policy, and the object that it is handed to."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import fx
from torch._ops import OpOverload

from . import torch_names
from .devices import has_complex, node_device
from .faults import FALLBACK, PolicyError
from .model import OperatorPolicy


class NodeLowering:
    """A node's target that Inductor calls instead of looking in its table (``GraphLowering.call_function``).

    Outside lowering it is the operator itself: torch runs sub-graphs again over fake tensors after the pass.
    """

    _inductor_lowering_function = True

    def __init__(self, policy: OperatorPolicy, op: OpOverload) -> None:
        self._op, self._function = op, policy.lowerings[op]
        self._inductor_lowering_output_metadata_fn = op  # torch 2.14+ asks it for the node's fake output
        self._schema = op._schema
        self.__name__ = self.__qualname__ = f"{policy.name}.{op}"

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        node = torch_names.node_being_lowered()
        if node is None:
            return self._op(*args, **kwargs)
        if self._function is FALLBACK:
            return torch_names.lower_as_fallback(self._op, node, args, kwargs)
        out = torch_names.lower_with(self._op, self._function, node, args, kwargs)  # type: ignore[arg-type]
        faults = list(torch_names.result_faults(out, node.meta.get("val")))
        if faults:
            raise PolicyError(f"{self.__name__}: the lowering does not give what the operator gives:", faults)
        return out

    def __repr__(self) -> str:
        return self.__name__


def retarget(graph: fx.Graph, policy: OperatorPolicy, wanted: Callable[[fx.Node], bool] | None = None) -> int:
    """Hand every ``wanted`` node on the policy's device that it has a lowering for to the policy; returns how many.

    A node whose outputs are on more than one device, or that has a complex tensor, stays torch's.
    """
    count = 0
    for node in graph.nodes:
        if (
            node.op == "call_function"
            and node.target in policy.lowerings
            and node_device(node) == policy.device_type
            and not has_complex(node)
            and (wanted is None or wanted(node))
        ):
            node.target = NodeLowering(policy, node.target)
            count += 1
    return count
