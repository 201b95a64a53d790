"""A CUDA graph's rules on the CPU: recording runs nothing, and a replay runs the same operators on the same memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode


class _Log(TorchDispatchMode):
    """Operators with their arguments and results; what they wrote to, as it was."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, tuple[Any, ...], dict[str, Any], Any]] = []
        self.written: list[tuple[torch.Tensor, torch.Tensor]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if any(issubclass(one, DTensor) for one in types):
            return NotImplemented
        if func in (torch.ops.aten._local_scalar_dense.default, torch.ops.aten.is_nonzero.default):
            raise RuntimeError("operation not permitted when stream is capturing")
        if torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE) is not None:
            return func(*args, **kwargs)  # DTensor works a shape out: nothing of the step
        for place, argument in enumerate(func._schema.arguments):
            if argument.alias_info is not None and argument.alias_info.is_write:
                given = args[place] if place < len(args) else kwargs.get(argument.name)
                for one in pytree.tree_leaves(given):
                    if isinstance(one, torch.Tensor):
                        self.written.append((one, one.detach().clone()))
        result = func(*args, **kwargs)
        self.calls.append((func, args, kwargs, result))
        return result


class Replayer:
    """A recorder that logs operators instead of launches."""

    def plainly(self, run: Callable[[], Any]) -> Any:
        return run()

    def record(self, run: Callable[[], Any]) -> tuple[Any, Callable[[], object]]:
        state = torch.get_rng_state()
        log = _Log()
        try:
            with log:
                returned = run()
        finally:
            torch.set_rng_state(state)
            with torch.no_grad():
                for tensor, was in reversed(log.written):
                    tensor.detach().copy_(was)

        def replay() -> None:
            with torch.no_grad():
                for func, args, kwargs, result in log.calls:
                    for old, new in zip(
                        pytree.tree_leaves(result), pytree.tree_leaves(func(*args, **kwargs)), strict=True
                    ):
                        if isinstance(old, torch.Tensor) and old.numel() and old.data_ptr() != new.data_ptr():
                            old.detach().copy_(new)

        return returned, replay
