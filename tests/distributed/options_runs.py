"""What runs on each rank for the table of options: eager FSDP2 and captured, ten steps, compared bit for bit."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

import collective_identity as ci
import fsdp_hooks
import inductor_passes  # noqa: F401  (makes the backend known)
from tests.distributed.options_cases import WIDTH, Row, rows, same_run

STEPS = 10


def train(model: nn.Module, call: Callable[[torch.Tensor], torch.Tensor], row: Row, rank: int) -> list[float]:
    optimizer = row.optimizer(model.parameters(), lr=1e-2)
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0, growth_interval=3) if "scaler" in row.extra else None
    average = {name: value.detach().clone() for name, value in model.named_parameters()}
    seen = []
    for step in range(STEPS):
        for micro in range(row.micro_batches):
            row.before(model, step, micro)
            batch = 4 if "shapes" not in row.extra or step % 2 else 3
            data = torch.Generator().manual_seed(1000 * step + 10 * micro + data_rank(rank, model))
            x = torch.randn(batch, WIDTH, generator=data)
            if "no_grad" in row.extra:
                with torch.no_grad():
                    seen.append(call(x).float().sum().item())
            loss = call(x).float().square().mean()
            (loss if scaler is None else scaler.scale(loss)).backward()
            seen.append(loss.item())
        if "clip" in row.extra:
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        if scaler is None:
            optimizer.step()
        else:
            scaler.step(optimizer)
            scaler.update()
        optimizer.zero_grad()
        if "ema" in row.extra:
            with torch.no_grad():
                for name, value in model.named_parameters():
                    average[name].lerp_(value, 0.1)
    if "ema" in row.extra:
        seen += [value.full_tensor().sum().item() for value in average.values()]
    return seen


def data_rank(rank: int, model: nn.Module) -> int:
    """Ranks of one tensor-parallel group read the same data."""
    for parameter in model.parameters():
        mesh = getattr(parameter, "device_mesh", None)
        if mesh is not None and "tp" in (mesh.mesh_dim_names or ()):
            return mesh.get_local_rank("dp")
    return rank


def state(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: getattr(value, "_local_tensor", value).clone() for name, value in model.state_dict().items()}


def equal(row: Row, rank: int) -> dict[str, Any]:
    torch._dynamo.reset()
    eager = (row.eager or row.build)()
    wanted = train(eager, eager, row, rank)
    with ci.enable():
        model = fsdp_hooks.install(row.build())
        call = torch.compile(
            model, backend="collective_identity", fullgraph=row.fullgraph, options={"inner": "aot_eager"}
        )
        found = train(model, call, row, rank)
        report = ci.report().to_dict()
    one, other = state(eager), state(model)
    moved = state(row.build())
    collectives = report["collectives"]
    return {
        "loss": max(abs(a - b) for a, b in zip(wanted, found, strict=True)),
        "param": max(((one[k] - other[k]).abs().max().item() for k in one if one[k].numel()), default=0.0),
        "trained": any(not torch.equal(one[k], moved[k]) for k in one),
        "failures": report["failures"],
        "counts": report["counts"],
        "captured": collectives["captured"],
        "expected": collectives["expected"],
    }


def refusal(row: Row) -> dict[str, Any]:
    message, model = "", None
    assert row.refuse is not None
    try:
        model = row.build()
        model = fsdp_hooks.install(model)
        row.refuse(model)
    except fsdp_hooks.UnsupportedOption as error:
        message = str(error)
    if (session := ci.session.current()) is not None:
        session.close()
    return {"message": message}


def run(rank: int, ranks: int, only: tuple[str, ...] = ()) -> dict[str, Any]:
    """Every row of this many ranks: `{option: what was seen}`."""
    warnings.simplefilter("ignore")
    results: dict[str, Any] = {}
    done: dict[Row, dict[str, Any]] = {}
    for row in rows(ranks):
        if only and row.option not in only:
            continue
        key = same_run(row)
        if key not in done:
            done[key] = equal(row, rank) if row.refuse is None else refusal(row)
        results[row.option] = done[key]
    return results
