"""The producers: who says why a collective was emitted.

``install`` makes a ``fully_shard`` model capturable by ``torch.compile`` with every FSDP collective in the graph
and an explicit role on each; ``data_parallel`` does the same for a plain model, and
``trace_train_step`` makes one FX graph of a whole training step.
"""

from __future__ import annotations

from .comms import restore_comms, use_functional_comms
from .data_parallel import data_parallel, undo_data_parallel
from .errors import InstallError, UnsupportedOption
from .expected import expected_collectives
from .installation import install, uninstall
from .recorded_step import RecordedStep, record_step
from .train_step import TrainStep, trace_train_step

__all__ = [
    "InstallError",
    "RecordedStep",
    "TrainStep",
    "UnsupportedOption",
    "data_parallel",
    "expected_collectives",
    "install",
    "record_step",
    "restore_comms",
    "trace_train_step",
    "undo_data_parallel",
    "uninstall",
    "use_functional_comms",
]
