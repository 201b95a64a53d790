"""A checkpoint that recomputes a random operator, in a graph that saves an opaque object (a DTensor's mesh).

    python docs/upstream/checkpoint_random_opaque.py

No part of this project is used; one process, CPU, no network. Expected: "trained". Seen: see
checkpoint-random-opaque.md beside this file.
"""

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils.checkpoint import checkpoint

dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
weight = distribute_tensor(torch.ones(4, 4), init_device_mesh("cpu", (2,)), [Shard(0)]).requires_grad_()


@torch.compile(backend="aot_eager_decomp_partition", fullgraph=True)
def step(w):
    return checkpoint(lambda x: torch.rand_like(x) * x.sin(), w.to_local(), use_reentrant=False)


try:
    step(weight).sum().backward()
    print("trained")
except AssertionError as error:
    print(f"AssertionError: {error}")
dist.destroy_process_group()
