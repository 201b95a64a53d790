"""Strides that a fake tensor promises for a bfloat16 product of an expanded tensor, against the real ones.

    python docs/upstream/fake_strides_bfloat16.py

No part of this project is used; one process, CPU, no network. Expected: the two agree for both dtypes, and the compiled
product runs. Seen: see fake-strides-bfloat16.md beside this file.
"""

import torch
from torch._subclasses.fake_tensor import FakeTensorMode


def product(x, y):
    return x.expand(4, 3, 2) * y.t().unsqueeze(-1)


print(torch.__version__)
for dtype in (torch.float32, torch.bfloat16):
    x, y = torch.ones(3, 2, dtype=dtype), torch.ones(3, 4, dtype=dtype)
    with FakeTensorMode() as mode:
        fake = product(mode.from_tensor(x), mode.from_tensor(y))
    print(f"{dtype}: real {product(x, y).stride()}, fake {fake.stride()}")
try:
    torch.compile(product, mode="lite")(x, y)
    print("compiled in lite mode: runs")
except AssertionError as error:
    print(f"compiled in lite mode: AssertionError: {str(error).splitlines()[0]}")
