"""What the compiler does with identity: the backend, its passes and their manager.

Importing the package makes ``backend="collective_identity"`` known to Dynamo, which a checkout that is not
installed needs; an installed one is found through its entry point as well.
"""

from __future__ import annotations

from importlib.metadata import entry_points

from torch._dynamo import register_backend

from . import upstream
from .backend import NAME, collective_identity
from .bucketing import bucket_collectives
from .comm_costs import CommCosts, KindCosts
from .comm_timing import measure_comm_costs
from .debugging import debugify
from .dedup import dedup_reduce_scatters
from .device_policy import FALLBACK, OperatorPolicy, register_policy
from .fusion import fuse_tensor_parallel
from .lite_mode import LiteState, lite_state, one_trace, strict_lite_options

upstream.check_version()
if not entry_points(group="torch_dynamo_backends", name=NAME):
    register_backend(collective_identity, name=NAME)

__all__ = [
    "CommCosts", "FALLBACK", "KindCosts", "LiteState", "OperatorPolicy", "bucket_collectives", "collective_identity",
    "debugify", "dedup_reduce_scatters", "fuse_tensor_parallel", "lite_state", "measure_comm_costs", "one_trace",
    "register_policy", "strict_lite_options",
]
