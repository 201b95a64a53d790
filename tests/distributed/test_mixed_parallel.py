"""FSDP beside other parallelism on four real ranks: what eager FSDP2 computes, and no bucket that mixes roles."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import fx, nn

import collective_identity as ci
import fsdp_hooks
import inductor_passes  # noqa: F401  (makes the backend known)
from collective_identity import store
from tests.distributed.launch import launch
from tests.distributed.mixed_cases import BATCH, CASES, LENGTH, WIDTH, Case

STEPS = 3
FSDP = {ci.PARAM_UNSHARD, ci.GRAD_REDUCE_SHARD}


def prepared(case: Case) -> nn.Module:
    torch.manual_seed(0)
    model = case.build()
    case.shard(model)
    return model


def train(model: nn.Module, call: Callable[[torch.Tensor], torch.Tensor], rank: int) -> list[float]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, foreach=False)
    losses = []
    for step in range(STEPS):
        x = torch.randn(BATCH, LENGTH, WIDTH, generator=torch.Generator().manual_seed(10 * step + rank))
        loss = call(x).square().mean()
        loss.backward()
        losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    return losses


class Look:
    """A pre-pass: notes what each collective of every graph is, and clears the payloads if asked."""

    def __init__(self, *, clear: bool) -> None:
        self.clear = clear
        self.roles: list[dict[str, str | None]] = []

    def __call__(self, gm: fx.GraphModule) -> None:
        ci.normalize(gm)
        found = {node: ci.identity_of(node) for node in ci.start_nodes(gm)}
        self.roles.append({node.name: i.role if i else None for node, i in found.items()})
        if self.clear:
            for node in gm.graph.nodes:
                store.clear(node)


def compiled(case: Case, rank: int, stamped: bool, eager: nn.Module, expected: list[float]) -> dict[str, Any]:
    """The captured model against eager FSDP2, with the producers' payloads or without any."""
    torch._dynamo.reset()
    look = Look(clear=not stamped)
    with ci.enable():
        model = fsdp_hooks.install(prepared(case))
        options: dict[str, Any] = {
            "inner": "aot_eager", "order": "fqn", "fqns": [n for n, _ in model.named_parameters()],
            "pre_passes": [look],
        }
        call = torch.compile(model, backend="collective_identity", fullgraph=True, options=options)
        found = train(model, call, rank)
        report = ci.report().to_dict()
    pairs = zip(eager.parameters(), model.parameters(), strict=True)
    return {
        "loss": max(abs(a - b) / abs(a) for a, b in zip(expected, found, strict=True)),
        "param": max((a._local_tensor - b._local_tensor).abs().max().item() for a, b in pairs),  # type: ignore[attr-defined]
        "roles": look.roles,
        "plans": [p["summary"] for g in report["graphs"] for p in g["passes"] if p["name"] == "bucket"],
        "counts": report["counts"],
    }


def compare(rank: int, ranks: int) -> dict[tuple[str, bool], dict[str, Any]]:
    """Every case, by name and whether it was stamped."""
    warnings.simplefilter("ignore")
    results = {}
    for name, case in CASES.items():
        eager = prepared(case)
        expected = train(eager, eager, rank)
        for stamped in (True, False):
            results[name, stamped] = compiled(case, rank, stamped, eager, expected)
    return results


@pytest.fixture(scope="module")
def runs() -> list[dict[tuple[str, bool], dict[str, Any]]]:
    return launch(compare, 4, timeout=250)


@pytest.mark.distributed
@pytest.mark.long
@pytest.mark.parametrize("name", list(CASES))
def test_stamped(runs: list[dict[tuple[str, bool], dict[str, Any]]], name: str) -> None:
    """Bit for bit what eager FSDP2 computes: `order="fqn"` lays buckets out as it does."""
    for result in (rank[name, True] for rank in runs):
        assert (result["loss"], result["param"]) == (0.0, 0.0)
        roles = {node: role for graph in result["roles"] for node, role in graph.items()}
        assert set(CASES[name].others) < set(roles.values()) and None in roles.values()
        merged: Counter[str] = Counter()
        for names, plan in zip(result["roles"], result["plans"], strict=True):
            for bucket in plan["buckets"]:
                assert {names[member] for member in bucket["members"]} == {bucket["role"]} <= FSDP
                merged[bucket["role"]] += 1
            refused = {refusal["node"]: refusal["slug"] for refusal in plan["refusals"]}
            left = {node: refused[node] for node, role in names.items() if role not in FSDP}
            assert set(left.values()) <= {"no_role", "other_role", "not_requested"}, "left as they were, all of them"
        assert set(merged) == FSDP


@pytest.mark.distributed
@pytest.mark.long
@pytest.mark.parametrize("name", list(CASES))
def test_unstamped(runs: list[dict[tuple[str, bool], dict[str, Any]]], name: str) -> None:
    """Structure may take another's gather for FSDP's; nothing is merged on a guess, and values stay."""
    for result in (rank[name, False] for rank in runs):
        assert result["loss"] <= 1e-6 and result["param"] <= 1e-6
        assert result["counts"]["explicit"] == 0
        assert len(result["plans"]) == 2 and all(not plan["buckets"] for plan in result["plans"])
