"""Private names of torch that activation checkpoints need, in one place. Nothing here changes torch.

Read in torch 2.11.0, 2.12.0, 2.13.0, 2.14.1 and 2.15.0: torch/utils/checkpoint.py, torch/utils/_python_dispatch.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack, _pop_mode, _push_mode
from torch.utils.checkpoint import _CachedTorchDispatchMode, _CachingTorchDispatchMode

_SELECTING = _CachedTorchDispatchMode, _CachingTorchDispatchMode


def recomputing() -> bool:
    """True in an activation checkpoint's second forward, outside any compile; not in a hook that backward calls.

    Both run under autograd's engine, a hook without gradients. A checkpoint's own saved-tensor hook tells the rest.
    """
    if torch.compiler.is_compiling() or torch._C._current_graph_task_id() == -1:
        return False
    if torch.is_grad_enabled():
        return True
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)
    return hooks is not None and "_recomputation_hook" in getattr(hooks[0], "__qualname__", "")


@contextmanager
def outside_selection() -> Iterator[None]:
    """Keeps what runs inside from a selective checkpoint, which looks up every operator it did not see in forward.

    Its dispatch modes alone are left: a trace around it goes on.
    """
    modes = _get_current_dispatch_mode_stack()
    first = next((at for at, mode in enumerate(modes) if isinstance(mode, _SELECTING)), len(modes))
    for _ in modes[first:]:
        _pop_mode()
    kept = [mode for mode in modes[first:] if not isinstance(mode, _SELECTING)]
    for mode in kept:
        _push_mode(mode)
    try:
        yield
    finally:
        for _ in kept:
            _pop_mode()
        for mode in modes[first:]:
            _push_mode(mode)
