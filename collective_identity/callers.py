"""Which code did this? The Python stack as ``file:line function``, innermost first."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Final

_HERE: Final = str(Path(__file__).parent)
_FX: Final = ("torch/fx/graph.py", "torch/fx/node.py", "torch/fx/graph_module.py", "<string>")


def stack(*, until: str | None = None, limit: int = 16) -> tuple[str, ...]:
    """The frames that led here, innermost first, without those of this package and of FX's node bookkeeping.

    Args:
        until: name of the function of this package that called the code in question; its frame ends the stack.
        limit: frames at most.
    """
    found: list[str] = []
    for frame in _frames():
        code = frame.f_code
        if code.co_filename.startswith(_HERE):
            if code.co_name == until:
                break
            continue
        if not code.co_filename.endswith(_FX):
            found.append(f"{code.co_filename}:{frame.f_lineno} {getattr(code, 'co_qualname', code.co_name)}")
        if len(found) == limit:
            break
    return tuple(found)


def pass_name(folder: str, *, depth: int = 80) -> str | None:
    """``module.function`` of the outermost frame whose file lies in ``folder``; None when there is none.

    Args:
        folder: end of a folder's path, ``"torch/_inductor/fx_passes"``.
        depth: frames to look at, innermost first.
    """
    outermost = None
    for _, frame in zip(range(depth), _frames(), strict=False):
        path = Path(frame.f_code.co_filename)
        if path.parent.as_posix().endswith(folder) and path.stem != "post_grad":
            outermost = f"{path.stem}.{frame.f_code.co_name}"
    return outermost


def _frames() -> Iterator[FrameType]:
    frame: FrameType | None = sys._getframe(2)
    while frame is not None:
        yield frame
        frame = frame.f_back
