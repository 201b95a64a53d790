"""What runs on each rank: the same training with eager FSDP2 and captured, compared."""

from __future__ import annotations

import dataclasses
import logging
import tempfile
import time
import warnings
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.tensor import DTensor

import collective_identity as ci
import fsdp_hooks
import inductor_passes  # noqa: F401  (makes the backend known)
from tests.distributed import capture_cases
from tests.distributed.capture_cases import CLASSES, Case, Model


def train(model: nn.Module, call: Callable[[torch.Tensor], torch.Tensor], case: Case, rank: int) -> list[float]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for step in range(case.steps):
        optimizer.zero_grad()
        total = 0.0
        for micro in range(case.micro_batches):
            data = torch.Generator().manual_seed(1000 * step + 10 * micro + data_rank(rank, model))
            tokens = torch.randint(0, CLASSES, (4, 5), generator=data)
            logits = call(tokens).float()
            loss = F.cross_entropy(logits.flatten(0, 1), tokens.roll(-1, 1).flatten())
            loss.backward()
            total += loss.item()
        if case.clip is not None:
            torch.nn.utils.clip_grad_norm_(model.parameters(), case.clip)
        optimizer.step()
        losses.append(total)
    return losses


def data_rank(rank: int, model: nn.Module) -> int:
    """Ranks of one tensor-parallel group read the same data."""
    for parameter in model.parameters():
        if isinstance(parameter, DTensor) and "tp" in (parameter.device_mesh.mesh_dim_names or ()):
            return parameter.device_mesh.get_local_rank("dp")
    return rank


def prepared(case: Case) -> nn.Module:
    torch.manual_seed(0)
    model = case.build()
    case.shard(model)
    return model


def local_state(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: value._local_tensor.clone() for name, value in model.state_dict().items()}


def compare(rank: int, ranks: int, table: str, names: tuple[str, ...], options: Mapping[str, Any]) -> dict[str, Any]:
    """Eager FSDP2 against capture for each named case: `{name: {"loss": rel, "param": abs, "report": dict}}`."""
    warnings.simplefilter("ignore")
    results = {}
    for name in names:
        case: Case = getattr(capture_cases, table)[name]
        torch._dynamo.reset()
        eager = prepared(case)
        expected = train(eager, eager, case, rank)
        with ci.enable() as handle:
            model = fsdp_hooks.install(prepared(case))
            call = torch.compile(
                model, backend="collective_identity", fullgraph=True, options={**options, **case.options}
            )
            found = train(model, call, case, rank)
            report = ci.report().to_dict()
        del handle
        before, after = local_state(eager), local_state(model)
        results[name] = {
            "loss": max(abs(a - b) / abs(a) for a, b in zip(expected, found, strict=True)),
            "param": max((before[key] - after[key]).abs().max().item() for key in before if before[key].numel()),
            "report": report,
        }
    return results


def compiled(model: nn.Module, **options: Any) -> Callable[[torch.Tensor], torch.Tensor]:
    return torch.compile(
        model, backend="collective_identity", fullgraph=True, options={"inner": "aot_eager", **options}
    )


