"""Variants are compiled by another thread before their launch; launches wait for them, and do without them."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch

from inductor_passes.kernels import launch, layout_of
from inductor_passes.kernels.ahead import Ahead, Variant
from inductor_passes.kernels.launch import Move

CPU = torch.device("cpu")
LONG = 60.0  # seconds: more than anything here takes, so that a fault ends

ENDS_AT_ONCE = """
import time, torch
from inductor_passes.kernels.ahead import Ahead, Variant

def compile_one(variant):
    time.sleep(0.2)
    print(variant.kernel, flush=True)

ahead = Ahead(compile_one)
ahead.start([Variant(str(i), (), (), torch.device("cpu")) for i in range(1000)])
ahead.wait(Variant("0", (), (), torch.device("cpu")))
"""


def variant(name: str) -> Variant:
    return Variant(name, (), (), CPU)


class Compiler:
    """Notes what it compiles, once it may."""

    def __init__(self, *, fails: BaseException | None = None) -> None:
        self.may = threading.Event()
        self.compiled: list[str] = []
        self.threads: list[threading.Thread] = []
        self._fails = fails

    def __call__(self, one: Variant) -> None:
        assert self.may.wait(LONG)
        self.compiled.append(one.kernel)
        self.threads.append(threading.current_thread())
        if self._fails is not None and one.kernel == "fails":
            raise self._fails


def in_thread(call: Callable[[], object]) -> threading.Thread:
    thread = threading.Thread(target=call)
    thread.start()
    return thread


def test_each_is_compiled_once_in_order_and_elsewhere() -> None:
    compiler = Compiler()
    ahead = Ahead(compiler)
    ahead.start(map(variant, "ab"))
    ahead.start(map(variant, "bca"))
    waiting = in_thread(lambda: ahead.wait(variant("c")))
    waiting.join(0.05)
    assert waiting.is_alive() and not compiler.compiled
    compiler.may.set()
    waiting.join(LONG)
    assert not waiting.is_alive() and compiler.compiled == ["a", "b", "c"]
    assert threading.current_thread() not in compiler.threads and len(set(compiler.threads)) == 1
    compiler.threads[0].join(LONG)  # it ends with its work, and another one takes up what comes later
    ahead.start(map(variant, "da"))
    ahead.wait(variant("d"))
    assert compiler.compiled == ["a", "b", "c", "d"]


def test_nobody_waits_for_what_was_not_asked_for() -> None:
    Ahead(Compiler()).wait(variant("a"))


@pytest.mark.parametrize("error", [ValueError("no such thing"), SystemExit(1)])
def test_what_fails_is_left_to_the_launch(error: BaseException) -> None:
    """Nobody waits for ever, nothing is raised, and what comes after is compiled."""
    compiler = Compiler(fails=error)
    compiler.may.set()
    ahead = Ahead(compiler)
    ahead.start(map(variant, ("a", "fails", "b")))
    for name in ("fails", "b", "a"):
        ahead.wait(variant(name))
    assert compiler.compiled == ["a", "fails", "b"]


def test_no_thread_can_be_started(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    compiler = Compiler()
    ahead = Ahead(compiler)
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        ahead.start(map(variant, "ab"))
    ahead.wait(variant("b"))
    compiler.may.set()
    ahead.start(map(variant, "c"))
    ahead.wait(variant("c"))
    assert compiler.compiled == ["c"]


def test_a_process_ends_without_what_is_left() -> None:
    """The one that is under way is finished, a thousand others are not begun."""
    ended = subprocess.run([sys.executable, "-c", ENDS_AT_ONCE], capture_output=True, text=True, timeout=LONG)
    assert ended.returncode == 0 and not ended.stderr
    assert 1 <= len(ended.stdout.split()) < 100


class Kernels(ModuleType):
    """What `launch` needs of the kernels' module; notes what is compiled and launched, by kernel."""

    LOOKS, WORDS = (32,), 64

    def __init__(self, *, fails: bool = False) -> None:
        super().__init__("kernels")
        self.may = threading.Event()
        self.noted: list[str] = []
        self._fails = fails
        self.write_words, self.move_members = _Kernel("write_words", self.noted), _Kernel("move_members", self.noted)

    def get_ready(self) -> None:
        self.noted.append("ready")

    def compile_only(self, kernel: _Kernel, *arguments: Any, **options: Any) -> None:
        assert self.may.wait(LONG)
        if self._fails:
            raise RuntimeError("the compiler is out of order")
        self.noted.append(f"compiled {kernel.name}")


class _Kernel:
    def __init__(self, name: str, noted: list[str]) -> None:
        self.name, self._noted = name, noted

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        return lambda *args, **options: self._noted.append(self.name)


LAYOUT = layout_of((4, 8), (1, 1), (8, 16), 2)
PACKING = Move(LAYOUT, torch.float32, frozenset([torch.bfloat16]), True, CPU)


def pack(kernels: ModuleType) -> None:
    members = [torch.zeros(length, dtype=torch.bfloat16) for length in LAYOUT.lengths]
    launch.move(torch.empty(24), members, LAYOUT, packing=True, kernels=kernels, keep=False)


def test_a_launch_waits_for_what_is_under_way() -> None:
    kernels = Kernels()
    launch.compile_ahead([PACKING, PACKING], kernels=kernels)
    thread = in_thread(lambda: pack(kernels))
    thread.join(0.05)
    assert thread.is_alive() and kernels.noted == ["ready"]
    kernels.may.set()
    thread.join(LONG)
    launched = ["write_words", "write_words", "move_members"]
    assert kernels.noted == ["ready", "compiled write_words", "compiled move_members", *launched]
    pack(kernels)
    assert kernels.noted[-6:] == launched * 2


def test_a_launch_does_without() -> None:
    """Nothing was planned, as where a graph comes from a cache; another variant was; or its compile failed."""
    unplanned, other, failing = Kernels(), Kernels(), Kernels(fails=True)
    pack(unplanned)
    assert unplanned.noted == ["write_words", "write_words", "move_members"]
    other.may.set()
    launch.compile_ahead([Move(LAYOUT, torch.float32, frozenset([torch.float16]), True, CPU)], kernels=other)
    pack(other)
    failing.may.set()
    launch.compile_ahead([PACKING], kernels=failing)
    pack(failing)
    assert other.noted.count("move_members") == 1 and failing.noted == ["ready", *unplanned.noted]


def test_nothing_to_launch_compiles_nothing() -> None:
    kernels = Kernels()
    launch.compile_ahead([], kernels=kernels)
    empty = layout_of((0,), (1,), (0,), 1)
    launch.compile_ahead([Move(empty, torch.float32, frozenset([torch.float32]), True, CPU)], kernels=kernels)
    assert kernels.noted in ([], ["ready"])
