"""What runs on each rank: eager FSDP2 with its own communication and with functional comms, compared."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import nn
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.traceback import preserve_node_meta

import collective_identity as ci
import fsdp_hooks
from fsdp_hooks import compat_eager
from tests.distributed import capture_cases
from tests.distributed.capture_cases import BF16, CLASSES, Case, even, mixed, shard_blocks, shard_hybrid
from tests.distributed.capture_runs import local_state, prepared, train

STEPS = 10


def hybrid_bf16(model: nn.Module) -> None:
    mesh = capture_cases.init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    shard_blocks(model, mesh, mp_policy=capture_cases.MixedPrecisionPolicy(**BF16))


CASES = {
    2: {
        **{name: capture_cases.TWO_RANKS[name] for name in ("uneven", "nested", "tied", "frozen", "columns")},
        "bf16": Case(shard=mixed(**BF16)),
        "bf16_reduce_in_bf16": Case(build=even, shard=mixed(param_dtype=torch.bfloat16)),
        "fp16_reduce": Case(shard=mixed(param_dtype=torch.float32, reduce_dtype=torch.float16)),
    },
    4: {"hybrid": Case(shard=shard_hybrid), "hybrid_bf16": Case(shard=hybrid_bf16)},
}


class Accumulating:
    """Calls the model; every other micro-batch does not synchronise."""

    def __init__(self, model: nn.Module, setting: str) -> None:
        self.model, self.setting, self.calls = model, setting, 0

    def __call__(self, tokens: torch.Tensor) -> torch.Tensor:
        getattr(self.model, self.setting)(self.calls % 2 == 1)
        self.calls += 1
        return self.model(tokens)


def _trained(case: Case, rank: int, setting: str | None, *, functional: bool) -> tuple[list[float], nn.Module]:
    model = prepared(case)
    if functional:
        fsdp_hooks.use_functional_comms(model)
    call = model if setting is None else Accumulating(model, setting)
    losses = train(model, call, case, rank)
    if functional:
        fsdp_hooks.restore_comms(model)
    return losses, model


def compare(rank: int, ranks: int) -> dict[str, Any]:
    """By case: whether every loss and every parameter is bit for bit the same after ten AdamW steps."""
    runs = [(name, case, None) for name, case in CASES[ranks].items()]
    first = next(iter(CASES[ranks].values()))
    settings = ["set_requires_gradient_sync"] + (["set_requires_all_reduce"] if ranks == 4 else [])
    runs += [(setting, dataclasses.replace(first, micro_batches=2), setting) for setting in settings]
    results = {}
    for name, case, setting in runs:
        case = dataclasses.replace(case, steps=STEPS)
        plain, one = _trained(case, rank, setting, functional=False)
        ours, other = _trained(case, rank, setting, functional=True)
        a, b = local_state(one), local_state(other)
        results[name] = {
            "losses": len(plain) == STEPS and plain == ours,
            "moved": plain[0] != plain[-1],
            "parameters": all(torch.equal(a[key], b[key]) for key in a),
        }
    return results


def traced(rank: int, ranks: int) -> dict[str, Any]:
    """The identities in a ``make_fx`` trace of one eager step, and whether the undo leaves FSDP2 as it was."""
    case = next(iter(CASES[ranks].values()))
    model = prepared(case)
    before = {name: compat_eager.comms_of(*_group(model, name)) for name in ("", "blocks.0")}
    module = compat_eager.collectives_module()
    fsdp_hooks.use_functional_comms(model)
    tokens = torch.randint(0, CLASSES, (4, 5), generator=torch.Generator().manual_seed(rank))
    model(tokens).sum().backward()
    model.zero_grad()

    def step(tokens: torch.Tensor) -> torch.Tensor:
        loss = model(tokens).sum()
        loss.backward()
        return loss.detach()

    with preserve_node_meta(), torch.autograd.set_multithreading_enabled(False):
        gm = make_fx(step)(tokens)
    found = [(node, ci.identity_of(node)) for node in ci.start_nodes(gm)]
    routed = module.dist is not torch.distributed
    fsdp_hooks.restore_comms(model)
    return {
        "identities": [None if i is None else (i.role, i.source.value, i.producer, i.param_group) for _, i in found],
        "params": {i.param_group: i.params for _, i in found if i is not None and i.role == ci.GRAD_REDUCE_SHARD},
        "groups": len({i.group for _, i in found if i is not None}),
        "raw": [str(n.target) for n in gm.graph.nodes if str(n.target).startswith("c10d.")],
        "routed": routed,
        "restored": module.dist is torch.distributed
        and all(before[name] == compat_eager.comms_of(*_group(model, name)) for name in before),
    }


def _group(model: nn.Module, name: str) -> tuple[Any, str]:
    state = fsdp_hooks.compat.state_of(model.get_submodule(name), name)
    return fsdp_hooks.compat.groups_of(state, name)[0], name


def two_models(rank: int, ranks: int) -> list[bool]:
    """Whether the router is there: with two models, after the first is restored, after the second."""
    module = compat_eager.collectives_module()
    models = [prepared(Case(shard=shard_hybrid)) for _ in range(2)]
    for model in models:
        fsdp_hooks.use_functional_comms(model)
    there = [module.dist is not torch.distributed]
    for model in models:
        fsdp_hooks.restore_comms(model)
        there.append(module.dist is not torch.distributed)
    return there