def state_facts(rank: int, ranks: int) -> dict[str, Any]:
    """What the user, the optimizer and DCP see of an installed model."""
    case = capture_cases.TWO_RANKS["uneven"]
    model = prepared(case)
    parameters = {name: id(parameter) for name, parameter in model.named_parameters()}
    keys = list(model.state_dict())
    classes = [type(module) for module in model.modules()]
    fsdp_hooks.install(model)
    facts: dict[str, Any] = {
        "same_parameters": parameters == {name: id(p) for name, p in model.named_parameters()},
        "same_keys": keys == list(model.state_dict()),
        "outside_forward_reads_the_shard": model.head.weight is model.head._parameters["weight"],
    }
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    call = compiled(model)
    tokens = torch.randint(0, CLASSES, (4, 5), generator=torch.Generator().manual_seed(rank))

    def step() -> None:
        optimizer.zero_grad()
        call(tokens).square().mean().backward()
        optimizer.step()

    step()
    facts["dtensor_gradients"] = all(isinstance(p.grad, DTensor) for p in model.parameters())
    facts["dtensor_optimizer_state"] = all(isinstance(s["exp_avg"], DTensor) for s in optimizer.state.values())

    folder = [tempfile.mkdtemp() if rank == 0 else ""]
    dist.broadcast_object_list(folder)
    model_state, optimizer_state = get_state_dict(model, optimizer)
    dcp.save({"model": model_state, "optimizer": optimizer_state}, checkpoint_id=folder[0])
    step()
    wanted = local_state(model)
    model_state, optimizer_state = get_state_dict(model, optimizer)
    loaded = {"model": model_state, "optimizer": optimizer_state}
    dcp.load(loaded, checkpoint_id=folder[0])
    set_state_dict(model, optimizer, model_state_dict=loaded["model"], optim_state_dict=loaded["optimizer"])
    step()
    facts["checkpoint_round_trip"] = max(
        (wanted[key] - value).abs().max().item() for key, value in local_state(model).items() if value.numel()
    )

    fsdp_hooks.uninstall(model)
    eager = prepared(case)
    eager.load_state_dict(model.state_dict())
    optimizer.zero_grad()
    for one in (model, eager):
        one(tokens).square().mean().backward()
    facts["eager_after_uninstall"] = max(
        (a.grad._local_tensor - b.grad._local_tensor).abs().max().item()
        for a, b in zip(model.parameters(), eager.parameters(), strict=True)
        if a.grad._local_tensor.numel()
    )
    facts["classes_restored"] = classes == [type(module) for module in model.modules()]
    return facts


def without_training(rank: int, ranks: int) -> dict[str, float]:
    """Largest output difference to eager FSDP2: under no_grad, in inference mode, after a step, and not compiled."""
    case = capture_cases.TWO_RANKS["uneven"]
    eager, model = prepared(case), fsdp_hooks.install(prepared(case))
    call = compiled(model)
    optimizers = [torch.optim.SGD(one.parameters(), lr=0.1) for one in (eager, model)]
    tokens = torch.randint(0, CLASSES, (4, 5), generator=torch.Generator().manual_seed(rank))

    def outputs() -> float:
        return (eager(tokens) - call(tokens)).abs().max().item()

    found = {}
    with torch.no_grad():
        found["no_grad"] = outputs()
    for one, optimizer in zip((eager, call), optimizers, strict=True):
        one(tokens).square().mean().backward()
        optimizer.step()
    with torch.inference_mode():
        found["inference_mode after a step"] = outputs()
        found["not compiled"] = (eager(tokens) - model(tokens)).abs().max().item()
    return found


def modes(rank: int, ranks: int) -> dict[str, Any]:
    """The same training optimized, unbucketed and observed."""
    case = capture_cases.TWO_RANKS["uneven"]
    results = {}
    for name, mode, options in (
        ("optimize", "optimize", {}),
        ("unbucketed", "optimize", {"bucketing": False}),
        ("observe", "observe", {}),
    ):
        torch._dynamo.reset()
        with ci.enable(mode=mode):
            model = fsdp_hooks.install(prepared(case))
            train(model, compiled(model, **options), case, rank)
            report = ci.report().to_dict()
        state = local_state(model)
        results[name] = {
            "params": {key: value.tolist() for key, value in state.items()},
            "before": report["collectives"]["before_bucketing"],
            "after": report["collectives"]["after_bucketing"],
            "changed": [p["name"] for graph in report["graphs"] for p in graph["passes"] if p["changed"]],
        }
    return results


