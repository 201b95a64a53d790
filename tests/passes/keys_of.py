"""The keys of torch's two compile caches for one training step; imports nothing of ours.

``python -m tests.passes.keys_of ours|stock FOLDER`` prints them as JSON, in a process of its own.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._functorch.config as functorch_config
import torch._inductor.config as inductor_config
from torch import fx

C = torch.ops._c10d_functional
Keys = dict[str, str]
SAID: dict[str, Any] = {
    "version": 1,
    "role": "fsdp.param_unshard",
    "source": "explicit",
    "producer": "test",
    "params": ["w"],
}


@contextmanager
def keys_noted(folder: Path) -> Iterator[list[tuple[str, str]]]:
    """Note each key that is computed, by cache; both caches are on, and graphs run as they are, unlowered."""
    from torch._functorch._aot_autograd import autograd_cache
    from torch._inductor import codecache, compile_fx

    noted: list[tuple[str, str]] = []
    aot_key = autograd_cache.autograd_cache_key

    def note_aot_key(*args: Any, **kwargs: Any) -> Any:
        found = aot_key(*args, **kwargs)
        noted.append(("aot", found[0]))
        return found

    def inner(gm: fx.GraphModule, inputs: Sequence[Any], *_: Any, **kwargs: Any) -> Callable[..., Any]:
        from functorch.compile import make_boxed_func

        options = {name: value for name, value in kwargs.items() if name in ("is_backward", "is_inference")}
        key, _ = codecache.compiled_fx_graph_hash(gm, inputs, options, [])  # type: ignore[arg-type]
        noted.append(("backward" if kwargs.get("is_backward") else "forward", key))
        return make_boxed_func(gm.forward)

    patch = pytest.MonkeyPatch()
    patch.setattr(autograd_cache, "autograd_cache_key", note_aot_key)
    patch.setattr(compile_fx, "compile_fx_inner", inner)
    patch.setenv("TORCHINDUCTOR_CACHE_DIR", str(folder))
    try:
        with (
            functorch_config.patch(enable_autograd_cache=True),
            inductor_config.patch(fx_graph_cache=True),
        ):
            yield noted
    finally:
        patch.undo()


def stock(gm: fx.GraphModule, inputs: Sequence[Any]) -> Any:
    """Inductor without anything of ours."""
    from torch._inductor import compile_fx

    return compile_fx.compile_fx(gm, inputs, inner_compile=compile_fx.compile_fx_inner)  # type: ignore[arg-type]


def step(said: dict[str, Any] | None) -> Callable[..., torch.Tensor]:
    """One gather whose payload is ``said``, computed with in both directions."""

    def run(w: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        group = torch.distributed.group.WORLD.group_name  # type: ignore[union-attr]
        if said is None:
            full = C.wait_tensor(C.all_gather_into_tensor(w, 4, group))
        else:
            with fx.traceback.annotate({"distributed.comm_semantics": said}):
                full = C.wait_tensor(C.all_gather_into_tensor(w, 4, group))
        return (x @ full.T).sin().sum()

    return run


def keys(backend: Any, folder: Path, said: dict[str, Any] | None, **options: Any) -> Keys:
    """The keys of one training step by cache."""
    torch._dynamo.reset()
    call = torch.compile(step(said), backend=backend, fullgraph=True, options=options or None)
    with keys_noted(folder) as noted:
        call(torch.ones(4, 8), torch.ones(3, 8, requires_grad=True)).backward()
    found = dict(noted)
    assert len(found) == len(noted), f"computed once each: {noted}"
    assert set(found) >= {"forward", "backward"} and len({*found.values()}) == len(found)
    return found


def main(which: str, folder: str) -> None:
    from torch.testing._internal.distributed.fake_pg import FakeStore

    torch.set_num_threads(1)
    torch.distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=4)
    if which == "stock":
        found = keys(stock, Path(folder), None)
        ours = {"collective_identity", "fsdp_hooks", "inductor_passes"}
        assert not ours.intersection(sys.modules), "a process without us has imported us"
    else:
        import collective_identity as ci
        from inductor_passes.backend import collective_identity

        with ci.enable(agreement_timeout=0):
            found = keys(collective_identity, Path(folder), SAID)
    print(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
