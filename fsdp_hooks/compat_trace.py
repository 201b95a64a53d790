"""Does a compile only look at shapes now? Private names of torch, in one place.

Read in 2.11.0, 2.12.0, 2.13.0, 2.14.1 and 2.15.0: torch/_guards.py, torch/fx/experimental/proxy_tensor.py,
torch/_subclasses/fake_tensor.py.
"""

from __future__ import annotations

import torch
from torch._guards import TracingContext
from torch._subclasses.fake_tensor import is_fake
from torch.fx.experimental.proxy_tensor import get_proxy_mode


def only_shapes_count(tensor: torch.Tensor) -> bool:
    """Whether an operator runs on a fake tensor inside a compile and nothing records what it calls.

    So it is when Dynamo asks for the result of a call, and when AOTAutograd collects metadata before its trace.
    """
    return TracingContext.try_get() is not None and get_proxy_mode() is None and is_fake(tensor)
