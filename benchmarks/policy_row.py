"""One row of the proof: one compile in this process. ``python -m benchmarks.policy_row NAME DEVICE`` prints JSON.

``torch`` is torch alone, nothing of ours imported; ``none`` is torch's backend with ours imported; ``idle`` the same
while a policy is registered for a device that the graph does not use; ``A``, ``B``, ... a policy of ``policy_case``;
``A, helper`` policy A after a change of what it reaches.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch._dynamo.utils import counters

from .policy_graph import Tables, differences, install, mixed

OURS = ("collective_identity", "fsdp_hooks", "inductor_passes")


@contextmanager
def keys_noted() -> Iterator[dict[str, list[str]]]:
    """Note each key that torch asks its two caches for."""
    from torch._functorch._aot_autograd import autograd_cache
    from torch._inductor import codecache

    found: dict[str, list[str]] = {"aot": [], "fx": []}

    def noting(cache: str, original: Callable[..., Any]) -> Callable[..., Any]:
        def noted(*args: Any, **kwargs: Any) -> Any:
            made = original(*args, **kwargs)
            found[cache].append(made[0])
            return made

        return noted

    places = ((autograd_cache, "autograd_cache_key", "aot"), (codecache, "compiled_fx_graph_hash", "fx"))
    originals = [getattr(module, name) for module, name, _ in places]
    for (module, name, cache), original in zip(places, originals, strict=True):
        setattr(module, name, noting(cache, original))
    try:
        yield found
    finally:
        for (module, name, _), original in zip(places, originals, strict=True):
            setattr(module, name, original)


def prepared(name: str, device: str) -> tuple[Any, Any, tuple[float, float | None]]:
    """The backend of a row, a context to run it in, and what it must make of relu and gelu."""
    if name == "torch":
        return "inductor", nullcontext(), (0, None)
    from inductor_passes.device_policy import register_policy

    from . import policy_case

    if name in ("none", "idle"):
        other = "xpu" if device == "cuda" else "cuda"
        made = policy_case.policy("A", other)
        assert made is not None
        return "inductor", register_policy(other, made) if name == "idle" else nullcontext(), (0, None)
    if ", " in name:
        policy_case.change(name.partition(", ")[2])
    return policy_case.backend(name, device), nullcontext(), policy_case.WANTED[name]


def row(name: str, device: str) -> dict[str, Any]:
    """Is it right, which caches hit, by which keys, did a table change."""
    install(device)
    backend, scope, wanted = prepared(name, device)
    tables = Tables()
    counters.clear()
    with scope, keys_noted() as keys:
        bad = differences(torch.compile(mixed, backend=backend, fullgraph=True), device, *wanted)
        changed = tables.changed()
    aot, fx = counters["aot_autograd"], counters["inductor"]
    imported = sorted(set(OURS) & sys.modules.keys())
    if name == "torch":
        bad += [f"{one} was imported" for one in imported]
    return {
        "policy": name,
        "right": not bad,
        "aot_hit": aot["autograd_cache_hit"], "aot_miss": aot["autograd_cache_miss"],
        "fx_hit": fx["fxgraph_cache_hit"], "fx_miss": fx["fxgraph_cache_miss"],
        "tables_changed": changed,
        "keys": {cache: sorted(found) for cache, found in keys.items()},
        "wrong": bad,
    }  # fmt: skip


if __name__ == "__main__":
    torch.set_num_threads(1)
    print(json.dumps(row(*sys.argv[1:])), flush=True)
    os._exit(0)
