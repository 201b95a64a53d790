"""The gradient of a compiled function whose input is a collective's result that nobody has waited for yet.

    python docs/upstream/async_collective_input.py

No part of this project is used; one process, gloo, CPU, no network. Expected: equal gradients. Seen: see
async-collective-input.md beside this file.
"""

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol


class Gather(torch.autograd.Function):
    """As DTensor.redistribute: a functional collective in an autograd.Function (here over one rank)."""

    @staticmethod
    def forward(ctx, x):
        return funcol.all_gather_tensor(x, 0, dist.group.WORLD)

    @staticmethod
    def backward(ctx, gradient):
        return gradient


dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
print(torch.__version__)
for backend in ("eager", "aot_eager", "inductor"):
    torch._dynamo.reset()
    x, weight = torch.ones(2, requires_grad=True), torch.ones(2, requires_grad=True)
    gathered = Gather.apply(x)
    torch.compile(lambda t, w: (t * w).sum(), backend=backend)(gathered, weight).backward()
    kind = type(gathered).__name__
    print(f"{backend:9s} input: {kind}, requires_grad {gathered.requires_grad}; x.grad {x.grad.tolist()}")
dist.destroy_process_group()
