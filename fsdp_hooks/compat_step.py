"""Private names of torch that whole-step graphs need, in one place. Nothing here changes torch.

Read in torch 2.11.0, 2.12.0, 2.13.0, 2.14.1 and 2.15.0: torch/fx/experimental/proxy_tensor.py,
torch/_dynamo/backends/registry.py, torch/optim/{optimizer,lr_scheduler}.py, torch/amp/grad_scaler.py,
torch/nn/modules/module.py, torch/distributed/distributed_c10d.py.
"""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any

import torch
from torch import fx, nn

from .step_fused import functionalizable


def traced(run: Any, inputs: list[torch.Tensor]) -> Any:
    """The FX graph of ``run`` on fake tensors like ``inputs``, autograd included, annotations kept.

    ``make_fx``, ``preserve_node_meta`` and one-threaded autograd, as torch/_functorch/aot_autograd.py puts them.
    Profiler ranges, which optimizers open around a step, are left out.
    """
    from torch.fx.experimental.proxy_tensor import make_fx
    from torch.fx.traceback import preserve_node_meta

    with preserve_node_meta(), torch.autograd.set_multithreading_enabled(False):
        gm = make_fx(run, tracing_mode="fake", _allow_non_fake_inputs=True)(*inputs)
    for node in reversed(list(gm.graph.nodes)):
        if getattr(node.target, "namespace", "") == "profiler" and not node.users:
            gm.graph.erase_node(node)
    gm.recompile()
    return gm


def last_traced_node() -> str:
    """Name of the node that the surrounding ``make_fx`` traced last."""
    from torch.fx.experimental.proxy_tensor import get_proxy_mode

    mode = get_proxy_mode()
    assert mode is not None
    return str(next(iter(reversed(mode.tracer.graph.nodes))).name)


def compiled(gm: fx.GraphModule, inputs: Sequence[torch.Tensor], backend: Any, extra: Mapping[str, Any]) -> Any:
    """Compile a traced graph with a ``torch.compile`` backend, without Dynamo in between.

    Its inputs are made fake with a ``ShapeEnv``, since the graph reads learning rates and step counts as numbers. The
    symbols that the trace gave to those belong to its own ``ShapeEnv`` and must not be bound again
    (``rebind_unbacked``, torch/fx/experimental/symbolic_shapes.py), so a copy without them is compiled.
    """
    from torch._dynamo.backends.registry import lookup_backend
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    told = gm.meta
    gm = fx.GraphModule(gm, copy.deepcopy(gm.graph))  # tensors that the graph reads by name stay the same ones
    gm.meta.update(told)
    for node in gm.graph.nodes:
        node.meta.pop("unbacked_bindings", None)
        node.target = functionalizable(node.target)
    gm.recompile()
    mode = FakeTensorMode(shape_env=ShapeEnv(), static_shapes=True, allow_non_fake_inputs=True)
    compiler = lookup_backend(backend) if isinstance(backend, str) else backend
    with torch.no_grad():
        return compiler(gm, [mode.from_tensor(one) for one in inputs], **extra)


def storage_of(tensor: torch.Tensor) -> int:
    """What tells whether ``tensor.data`` was given another storage."""
    return int(tensor.untyped_storage()._cdata)


def hooks_of(module: nn.Module) -> tuple[int, ...]:
    """Numbers of the hooks around a module's forward and backward, FSDP2's own among them, in the order they run."""
    return tuple(chain(*hook_dicts_of(module)))


def hook_dicts_of(module: nn.Module) -> tuple[Mapping[int, Any], ...]:
    """Those hooks by their numbers."""
    return module._forward_pre_hooks, module._forward_hooks, module._backward_pre_hooks, module._backward_hooks


def leaves_of(loss: torch.Tensor) -> list[torch.Tensor]:
    """The tensors into whose ``grad`` a backward from ``loss`` would accumulate."""
    found, seen, nodes = [], set(), [loss.grad_fn]
    while nodes:
        node = nodes.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if hasattr(node, "variable"):
            found.append(node.variable)
        nodes += [above for above, _ in node.next_functions]
    return found


def step_hooks_of(optimizer: torch.optim.Optimizer) -> tuple[int, ...]:
    """Numbers of the hooks around an optimizer's step, in the order they run."""
    return tuple(chain(*step_hook_dicts_of(optimizer)))


