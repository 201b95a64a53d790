"""Ranks that install different models: each stops before anything runs, and says in what they differ."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard

import collective_identity as ci
import fsdp_hooks
import inductor_passes  # noqa: F401  (makes the backend known)
from tests.distributed.launch import launch

pytestmark = pytest.mark.distributed


def chain(widths: list[int], *, units: bool = True) -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(a, b) for a, b in zip(widths, widths[1:], strict=False)))
    for layer in model if units else ():
        fully_shard(layer)
    return fully_shard(model)


#: What rank 0 and rank 1 install, and the field in which their graphs differ.
MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[], nn.Module], str]] = {
    "one more layer": (lambda: chain([6, 6, 6]), lambda: chain([6, 6, 6, 6]), "collective"),
    "another width": (lambda: chain([6, 8, 6]), lambda: chain([6, 10, 6]), "numel"),
    "another dtype": (lambda: chain([6, 6, 6]), lambda: chain([6, 6, 6]).double(), "dtype"),
    "other units": (lambda: chain([6, 6, 6]), lambda: chain([6, 6, 6], units=False), "numel"),
}


def different(rank: int, ranks: int) -> dict[str, dict[str, Any]]:
    warnings.simplefilter("ignore")
    found = {}
    for name, made in MODELS.items():
        torch._dynamo.reset()
        start = time.monotonic()
        text = ""
        with ci.enable(agreement_timeout=30):
            model = fsdp_hooks.install(made[rank]())
            call = torch.compile(model, backend="collective_identity", options={"inner": "aot_eager"})
            try:
                call(torch.ones(2, 6, dtype=next(model.parameters()).dtype)).sum().backward()
            except Exception as error:
                text = f"{type(error).__name__}: {error}"
            report = ci.report().to_dict()
        found[name] = {"text": text, "seconds": time.monotonic() - start, "ok": report["ok"]}
    return found


def test_ranks_that_install_different_models_stop_and_say_in_what_they_differ() -> None:
    for rank, found in enumerate(launch(different, 2, timeout=120)):
        for name, (_, _, field) in MODELS.items():
            facts = found[name]
            assert facts["text"].startswith("RanksDisagree"), (name, facts)
            assert f"on rank {rank}" in facts["text"] and f"on rank {1 - rank}" in facts["text"], (name, facts)
            assert field in facts["text"], (name, facts)
            assert facts["seconds"] < 60 and facts["ok"] is False, (name, facts)
