"""Under torchrun: ``one_job.py RUN_DIR``: FSDP2's producer, an operator policy, bucketing and diagnostics, then lite.

One session, one run folder: the same model is trained compiled with a policy and with buckets, then in lite mode, which
takes no policy. Prints each rank's losses as a line of JSON.
"""

from __future__ import annotations

import json
import sys
import warnings
from typing import Any

import torch
import torch.distributed as dist

import collective_identity as ci
import fsdp_hooks
from benchmarks.policy_case import policy
from tests.distributed.capture_cases import Model, shard_blocks


def train(**how: Any) -> list[float]:
    """Two steps from the same start; the losses."""
    torch.manual_seed(0)
    torch._dynamo.reset()
    model = Model()
    shard_blocks(model)
    fsdp_hooks.install(model)
    compiled = torch.compile(model, backend="collective_identity", fullgraph=True, **how)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for _ in range(2):
        loss = compiled(torch.ones(4, 5, dtype=torch.long)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def main() -> None:
    """Train twice in one session."""
    warnings.simplefilter("ignore")
    dist.init_process_group("gloo")
    with ci.enable(run_dir=sys.argv[1], agreement_timeout=60):
        losses = {"policy": train(options={"policy": policy("A", "cuda")}), "lite": train(mode="lite")}
    print(json.dumps(losses))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