def step_hook_dicts_of(optimizer: torch.optim.Optimizer) -> tuple[Mapping[int, Any], ...]:
    """Those hooks by their numbers."""
    return optimizer._optimizer_step_pre_hooks, optimizer._optimizer_step_post_hooks


def global_hooks() -> tuple[int, ...]:
    """Numbers of the hooks around the forward and backward of all modules, and the steps of all optimizers."""
    from torch.nn.modules import module
    from torch.optim import optimizer

    return (
        *module._global_forward_pre_hooks, *module._global_forward_hooks, *module._global_backward_pre_hooks,
        *module._global_backward_hooks, *optimizer._global_optimizer_pre_hooks, *optimizer._global_optimizer_post_hooks,
    )  # fmt: skip


def foreach_by_default(params: list[torch.Tensor]) -> bool:
    """What an optimizer given neither ``foreach`` nor ``fused`` chooses for these parameters."""
    from torch.optim.optimizer import _default_to_fused_or_foreach

    return bool(_default_to_fused_or_foreach(params, False)[1])


def count_step(optimizer: torch.optim.Optimizer) -> None:
    """Tell a learning-rate scheduler, which wraps ``optimizer.step``, that a step was taken."""
    if hasattr(optimizer.step, "_wrapped_by_lr_sched"):
        optimizer._opt_called = True  # type: ignore[attr-defined]


def scales_itself(optimizer: torch.optim.Optimizer) -> bool:
    """Whether its step takes ``grad_scale`` and ``found_inf`` and skips in its kernel (``fused=True``)."""
    return bool(getattr(optimizer, "_step_supports_amp_scaling", False))


def scaler_tensors(scaler: Any) -> list[torch.Tensor]:
    """Scale and growth tracker of a ``GradScaler`` that scaled before."""
    return [scaler._scale, scaler._growth_tracker]


def scaler_like(scaler: Any, tensors: Sequence[torch.Tensor]) -> Any:
    """A ``GradScaler`` with the same settings on other ``tensors``, at the start of a step."""
    other = object.__new__(type(scaler))  # copy.copy would read the scale back
    other.__dict__.update(scaler.__dict__)
    other._scale, other._growth_tracker = tensors
    other._per_optimizer_states = defaultdict(scaler._per_optimizer_states.default_factory)
    return other


def scaler_looks(scaler: Any, optimizer: Any) -> None:
    """Record whether its gradients hold inf or NaN, without unscaling them, as for a fused optimizer."""
    scaler._check_inf_per_device(optimizer)


def scaler_found(scaler: Any, optimizer: Any) -> torch.Tensor:
    """What was recorded for ``optimizer``, summed over devices."""
    found = scaler._per_optimizer_states[id(optimizer)]["found_inf_per_device"].values()
    return torch.stack([one.to(scaler._scale.device) for one in found]).sum()


def version_of(tensor: torch.Tensor) -> int:
    """How often this rank's part of a tensor was written in place."""
    return int(getattr(tensor, "_local_tensor", tensor)._version)


def address_of(tensor: torch.Tensor) -> int:
    """Where this rank's part of a tensor lies: ``DTensor._local_tensor``, torch/distributed/tensor/_api.py."""
    return int(getattr(tensor, "_local_tensor", tensor).data_ptr())


def layout_of(tensor: torch.Tensor) -> tuple[Any, ...]:
    """Where this rank's part of a tensor lies, and how."""
    part = getattr(tensor, "_local_tensor", tensor)
    return (part.data_ptr(), part.shape, part.stride()) if part.layout is torch.strided else ()


def forget_flight_record() -> None:
    """Empty NCCL's flight recorder (``_reset_fr_recording_nccl``, torch/csrc/distributed/c10d/init.cpp)."""
    reset = getattr(torch._C._distributed_c10d, "_reset_fr_recording_nccl", None)
    if reset is not None:
        reset()


def before_groups_end(ending: Any) -> None:
    """Have ``destroy_process_group()`` call ``ending.finalize()`` first, before any communicator goes.

    It does so with what ``_world.comms`` holds, in order, and forgets it then. Those of torchcomms are in it too.
    """
    from torch.distributed.distributed_c10d import _world

    if not any(one is ending for one in _world.comms):
        _world.comms.insert(0, ending)
