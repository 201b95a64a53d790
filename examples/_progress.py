"""A progress bar on stderr: on a terminal, where ``rich`` is installed, and nowhere else."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec


@contextmanager
def progress(title: str, steps: int, *, shown: bool) -> Iterator[Callable[[float], None]]:
    """Yield a function to call after each step with that step's loss."""
    if not (shown and sys.stderr.isatty() and find_spec("rich")):
        yield lambda loss: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, TextColumn("loss {task.fields[loss]}"), console=Console(stderr=True)) as bars:
        task = bars.add_task(title, total=steps, loss="-")

        def advance(loss: float) -> None:
            bars.update(task, advance=1, loss=f"{loss:.4f}")

        yield advance
