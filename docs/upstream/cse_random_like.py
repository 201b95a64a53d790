"""Two calls of ``randn_like`` on one tensor become one when a gradient is taken.

    python docs/upstream/cse_random_like.py

No part of this project is used; one process, CPU, no network. Expected: "False" for every operator. Seen: see
cse-random-like.md beside this file.
"""

import torch

print(torch.__version__)
OPERATORS = {
    "rand_like": torch.rand_like,
    "randn_like": torch.randn_like,
    "randint_like": lambda x: torch.randint_like(x, 100),
    "exponential": lambda x: torch.empty_like(x).exponential_(),
}
for name, made in OPERATORS.items():
    torch._dynamo.reset()
    call = torch.compile(lambda x, made=made: (x.sin(), made(x) * 2, made(x) * 2), backend="aot_eager", fullgraph=True)
    _, first, second = call(torch.ones(8, requires_grad=True))
    print(f"{name}: equal {torch.equal(first, second)}")
