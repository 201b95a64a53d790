"""Copies of a captured module: ``copy.deepcopy`` makes another captured model, pickle is refused.

A captured class makes plain modules when it is called (a slice of a container is one), so what copies and unpickles
has to be told how to make an empty one of the class itself; and no import finds that class again.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import nn


@dataclass(frozen=True, slots=True)
class _Kind:
    """A captured class on its way into a copy."""

    captured: type[nn.Module]

    def __deepcopy__(self, memo: Any) -> _Kind:
        return self

    def __reduce__(self) -> Any:
        raise pickle.PicklingError(
            f"{self.captured.__name__} is captured by fsdp_hooks and cannot be pickled: save model.state_dict() (or "
            "use torch.distributed.checkpoint), or pickle the model after undo_data_parallel(model)"
        )


def _empty(kind: _Kind) -> nn.Module:
    made: nn.Module = object.__new__(kind.captured)
    return made


def reducing(base: type[nn.Module], check: Callable[[nn.Module], None]) -> Callable[..., Any]:
    """``__reduce_ex__`` of a class that captures ``base``; ``check`` refuses modules that cannot be copied."""

    def __reduce_ex__(self: nn.Module, protocol: Any) -> Any:
        check(self)
        parts = base.__reduce_ex__(self, protocol)
        if not isinstance(parts, tuple) or type(self) not in parts[1]:
            return parts  # the user's own way
        return (_empty, (_Kind(type(self)),), *parts[2:])

    return __reduce_ex__
