"""What runs on each rank: a Llama built from its public configuration class, eager FSDP2 against captured."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

os.environ["HF_HUB_OFFLINE"] = "1"  # nothing is looked up: the model is made from its configuration

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import collective_identity as ci
import fsdp_hooks
import inductor_passes  # noqa: F401  (makes the backend known)
from tests.distributed import capture_cases

STEPS = 10


@dataclass(frozen=True)
class Case:
    """How the model is configured and called; `prepare` is what a user does to it before sharding."""

    config: dict[str, Any] = field(default_factory=dict)
    call: dict[str, Any] = field(default_factory=lambda: {"use_cache": False})
    prepare: Callable[[Any], None] = lambda model: None
    masked: bool = False
    data_parallel: bool = False
    tolerance: float = 0.0


def checkpointing(model: Any) -> None:
    """Checkpoints inside each layer, put there before it is sharded."""
    for layer in model.model.layers:
        layer.mlp = checkpoint_wrapper(layer.mlp)


CASES = {
    "plain": Case(),
    "tied embeddings": Case(config={"tie_word_embeddings": True}),
    "padded batch": Case(masked=True),
    "keeping keys and values": Case(call={}),
    "a tuple returned": Case(call={"use_cache": False, "return_dict": False}),
    "checkpoints inside layers": Case(prepare=checkpointing),
    # scaled_dot_product_attention is decomposed when it is compiled, so not bit for bit
    "grouped queries": Case(config={"num_key_value_heads": 2}, tolerance=1e-5),
    "data_parallel": Case(data_parallel=True),
}


def llama(case: Case) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    model = LlamaForCausalLM(
        LlamaConfig(
            **{
                "vocab_size": 97,
                "hidden_size": 32,
                "intermediate_size": 56,
                "num_hidden_layers": 2,
                "num_attention_heads": 4,
                "max_position_embeddings": 32,
                **case.config,
            }
        )
    )
    model.train()
    case.prepare(model)
    return model


def shard(model: Any) -> Any:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def train(model: nn.Module, call: Callable[..., Any], case: Case, rank: int) -> list[float]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for step in range(STEPS):
        data = torch.Generator().manual_seed(10 * step + rank)
        tokens = torch.randint(0, 97, (2, 12), generator=data)
        inputs = {"input_ids": tokens, "labels": tokens}
        if case.masked:
            mask = torch.ones_like(tokens)
            mask[1, 8:] = 0
            inputs |= {"attention_mask": mask, "labels": tokens.masked_fill(mask == 0, -100)}
        found = call(**inputs, **case.call)
        loss = found[0]
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def compare(rank: int, ranks: int, names: tuple[str, ...]) -> dict[str, Any]:
    """The largest differences of losses and parameters, and the report, by name."""
    warnings.simplefilter("ignore")
    return {name: one(CASES[name], rank) for name in names}


def one(case: Case, rank: int) -> dict[str, Any]:
    torch._dynamo.reset()
    eager = shard(llama(case))
    expected = train(eager, eager, case, rank)
    with ci.enable():
        if case.data_parallel:
            model = fsdp_hooks.data_parallel(llama(case), init_device_mesh("cpu", (dist.get_world_size(),)))
        else:
            model = fsdp_hooks.install(shard(llama(case)))
        call = torch.compile(
            model, backend="collective_identity", fullgraph=True, options={"inner": "aot_eager"}
        )
        found = train(model, call, case, rank)
        report = ci.report().to_dict()
    return {
        "loss": max(abs(a - b) / abs(a) for a, b in zip(expected, found, strict=True)),
        "param": max(
            (a.to_local() - b.to_local()).abs().max().item()
            for a, b in zip(eager.parameters(), model.parameters(), strict=True)
            if a.to_local().numel()
        ),
        "tolerance": case.tolerance,
        "report": report,
    }


def fabric(rank: int, ranks: int) -> dict[str, Any]:
    """Lightning Fabric as its users write it: a compiled plain module, sharded by the strategy's function."""
    warnings.simplefilter("ignore")
    from lightning.fabric import Fabric
    from lightning.fabric.strategies import ModelParallelStrategy

    os.environ.update(TORCHELASTIC_RUN_ID="test", GROUP_RANK="0", LOCAL_WORLD_SIZE=str(ranks))

    def losses_of(sharder: Callable[[nn.Module, Any], nn.Module], **compiled: Any) -> list[float]:
        strategy = ModelParallelStrategy(sharder, data_parallel_size=ranks, tensor_parallel_size=1)
        its = Fabric(accelerator="cpu", devices=ranks, strategy=strategy)
        its.launch()
        torch.manual_seed(0)
        plain: Any = capture_cases.Model()
        model = its.setup(torch.compile(plain, **compiled) if compiled else plain)
        optimizer = its.setup_optimizers(torch.optim.AdamW(model.parameters(), lr=1e-2))
        losses = []
        for step in range(STEPS):
            data = torch.Generator().manual_seed(10 * step + rank)
            tokens = torch.randint(0, capture_cases.CLASSES, (4, 5), generator=data)
            loss = F.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())
            optimizer.zero_grad()
            its.backward(loss)
            optimizer.step()
            losses.append(loss.item())
        return losses

    def sharded(model: Any, mesh: Any) -> nn.Module:
        capture_cases.shard_blocks(model, mesh["data_parallel"])
        return model

    def installed(model: Any, mesh: Any) -> nn.Module:
        return fsdp_hooks.install(sharded(model, mesh))

    def parallel(model: Any, mesh: Any) -> nn.Module:
        return fsdp_hooks.data_parallel(model, mesh["data_parallel"])

    expected = losses_of(sharded)
    found = {}
    for name, sharder in (("install", installed), ("data_parallel", parallel)):
        torch._dynamo.reset()
        with ci.enable():
            losses = losses_of(
                sharder, backend="collective_identity", fullgraph=True, options={"inner": "aot_eager"}
            )
            report = ci.report().to_dict()
        found[name] = {"same": losses == expected, "report": report}
    return found
