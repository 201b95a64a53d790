"""What do nodes carry for torch, and what does torch carry while it traces? Annotations, marks, symbolic numbers."""

from __future__ import annotations

import operator
from collections.abc import Mapping
from typing import Any

import torch
import torch._functorch.config as functorch_config
import torch._inductor.config as inductor_config
from torch import fx
from torch.utils.checkpoint import CheckpointPolicy


def is_symbolic(value: object) -> bool:
    """Whether an argument is a symbolic number, which cannot be hashed."""
    return isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool))


def custom_value(node: fx.Node, key: str) -> Any:
    """A producer's own annotation on a node, None when there is none."""
    custom = node.meta.get("custom")
    return custom.get(key) if isinstance(custom, Mapping) else None


_RECOMPUTED = (CheckpointPolicy.MUST_RECOMPUTE, CheckpointPolicy.PREFER_RECOMPUTE)


def mark_recompute(node: fx.Node, region: int) -> None:
    """Have the partitioner compute ``node`` again in backward; ``region`` orders checkpoint regions."""
    node.meta["recompute"] = CheckpointPolicy.MUST_RECOMPUTE
    node.meta["ac_graph_id"] = region


def mark_save(node: fx.Node) -> None:
    """Have the partitioner save what ``node`` returns, a tuple's items one by one, and not compute it again."""
    for one in (node, *(user for user in node.users if user.target is operator.getitem)):
        one.meta["recompute"] = CheckpointPolicy.MUST_SAVE


def misplaced_random_ops(gm: fx.GraphModule) -> list[fx.Node]:
    """Random operators to be recomputed from a saved generator state, in a graph that takes opaque objects.

    As ``functionalize_rng_ops`` in torch/_functorch/partitioners.py finds them. An accelerator's generator is
    threaded through as an input instead, unless configuration forbids that or there are several devices.
    """
    if not any(_is_opaque(node.meta.get("val")) for node in gm.graph.find_nodes(op="placeholder")):
        return []
    found = [
        node
        for node in gm.graph.nodes
        if node.meta.get("recompute") in _RECOMPUTED
        and torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ())
    ]
    accelerators = {device for node in found if (device := _device(node)).type != "cpu"}
    threaded = functorch_config.graphsafe_rng_functionalization and not inductor_config.fallback_random
    if threaded and len(accelerators) <= 1:
        return [node for node in found if _device(node).type == "cpu"]
    return found


def _is_opaque(value: Any) -> bool:
    from torch._library.fake_class_registry import FakeScriptObject
    from torch._library.opaque_object import is_opaque_value

    return isinstance(value, (FakeScriptObject, torch.ScriptObject)) or is_opaque_value(value)


def _device(node: fx.Node) -> torch.device:
    value = node.meta.get("val")
    values = value if isinstance(value, (tuple, list)) else (value,)
    devices = [one.device for one in values if isinstance(one, torch.Tensor)]
    return next((device for device in devices if device.type != "cpu"), torch.device("cpu"))


def traced_now() -> tuple[Mapping[str, Any], int | None, fx.Graph | None]:
    """What is being traced: the annotations in force, the sequence number of the gradient in hand, the graph.

    The number is None in forward (torch/fx/traceback.py, ``current_meta``).
    """
    from torch.fx.experimental.proxy_tensor import get_proxy_mode
    from torch.fx.traceback import current_meta

    mode = get_proxy_mode()
    graph = None if mode is None else mode.tracer.graph
    numbers = current_meta.get("grad_fn_seq_nr") if current_meta.get("in_grad_fn", 0) > 0 else None
    return current_meta.get("custom") or {}, numbers[-1] if numbers else None, graph
