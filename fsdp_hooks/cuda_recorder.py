"""How are a step's launches recorded as one CUDA graph?

Torch's own ``torch.cuda.graph``. Plain steps run on the stream that records as well: what autograd and libraries set up
on a first run stays on its stream, and the default stream cannot take part in a recording.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch

from . import compat_step


class Recorder(Protocol):
    """Runs a step, or records its launches."""

    def plainly(self, run: Callable[[], Any]) -> Any:
        """Run now."""

    def record(self, run: Callable[[], Any]) -> tuple[Any, Callable[[], object]]:
        """What ``run`` returned, whose tensors hold nothing yet, and what fills them by running it again."""


class CudaRecorder:
    """Records on one stream: torch's own for that, if it is of this device, since cuBLAS holds 64 MiB for each."""

    def __init__(self, device: torch.device) -> None:
        shared = torch.cuda.graph(torch.cuda.CUDAGraph()).capture_stream
        self._stream = shared if shared is not None and shared.device == device else torch.cuda.Stream(device)

    def plainly(self, run: Callable[[], Any]) -> Any:
        """Run on the stream, between what the current stream did before and does after."""
        current = torch.cuda.current_stream(self._stream.device)
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            returned = run()
        current.wait_stream(self._stream)
        return returned

    def record(self, run: Callable[[], Any]) -> tuple[Any, Callable[[], object]]:
        """Record into a memory pool of the graph's own.

        Other threads may call CUDA meanwhile (``thread_local``): NCCL's watchdog does. The flight recorder is emptied:
        it would ask recorded collectives for events that never happen, and log an error for each.
        """
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=self._stream, capture_error_mode="thread_local"):
            returned = run()
        compat_step.forget_flight_record()
        return returned, graph.replay
