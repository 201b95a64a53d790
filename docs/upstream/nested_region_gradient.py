"""The gradient of a nested compile region that is called twice, by Inductor, with and without donated buffers.

    python docs/upstream/nested_region_gradient.py

No part of this project is used; one process, CPU, no network. Expected: equal lines. Seen: see
nested-region-gradient.md beside this file.
"""

import torch
import torch._functorch.config as functorch
import torch._inductor.config as inductor


@torch.compiler.nested_compile_region
def inner(a):
    return a.relu() * a


def twice(a):
    return inner(a) + inner(a * 2)


inductor.force_disable_caches = True  # donated_buffer is in no key: a cached graph would answer for both
print(torch.__version__)
for backend, donated in (("aot_eager", True), ("inductor", True), ("inductor", False)):
    torch._dynamo.reset()
    functorch.donated_buffer = donated
    w = torch.linspace(-1, 1, 4).requires_grad_(True)
    torch.compile(twice, backend=backend, fullgraph=True)(w).sum().backward()
    print(backend, f"donated_buffer={donated}", [round(value, 3) for value in w.grad.tolist()])
