"""What the server of forks imports once; nothing here may start a thread or read a launch's environment."""

from __future__ import annotations

import torch._dynamo
import torch._inductor.compile_fx
import torch.distributed.fsdp
import torch.distributed.tensor.parallel  # noqa: F401

import fsdp_hooks  # noqa: F401
import inductor_passes.backend  # noqa: F401
from tests.distributed import rank  # noqa: F401
