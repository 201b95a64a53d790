"""Operator policies: what they cost, and the proof that they isolate and are in both cache keys.

``python -m benchmarks policy`` measures compiles and calls, torch against a policy that asks for what torch does.
``python -m benchmarks policy --prove`` starts a fresh process per row of its table, all on one cache folder.
``--device cuda`` takes a real accelerator instead of the test device on host memory.
"""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from statistics import median
from typing import Any

import torch
from torch import fx

from inductor_passes.device_policy import backend as policy_backend

from .measure import Stopwatch, parser, show
from .policy_case import backend, wrong
from .policy_graph import Tables, copy_of, inputs, install, mixed
from .policy_proof import prove

VARIANTS = ("torch", "plain", "again", "policy")
"""``torch``: backend "inductor". ``plain``: a function that calls Inductor, as a policy's backend is one, and
``again`` the same: how much the two differ is what the measurement cannot see."""

CACHES_OFF = {"TORCHINDUCTOR_FX_GRAPH_CACHE": "0", "TORCHINDUCTOR_AUTOGRAD_CACHE": "0"}
"""Not a ``config.patch``, which a backward that compiles in another thread does not see."""

Times = dict[str, list[float]]


def main() -> int:
    options = parser(__doc__ or "")
    options.add_argument("--prove", action="store_true", help="print the isolation and cache proof as a table")
    options.add_argument("--processes", type=int, default=1, help="rows of the proof to run at once (default 1)")
    options.add_argument("--device", default="polydev", help="polydev (built here, needs a C++ compiler) or cuda")
    options.add_argument("--rounds", type=int, default=15, help="rounds of compiles to measure (default 15)")
    options.add_argument("--seconds", type=float, default=100, help="start no round after so many (default 100)")
    given = options.parse_args()
    if given.prove:
        return prove(given.device, as_json=given.json, processes=given.processes)
    if any(os.environ.get(name) != value for name, value in CACHES_OFF.items()):
        again = [sys.executable, "-m", "benchmarks", "policy", *sys.argv[1:]]
        return subprocess.run(again, env={**os.environ, **CACHES_OFF}).returncode
    torch.set_num_threads(1)
    return measure(given.device, given.rounds, given.seconds, as_json=given.json)


def measure(device: str, rounds: int, seconds: float, *, as_json: bool) -> int:
    """Compile in turns and call in turns; medians of the rounds' ratios, beside those of torch against itself.

    ``own_ms``: processor time inside the policy's code in one compile, measured there, which noise hardly reaches.
    """
    install(device)
    same = kernels(device, "none") == kernels(device, "torch's")
    tables = Tables()
    backends = {"torch": "inductor", "plain": plain, "again": plain, "policy": backend("torch's", device)}
    cold: Times = {variant: [] for variant in VARIANTS}
    calls: Times = {variant: [] for variant in VARIANTS}
    started = time.perf_counter()
    with Stopwatch().attached(policy_backend, "scope", "retarget") as own:
        for number in range(rounds + 1):
            if number > 3 and time.perf_counter() - started > seconds:
                break
            compiled = compile_round(device, number, backends, cold)
            call_round(device, compiled, calls)
    own_seconds = own.seconds / len(cold["policy"])
    for kind in (cold, calls):
        for taken in kind.values():
            del taken[0]  # the round that warms up, in which kernels are built
    row = {
        "torch": torch.__version__, "device": device, "rounds": len(cold["torch"]), "same_kernels": same,
        "tables_changed": tables.changed(),
        **{f"{variant}_compile_ms": 1e3 * median(cold[variant]) for variant in VARIANTS},
        "own_ms": 1e3 * own_seconds, "own_percent": 100 * own_seconds / median(cold["plain"]),
        "overhead_percent": overhead(cold, "policy"), "noise_percent": overhead(cold, "again"),
        "overhead_of_least_percent": 100 * (min(cold["policy"]) / min(cold["plain"]) - 1),
        **{f"{variant}_call_us": median(calls[variant]) for variant in VARIANTS},
        "call_overhead_percent": overhead(calls, "policy"), "call_noise_percent": overhead(calls, "again"),
        "ratio": median(cold["plain"]) / median(cold["policy"]),
    }  # fmt: skip
    show(row, as_json=as_json)
    return 0 if same and not row["tables_changed"] else 1


def plain(gm: fx.GraphModule, inputs: Sequence[Any]) -> Any:
    """Inductor with nothing of ours, reached as a policy's backend is."""
    from torch._inductor.compile_fx import compile_fx

    return compile_fx(gm, inputs)


def kernels(device: str, name: str) -> list[str]:
    """The code that Inductor writes for the graph, without comments."""
    from torch._inductor.utils import run_and_get_code

    torch._dynamo.reset()
    _, code = run_and_get_code(lambda: wrong(torch.compile(mixed, backend=backend(name, device)), name, device))
    return [line for one in code for line in one.splitlines() if line.strip() and not line.lstrip().startswith("#")]


def compile_round(device: str, number: int, backends: dict[str, Any], cold: Times) -> dict[str, Callable[..., Any]]:
    """Each variant once, in an order that turns: processor seconds from nothing to the end of the first backward."""
    torch._dynamo.reset()
    turn = number % len(VARIANTS)
    compiled = {}
    for variant in VARIANTS[turn:] + VARIANTS[:turn]:
        function = copy_of(mixed, f"mixed_{number}_{variant}")
        gc.collect()
        start = time.process_time()
        compiled[variant] = torch.compile(function, backend=backends[variant], fullgraph=True)
        wrong(compiled[variant], "none", device)
        cold[variant].append(time.process_time() - start)
    return compiled


def call_round(device: str, compiled: dict[str, Callable[..., Any]], calls: Times) -> None:
    """Blocks of calls in turns: microseconds of a call in each variant's quickest block."""
    x, y, w = inputs(device)
    best = dict.fromkeys(compiled, float("inf"))
    for _ in range(10):
        for variant, call in compiled.items():
            start = time.process_time()
            for _ in range(100):
                call(x, y, w)
            best[variant] = min(best[variant], (time.process_time() - start) * 1e4)
    for variant, us in best.items():
        calls[variant].append(us)


def overhead(times: Times, variant: str) -> float:
    """Median over rounds of how much longer a variant took than Inductor called plainly, in percent."""
    return 100 * median(one / stock - 1 for one, stock in zip(times[variant], times["plain"], strict=True))
