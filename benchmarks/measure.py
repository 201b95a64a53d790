"""How a benchmark measures and prints: processor seconds of this process, JSON lines or text."""

from __future__ import annotations

import argparse
import gc
import json
import resource
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any, TypeVar

from torch import fx

from collective_identity import start_nodes

T = TypeVar("T")

AT_MOST, LARGE = 12, 10_000
"""Times the seconds for ten times the collectives, from graphs that large on; smaller ones are too quick to tell."""


def best_of(times: int, run: Callable[[], T]) -> tuple[float, T]:
    """The least processor seconds of several runs, which other processes hardly change, and the last result."""
    seconds, result = [], None
    for _ in range(times):
        start = time.process_time()
        result = run()
        seconds.append(time.process_time() - start)
    return min(seconds), result  # type: ignore[return-value]


def lines_of(run: Callable[[], object]) -> int:
    """How many lines of Python a call executes, in every module: the same on any machine, whatever it does besides."""
    count = 0

    def traced(frame: FrameType, event: str, arg: object) -> Any:
        nonlocal count
        count += event == "line"
        return traced

    before = sys.gettrace()
    sys.settrace(traced)
    try:
        run()
    finally:
        sys.settrace(before)
    return count


def on_fresh_graphs(
    make: Callable[[], fx.GraphModule], run: Callable[[fx.GraphModule], object], *, times: int, left: int
) -> dict[str, Any]:
    """Rewrite a fresh graph each time: the least seconds, and the growth of the peak in the first run.

    ``left`` collectives are expected afterwards, or the figures mean nothing.
    """
    seconds: list[float] = []
    extra = 0.0
    for number in range(times):
        gm = make()
        gc.collect()
        before = peak_mb()
        seconds.append(best_of(1, lambda gm=gm: run(gm))[0])  # type: ignore[misc]
        if number == 0:
            extra, found = peak_mb() - before, len(start_nodes(gm))
            assert found == left, f"expected {left} collectives afterwards, found {found}"
    return {"seconds": min(seconds), "extra_mb": extra}


def growing(large: int, run: Callable[[int], dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Rows of ``run`` at a hundredth, a tenth and the whole of ``large``, with the growth of their seconds."""
    before = None
    for count in (large // 100, large // 10, large):
        row = run(count)
        growth = {} if before is None else {"times_the_seconds_for_10_times_the_graph": row["seconds"] / before}
        before = row["seconds"]
        yield {**row, **growth}


def too_fast(rows: Iterable[dict[str, Any]], at_least: int = LARGE) -> list[str]:
    """What is wrong with the growth of `growing`'s rows from so many collectives on; if anything, a benchmark fails."""
    growth = "times_the_seconds_for_10_times_the_graph"
    return [
        f"{row['what']}: {row['collectives']} collectives took {row[growth]:.1f} times a tenth's seconds, at most "
        f"{AT_MOST} expected"
        for row in rows
        if row.get(growth, 0) > AT_MOST and row["collectives"] >= 0.99 * at_least
    ]


def peak_mb() -> float:
    """The most memory this process ever had, in MB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1000


@contextmanager
def one_process(ranks: int) -> Iterator[str]:
    """A pretended world of so many ranks in one process; its group's name."""
    import torch.distributed as dist
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=ranks)
    try:
        yield dist.group.WORLD.group_name  # type: ignore[union-attr]
    finally:
        dist.destroy_process_group()


class Stopwatch:
    """Processor seconds of the calling thread inside some functions while it is attached to them; what they call counts
    once."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self._inside = False

    @contextmanager
    def attached(self, owner: Any, *names: str) -> Iterator[Stopwatch]:
        """Time calls of ``owner.NAME``; results that are iterators are read to their end inside."""
        originals = {name: getattr(owner, name) for name in names}
        for name, original in originals.items():
            setattr(owner, name, self._timed(original))
        try:
            yield self
        finally:
            for name, original in originals.items():
                setattr(owner, name, original)

    def _timed(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any, **kwargs: Any) -> Any:
            if self._inside:
                return original(*args, **kwargs)
            self._inside, start = True, time.thread_time()
            try:
                result = original(*args, **kwargs)
                return list(result) if isinstance(result, Iterator) else result
            finally:
                self.seconds += time.thread_time() - start
                self._inside = False

        return timed


def parser(description: str) -> argparse.ArgumentParser:
    """A parser with the options that every benchmark has."""
    made = argparse.ArgumentParser(description=description)
    made.add_argument("--json", action="store_true", help="JSON lines; the last has `ratio` = torch's seconds / ours")
    return made


def show(row: dict[str, Any], *, as_json: bool) -> None:
    """One line: a JSON object, or name=value pairs."""
    shown = {key: float(f"{value:.4g}") if isinstance(value, float) else value for key, value in row.items()}
    print(json.dumps(shown) if as_json else "  ".join(f"{key}={value}" for key, value in shown.items()), flush=True)
