"""Three policies in three threads at once: ``python -m tests.policy_device.threads [ROUNDS]`` (50) prints JSON.

In each round every thread compiles a function of its own under the next policy, forward and lazy backward, and
checks the numbers. In every other round the threads wait for each other before backward, so that all three policies
are between their forward and their backward; else they run freely. Torch holds its ``compile_lock`` while it lowers
a graph (read in 2.11 to 2.15): compiles of several threads alternate graph by graph, and backwards compile in
autograd's thread. The compile caches are off, so that every compile is one; built kernels are kept.
"""

from __future__ import annotations

import functools
import json
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

CACHES_OFF = {"TORCHINDUCTOR_FX_GRAPH_CACHE": "0", "TORCHINDUCTOR_AUTOGRAD_CACHE": "0"}
"""Not a ``config.patch``: a backward that compiles in another thread does not see it."""


@dataclass(frozen=True, slots=True)
class Compiled:
    """One graph that Inductor compiled: in which thread, and which of the two it was."""

    thread: int
    backward: bool


@contextmanager
def noted() -> Iterator[list[Compiled]]:
    """Note every graph that Inductor compiles, in order."""
    from torch._inductor import compile_fx

    done: list[Compiled] = []
    original = compile_fx.compile_fx_inner

    @functools.wraps(original)
    def noting(*args: Any, **kwargs: Any) -> Any:
        made = original(*args, **kwargs)
        done.append(Compiled(threading.get_ident(), bool(kwargs.get("is_backward"))))
        return made

    compile_fx.compile_fx_inner = noting
    try:
        yield done
    finally:
        compile_fx.compile_fx_inner = original


def threads(rounds: int, call: Callable[[str, str, Callable[[], Any]], list[str]]) -> list[str]:
    """``call(policy, name of the function, what to do between forward and backward)`` in three threads; the faults."""
    bad: list[str] = []
    line = threading.Barrier(3)
    longest = 60 + 10 * rounds

    def meet() -> None:
        line.wait(120)

    def run(which: int) -> None:
        try:
            for number in range(rounds):
                policy = "ABC"[(which + number) % 3]
                between = (lambda: None) if number % 2 else meet
                meet()
                wrong = call(policy, f"mixed_{which}_{number}", between)
                bad.extend(f"round {number} {policy}: {one}" for one in wrong)
        except Exception:
            bad.append(traceback.format_exc()[-2000:])
            line.abort()

    running = [threading.Thread(target=run, args=(which,), daemon=True) for which in range(3)]
    for one in running:
        one.start()
    for one in running:
        one.join(longest)
    if any(one.is_alive() for one in running):
        bad.append(f"not finished after {longest} seconds")
    return bad


def main() -> None:
    import torch

    from benchmarks.policy_case import backend, wrong
    from benchmarks.policy_graph import Tables, copy_of, install, mixed

    from . import NAME

    torch.set_num_threads(1)
    install(NAME)
    rounds = int(sys.argv[1]) if len(sys.argv) > 1 else 50
    tables, start = Tables(), time.perf_counter()

    def call(policy: str, name: str, between: Callable[[], Any]) -> list[str]:
        compiled = torch.compile(copy_of(mixed, name), backend=backend(policy, NAME), fullgraph=True)

        def forward(*args: torch.Tensor) -> Any:
            out = compiled(*args)
            between()
            return out

        return wrong(forward, policy, NAME)

    with noted() as done:
        bad = threads(rounds, call)
    pairs = list(zip(done, done[1:], strict=False))
    alternating = sum(not a.backward and not b.backward and a.thread != b.thread for a, b in pairs)
    found = {
        "rounds": rounds, "graphs": len(done), "backward": sum(one.backward for one in done),
        "threads": len({one.thread for one in done}), "begun_before_anothers_backward": alternating,
        "bad": bad + [f"table changed: {name}" for name in tables.changed()],
        "torch": torch.__version__, "seconds": round(time.perf_counter() - start, 1),
    }  # fmt: skip
    print(json.dumps(found), flush=True)
    os._exit(1 if found["bad"] else 0)


if __name__ == "__main__":
    if any(os.environ.get(name) != value for name, value in CACHES_OFF.items()):  # before torch reads them
        command = [sys.executable, "-m", "tests.policy_device.threads", *sys.argv[1:]]
        os.execve(sys.executable, command, {**os.environ, **CACHES_OFF})
    main()
