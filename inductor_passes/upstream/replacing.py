"""How does ``torch.compile`` come to call something else for ``compile_fx``? For the threads that ask for it."""

from __future__ import annotations

import functools
import inspect
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from .versions import UnsupportedTorch

_REPLACING = threading.Lock()


class _ByThread:
    """``compile_fx`` for the threads that replace it now; the original for every other."""

    def __init__(self, original: Callable[..., Any]) -> None:
        functools.update_wrapper(self, original)
        self.original, self.signature = original, inspect.signature(original)
        self.inside: dict[int, list[Callable[..., Any]]] = {}

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        by = self.inside.get(threading.get_ident())
        if not by:
            return self.original(*args, **kwargs)
        bound = self.signature.bind(*args, **kwargs)
        bound.apply_defaults()
        return by[-1](self.original, bound)


@contextmanager
def compile_fx_replaced(by: Callable[..., Any]) -> Iterator[None]:
    """Have ``torch.compile`` call ``by(original, arguments)`` for ``compile_fx`` in this thread, while entered.

    ``arguments`` is the bound call (``inspect.BoundArguments``). What ``compile_fx`` calls itself for nested work
    goes through ``by`` as well. Threads may overlap: the last one to leave puts ``compile_fx`` back.
    """
    from torch._inductor import compile_fx as module

    thread = threading.get_ident()
    with _REPLACING:
        now: Any = module.compile_fx
        replaced = now if isinstance(now, _ByThread) else _ByThread(now)
        if replaced is not now:
            expected = {"model_", "example_inputs_", "inner_compile", "config_patches", "decompositions"}
            if missing := sorted(expected - set(replaced.signature.parameters)):
                raise UnsupportedTorch(
                    f"lite mode's one-trace decomposition expects torch._inductor.compile_fx.compile_fx with "
                    f"{', '.join(missing)} (seen in torch 2.11 to 2.15), found {replaced.signature} in torch "
                    f"{torch.__version__}: use a released torch in that range, or undo what replaced the function"
                )
            module.compile_fx = replaced
        replaced.inside.setdefault(thread, []).append(by)
    try:
        yield
    finally:
        with _REPLACING:
            replaced.inside[thread].pop()
            if not replaced.inside[thread]:
                del replaced.inside[thread]
            if not replaced.inside and module.compile_fx is replaced:
                module.compile_fx = replaced.original
