"""What is compiled before it is launched? Variants of kernels, by a thread of its own, while Inductor compiles."""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch

logger = logging.getLogger("collective_identity.inductor_passes")


@dataclass(frozen=True, slots=True)
class Variant:
    """What triton compiles once.

    Attributes:
        kernel: its name in the module of the kernels.
        arguments: of a launch, element types in the place of tensors that are aligned to 16 bytes.
        options: the kernel's constants and the launch's options, by name.
        device: where it will run.
    """

    kernel: str
    arguments: tuple[Any, ...]
    options: tuple[tuple[str, int | bool], ...]
    device: torch.device


class Ahead:
    """Compiles variants one after the other, in a thread that ends when nothing is left to do.

    One at a time: triton's tables of a kernel are not made for two threads that come to a new device at once, and the
    cores belong to Inductor's workers. A launch waits for a variant that is under way, and compiles none twice. What
    fails here is left to the launch, which compiles itself and raises what there is to raise.
    """

    def __init__(self, compile_one: Callable[[Variant], object]) -> None:
        """``compile_one``: compiles a variant, and leaves it where the launch finds it."""
        self._compile_one = compile_one
        self._lock = threading.Lock()
        self._done: dict[Variant, threading.Event] = {}
        self._left: deque[Variant] = deque()
        self._working = False

    def start(self, variants: Iterable[Variant]) -> None:
        """Have these compiled, in this order, but for those that were asked for before."""
        with self._lock:
            for variant in variants:
                if variant not in self._done:
                    self._done[variant] = threading.Event()
                    self._left.append(variant)
            if self._working or not self._left:
                return
            self._working = True
        try:
            # No daemon: the interpreter's end would cut it off within the compiler's C++, which ends in an abort.
            threading.Thread(target=self._work, name="inductor_passes.kernels").start()
        except RuntimeError:  # as the interpreter ends, or with too many threads
            logger.debug("no thread to compile kernels in", exc_info=True)
            self._give_up()

    def wait(self, variant: Variant) -> None:
        """Until this one is compiled or has failed; at once where nobody asked for it."""
        done = self._done.get(variant)
        if done is not None:
            done.wait()

    def _work(self) -> None:
        while threading.main_thread().is_alive():  # else the process ends and waits for this thread
            with self._lock:
                if not self._left:
                    self._working = False
                    return
                variant = self._left.popleft()
            try:
                self._compile_one(variant)
            except BaseException:
                logger.debug("%s was not compiled ahead of its launch", variant, exc_info=True)
            finally:
                self._done[variant].set()
        self._give_up()

    def _give_up(self) -> None:
        with self._lock:
            self._working = False
            while self._left:
                self._done[self._left.popleft()].set()
