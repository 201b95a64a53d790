"""AOTAutogradCache keys a DTensor by its global size: with uneven shards a rank runs code made for another rank.

    export TORCHINDUCTOR_CACHE_DIR=$(mktemp -d)
    torchrun --standalone --nproc-per-node 2 docs/upstream/aot_cache_uneven_dtensor.py

No part of this project is used. Rank 0 compiles first and fills the cache, then rank 1, which holds one row where
rank 0 holds two. Expected: both print their own shape. Seen: see README.md beside this file.
"""

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

dist.init_process_group("gloo")
rank = dist.get_rank()
mesh = init_device_mesh("cpu", (2,))
weight = distribute_tensor(torch.ones(3, 4), mesh, [Shard(0)]).requires_grad_()


@torch.compile(fullgraph=True)
def double(w):
    return w.to_local() * 2


for turn in range(2):
    if rank == turn:
        try:
            result = double(weight)
            result.sum().backward()
            outcome = f"result {tuple(result.shape)}"
        except AssertionError as error:
            outcome = f"AssertionError: {str(error).splitlines()[0]}"
        hits = torch._dynamo.utils.counters["aot_autograd"]["autograd_cache_hit"]
        shape = tuple(weight.to_local().shape)
        print(f"torch {torch.__version__}, rank {rank}: shard {shape}, cache hits {hits}, {outcome}")
    dist.barrier()
dist.destroy_process_group()
