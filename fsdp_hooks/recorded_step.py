"""``record_step``: a training step's launches, recorded once as a CUDA graph and replayed by one launch.

Small batches are bound by what the host does between kernels. Captured whole, an FSDP2 model is kernels and
collectives, which a CUDA graph can hold; eager FSDP2's hooks, streams and freed storages it cannot.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

from . import compat_step
from .cuda_recorder import CudaRecorder, Recorder
from .errors import InstallError
from .installation import is_installed
from .recording import Recording
from .step_inputs import Batch

logger = logging.getLogger("collective_identity.fsdp_hooks")

_AGAIN = 3


class _Ending:
    """Gives a step's recording up before the communicators go: NCCL waits for graphs that hold its launches."""

    def __init__(self, step: RecordedStep) -> None:
        self._step = weakref.ref(step)

    def finalize(self) -> None:
        """The process groups are about to be destroyed."""
        step = self._step()
        if step is not None:
            step.reset()


class RecordedStep:
    """A training step; call it as the function it was made from.

    Attributes:
        replays: calls that were a replay.
        plain: calls that ran the function.
    """

    def __init__(
        self,
        step: Callable[..., Any],
        model: nn.Module,
        optimizers: tuple[torch.optim.Optimizer, ...],
        warmup: int,
        recorder: Recorder | None,
    ) -> None:
        self._step, self._model, self._optimizers = step, model, optimizers
        self._recorder, self._warmup = recorder, warmup
        self._ending = _Ending(self)
        self._recording: Recording | None
        self._stranger: Batch | None
        self._to_warm: int
        self.replays = self.plain = 0
        self.reset()

    @property
    def recorded(self) -> bool:
        """Whether there is a recording."""
        return self._recording is not None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """One step. Returns what the function returns; a replay's tensors are detached and the caller's to keep.

        Raises:
            InstallError: as ``record_step`` says.
        """
        if self._recorder is None:
            self.plain += 1
            return self._step(*args, **kwargs)
        batch = Batch.of(args, kwargs)
        recording = self._recording_for(batch, self._recorder)
        if recording is not None:
            self.replays += 1
            return recording.replay(batch)
        self.plain += 1
        self._to_warm = max(0, self._to_warm - 1)
        return self._recorder.plainly(lambda: self._step(*args, **kwargs))

    def _recording_for(self, batch: Batch, recorder: Recorder) -> Recording | None:
        """What a replay with this batch does what the step would do; None: run it plainly."""
        if self._recording is not None and self._recording.takes(batch):
            changed = self._recording.difference(self._model)
            if changed:
                self._forget(changed)
            else:
                self._changes = self._strange = 0
            return self._recording
        if self._recording is not None:
            self._strange = self._strange + 1 if self._stranger is not None and self._stranger.like(batch) else 1
            self._stranger = batch.described()
            if self._strange <= _AGAIN:
                return None
            logger.warning("the step is recorded anew: the last %d batches were unlike the recorded one", _AGAIN)
            self._recording, self._to_warm, self._strange = None, 0, 0
        if self._to_warm == 0:
            _check_captured(self._model)
            self._recording = Recording.of(self._step, self._model, self._optimizers, batch, recorder)
            compat_step.before_groups_end(self._ending)
        return self._recording

    def reset(self) -> None:
        """Give the recording and its memory up; the next calls run plainly, then one records again."""
        self._recording, self._stranger = None, None
        self._to_warm, self._changes, self._strange = self._warmup, 0, 0

    def _forget(self, changed: str) -> None:
        self._recording, self._to_warm, self._changes = None, 1, self._changes + 1
        if self._changes > _AGAIN:
            raise InstallError(
                f"a recorded step expects what it was recorded with to stay, found another {changed}, the "
                f"{self._changes}th change without a replay in between: change a tensor in place instead (a learning "
                "rate: AdamW(lr=torch.tensor(1e-3, device=...), capturable=True)), or do it inside the step "
                "(zero_grad), or train without record_step"
            )
        logger.warning("the step is recorded anew, for another %s", changed)


def record_step(
    step: Callable[..., Any],
    model: nn.Module,
    optimizers: torch.optim.Optimizer | Iterable[torch.optim.Optimizer],
    *,
    warmup: int = 3,
) -> RecordedStep:
    """Record a training step of an installed model as a CUDA graph, after some plain steps, and replay it from then on.

    ``step`` does what a loop does with a batch: forward (compiled or not), loss, ``backward``, ``optimizer.step()``,
    ``zero_grad``. Every call is one training step, whether it is a plain one, the recording or a replay. A batch of
    other shapes than the recorded one runs plainly. On a CPU all calls do.

    What a plain step would follow is compared at every call: the model's modules with their attributes, parameters and
    buffers and where they lie, ``train()`` and ``eval()``, hooks, FSDP2's options, gradients, hyperparameters, state
    and hooks of the optimizers, grad mode and autocast. After a change the step is recorded anew, with a warning.
    docs/fast-steps.md says what cannot be seen.

    Args:
        step: takes tensors on the model's device, numbers and strings, nested as you like, and only reads them; returns
            tensors or None. It reads no value back (``.item()``), and what it does in Python happens once.
        model: what ``install`` or ``data_parallel`` was called on.
        optimizers: every optimizer that ``step`` uses, with ``capturable=True`` if it has that. Learning rates that
            change are tensors on the device, which torch's schedulers change in place.
        warmup: plain steps before the recording: the first compiles, makes optimizer state and communicators.

    Raises:
        InstallError: the model is not captured, or ``warmup`` is below 1. From a call: a tensor of the batch is
            elsewhere or wants a gradient; the step cannot be recorded, changes more than tensors or returns other
            things; what it was recorded with changed four times without a replay.
    """
    _check_captured(model)
    if type(warmup) is not int or warmup < 1:
        raise InstallError(f"record_step expects at least 1 plain step as warm-up, found warmup={warmup!r}")
    several = tuple(optimizers) if isinstance(optimizers, Iterable) else (optimizers,)
    strange = next((one for one in several if not isinstance(one, torch.optim.Optimizer)), None)
    if strange is not None:
        raise InstallError(f"record_step expects optimizers, found a {type(strange).__name__}: pass every one it steps")
    device = next(model.parameters()).device
    if device.type != "cuda":
        logger.info("record_step: nothing is recorded on %s, every step runs plainly", device)
    return RecordedStep(step, model, several, warmup, CudaRecorder(device) if device.type == "cuda" else None)


def _check_captured(model: nn.Module) -> None:
    if not is_installed(model):
        raise InstallError(
            "record_step expects a model that fsdp_hooks.install or data_parallel captured, found a "
            f"{type(model).__name__} that is not: FSDP2's own hooks cannot be recorded in a CUDA graph; call "
            "install(model) first and pass the model itself, not what torch.compile returned"
        )
