"""A nested compile region that reads a tensor computed before it, not given to it.

    python docs/upstream/nested_region_computed.py

No part of this project is used; one process, CPU, no network. Expected: twice "equal to eager".
"""

import torch


class Layer(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.eye(4))

    def forward(self, x, given):
        full = self.weight * 2
        self.full = full
        return self.with_argument(x, full) if given else self.with_attribute(x)

    @torch.compiler.nested_compile_region
    def with_argument(self, x, full):
        return (x @ full).relu()

    @torch.compiler.nested_compile_region
    def with_attribute(self, x):
        return (x @ self.full).relu()


print(torch.__version__)
x = torch.ones(4, 4)
for given in (True, False):
    torch._dynamo.reset()
    layer = Layer()
    try:
        result = torch.compile(layer, backend="aot_eager", fullgraph=True)(x, given)
        print(f"given={given}", "equal to eager" if torch.equal(result, layer(x, given)) else "differs")
    except Exception as error:
        print(f"given={given}", type(error).__name__, str(error).splitlines()[0][:110])
