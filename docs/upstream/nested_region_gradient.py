"""The gradient of a nested compile region that is called twice, by Inductor.

    python docs/upstream/nested_region_gradient.py

No part of this project is used; one process, CPU, no network. Expected: equal lines. Seen: see
nested-region-gradient.md beside this file.
"""

import torch


@torch.compiler.nested_compile_region
def inner(a):
    return a.relu() * a


def twice(a):
    return inner(a) + inner(a * 2)


print(torch.__version__)
for backend in ("aot_eager", "inductor"):
    torch._dynamo.reset()
    w = torch.linspace(-1, 1, 4).requires_grad_(True)
    torch.compile(twice, backend=backend, fullgraph=True)(w).sum().backward()
    print(backend, [round(value, 3) for value in w.grad.tolist()])