def saved_parameters(rank: int, ranks: int) -> dict[str, list[str]]:
    """The parameters whose gathered value the forward graph hands to backward, with and without reshard marks."""
    case = capture_cases.TWO_RANKS["uneven"]
    found: dict[str, list[str]] = {}

    def gathered(node: torch.fx.Node) -> ci.Identity | None:
        """The identity of the gather whose value, at most rearranged, this node holds."""
        while ci.launch_of(node) is None and len(node.all_input_nodes) == 1:
            (node,) = node.all_input_nodes
        return ci.identity_of(node) if ci.launch_of(node) is not None else None

    for name, reshard in (("resharded", True), ("kept", False)):
        torch._dynamo.reset()
        saved: list[str] = []

        def look(gm: torch.fx.GraphModule, saved: list[str] = saved) -> None:
            (output,) = (node for node in gm.graph.nodes if node.op == "output")
            for identity in filter(None, map(gathered, output.all_input_nodes)):
                if identity.role == ci.PARAM_UNSHARD:
                    saved.extend(identity.params or ())

        with ci.enable():
            model = fsdp_hooks.install(prepared(case))
            tokens = torch.zeros(4, 5, dtype=torch.long)
            compiled(model, reshard=reshard, pre_passes=[look])(tokens).sum().backward()
        found[name] = sorted(saved)
    return found


def planted(rank: int, ranks: int) -> dict[str, Any]:
    """One payload of the forward is removed or falsified before our passes see it; by kind of fault."""
    case = capture_cases.TWO_RANKS["uneven"]
    eager = prepared(case)
    expected = train(eager, eager, case, rank)
    return {plant: _planted(rank, case, expected, plant) for plant in ("remove", "role", "group", "plausible")}


def _planted(rank: int, case: Case, expected: list[float], plant: str) -> dict[str, Any]:
    def fault(gm: torch.fx.GraphModule) -> None:
        first = ci.start_nodes(gm)[0]
        identity = ci.identity_of(first)
        if identity is None or identity.params != ("embed.weight",):
            return
        ci.clear(first)
        if plant == "role":
            ci.stamp(first, dataclasses.replace(identity, role=ci.GRAD_REDUCE_SHARD))
        elif plant == "group":
            ci.stamp(first, dataclasses.replace(identity, group="no_such_group"))
        elif plant == "plausible":
            ci.stamp(first, dataclasses.replace(identity, producer="someone_else"))

    warned: list[str] = []

    class Listen(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            warned.append(record.getMessage())

    torch._dynamo.reset()
    handler = Listen(level=logging.WARNING)
    logging.getLogger("collective_identity").addHandler(handler)
    with ci.enable():
        model = fsdp_hooks.install(prepared(case))
        found = train(model, compiled(model, pre_passes=[fault]), case, rank)
        logging.getLogger("collective_identity").removeHandler(handler)
        report = ci.report().to_dict()
    return {
        "loss": max(abs(a - b) / abs(a) for a, b in zip(expected, found, strict=True)),
        "ok": report["ok"],
        "failures": report["failures"],
        "warned": warned,
    }


def disagree(rank: int, ranks: int) -> dict[str, Any]:
    """Rank 1 caps its buckets, rank 0 does not."""
    case = capture_cases.TWO_RANKS["uneven"]
    start = time.monotonic()
    with ci.enable(agreement_timeout=30):
        model = fsdp_hooks.install(prepared(case))
        call = compiled(model, **({"cap_mb": 0.001} if rank == 1 else {}))
        try:
            train(model, call, case, rank)
        except Exception as error:
            return {"raised": f"{type(error).__name__}: {error}", "seconds": time.monotonic() - start}
    return {"raised": "", "seconds": time.monotonic() - start}


def one_rank_recompiles(rank: int, ranks: int) -> dict[str, Any]:
    """From the second step on, every batch of rank 1 has another size, so it compiles again and rank 0 does not."""
    start = time.monotonic()
    with ci.enable(agreement_timeout=60):
        model = fsdp_hooks.install(prepared(Case(build=lambda: Model(blocks=1))))
        call = torch.compile(
            model, backend="collective_identity", fullgraph=True, dynamic=False, options={"inner": "aot_eager"}
        )
        for size in (4, 3 if rank == 1 else 4):
            call(torch.zeros(size, 5, dtype=torch.long)).sum().backward()
        statuses = [graph["agreement"] for graph in ci.report().to_dict()["graphs"] if graph["phase"] != "joint"]
    return {"seconds": time.monotonic() - start, "statuses": statuses}
