"""A fused Adam step in a graph does not pass through AOTAutograd.

    python docs/upstream/fused_adam_functionalize.py

No part of this project is used. A graph that calls aten's in-place kernel, as `make_fx` records it from
`torch.optim.AdamW(fused=True)`, is given to AOTAutograd. Expected: each compiles and steps from 1.00 to 0.90.
Seen: see fused-adam-functionalize.md.
"""

import torch
from torch._dynamo.backends.common import aot_autograd
from torch.fx.experimental.proxy_tensor import make_fx

compiler = aot_autograd(fw_compiler=lambda gm, inputs: gm.forward)


def outcome(lr, amsgrad):
    def step(param, grad, average, square, largest, count):
        torch._foreach_add_([count], 1)
        torch._fused_adamw_(
            [param], [grad], [average], [square], [largest] if amsgrad else [], [count],
            lr=lr, beta1=0.9, beta2=0.99, weight_decay=0.0, eps=1e-8, amsgrad=amsgrad, maximize=False,
        )  # fmt: skip
        return (param + 0,)

    inputs = [torch.ones(4), torch.ones(4), *(torch.zeros(4) for _ in range(3)), torch.zeros(())]
    graph = make_fx(step)(*(x.clone() for x in inputs))
    try:
        with torch.no_grad():
            compiler(graph, inputs)(*inputs)
    except Exception as error:
        return f"{type(error).__name__}: {str(error).splitlines()[0][:110]}"
    return f"param {inputs[0][0].item():.2f}"


for lr, amsgrad in ((0.1, True), (0.1, False), (torch.tensor(0.1), True)):
    print(f"torch {torch.__version__}, lr a {type(lr).__name__}, amsgrad={amsgrad}: {outcome(lr, amsgrad)}")
