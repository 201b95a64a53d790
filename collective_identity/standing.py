"""Where does this rank stand? Which call of which graph, and how many collectives it has issued on each group.

Nothing is launched and nothing intercepted: a compiled graph is entered and left through `Standing.call`, its
backward through hooks on the autograd node that the compiled forward made (so also where a compile cache brought
the backward), and what was issued in between is read from the process groups' own sequence numbers. A collective
is known by its number, the first on a group being 1; which row of the graph's table that is follows from the number
at which the call was entered. On an accelerator a rank issues ahead of the device: the newest collective that has
not *ended* there comes from torch's flight recorder (`compat.recent_operations`).
"""

from __future__ import annotations

import linecache
import sys
import sysconfig
import threading
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any, Final

import torch

from . import compat
from .board import spell

_KEPT: Final = 16  # calls that are remembered
_UNKNOWN: Final = -1  # no graph has this number
_BACKWARD: Final = "CompiledFunctionBackward"
_GENERATED: Final = ("<eval_with_key>", "torchinductor")  # where compiled graphs have their Python code


@dataclass(frozen=True, slots=True)
class Place:
    """A compiled graph: its number in the ledger, and the process groups its collectives run on."""

    graph: int
    groups: tuple[str, ...]


@dataclass(slots=True)
class Call:
    """One run of a graph: the collectives issued on each of its groups when it was entered, and when it was left."""

    graph: int
    n: int
    thread: int
    at: dict[str, int]
    out: dict[str, int] | None = None
    late: Callable[[], Place | None] | None = None  # which graph it is, once a backward compiled in this call is known


class Standing:
    """What one rank does, for whoever asks. Every method may be called from any thread."""

    def __init__(self) -> None:
        self._calls: deque[Call] = deque(maxlen=_KEPT)
        self._counts: Counter[int] = Counter()
        self._doing: dict[object, str] = {}
        self._lock = threading.Lock()
        self._groups: dict[str, tuple[str, tuple[torch.device, ...]]] = {}  # its members, what to read its count by

    def call(
        self,
        compiled: Callable[..., Any],
        args: Sequence[Any],
        here: Place,
        backward: Callable[[], Place | None],
    ) -> Any:
        """Run a compiled graph, and be told when its backward runs."""
        call = self.enter(here)
        try:
            result = compiled(*args)
        finally:
            self.leave(call)
        self._follow(result, backward)
        return result

    def enter(self, place: Place) -> Call:
        """A graph begins to run in this thread."""
        call = Call(place.graph, self._counts[place.graph], threading.get_ident(), self._issued(place.groups))
        self._counts[place.graph] += 1
        self._calls.append(call)
        return call

    def leave(self, call: Call) -> None:
        """It has issued all its collectives."""
        call.out = self._issued(tuple(call.at))

    def doing(self, key: object, what: str | None) -> None:
        """This rank is busy with something that is no graph; None ends it."""
        if what is None:
            self._doing.pop(key, None)
        else:
            self._doing[key] = what

    def look(self) -> dict[str, Any]:
        """Where this rank stands now, as JSON values. `groups`: by name, how many collectives it has issued and who
        the members are."""
        groups: dict[str, list[Any]] = {}
        for name, count in self._issued(compat.group_names()).items():
            groups[name] = [count, self._group(name)[0]]
        self._name_late_calls()
        calls = [{"graph": c.graph, "call": c.n, "at": c.at, "out": c.out} for c in list(self._calls)]
        return {"doing": list(self._doing.values()), "calls": calls, "groups": groups}

    def frames(self) -> list[str]:
        """Where the main thread and those in a graph are, `file:line in function: text`, the user's line first."""
        busy = [call.thread for call in list(self._calls) if call.out is None]
        threads = dict.fromkeys((threading.main_thread().ident, *busy))
        running = sys._current_frames()
        found: dict[str, None] = {}
        for thread in threads:
            frame = running.get(thread) if thread is not None else None
            if frame is not None:
                found.update(dict.fromkeys(_telling(frame)))
        return list(found)

    def _follow(self, result: Any, backward: Callable[[], Place | None]) -> None:
        """Hook the autograd node of a compiled forward. It holds no tensor and ends with its node."""
        node = _backward_node(result)
        if node is None:
            return
        open_calls: list[Call] = []

        def begins(_: Any) -> None:
            place = backward()
            if place is not None:
                open_calls.append(self.enter(place))
            else:  # it compiles now, in its first call
                at = self._issued(compat.group_names())
                call = Call(_UNKNOWN, 0, threading.get_ident(), at, late=backward)
                self._calls.append(call)
                open_calls.append(call)

        def ends(*_: Any) -> None:
            if open_calls:
                self.leave(open_calls.pop())
                self._name_late_calls()

        node.register_prehook(begins)
        node.register_hook(ends)

    def _name_late_calls(self) -> None:
        with self._lock:
            for call in list(self._calls):
                place = call.late() if call.late is not None else None
                if place is not None:
                    call.graph, call.n, call.late = place.graph, self._counts[place.graph], None
                    self._counts[place.graph] += 1

    def _group(self, name: str) -> tuple[str, tuple[torch.device, ...]]:
        known = self._groups.get(name)
        if known is None:
            known = spell(compat.group_ranks(name) or ()), compat.counting_devices(name)
            self._groups[name] = known
        return known

    def _issued(self, groups: Sequence[str]) -> dict[str, int]:
        counts = {name: compat.issued(name, self._group(name)[1]) for name in groups}
        return {name: count for name, count in counts.items() if count is not None}


def _backward_node(result: Any) -> Any:
    """The node that AOTAutograd made for this forward; outputs that are views have it one step further."""
    for value in result if isinstance(result, (tuple, list)) else (result,):
        node = value.grad_fn if isinstance(value, torch.Tensor) and value.requires_grad else None
        for candidate in (node, *(step for step, _ in node.next_functions)) if node is not None else ():
            if candidate is not None and candidate.name() == _BACKWARD:
                return candidate
    return None


def _telling(innermost: FrameType) -> list[str]:
    """The line of the user's own code, of a compiled graph in it, and the innermost one, as far as there are."""
    ours = str(Path(__file__).parent.parent)
    packages = tuple(f"{ours}/{name}/" for name in ("collective_identity", "fsdp_hooks", "inductor_passes"))
    foreign = (str(Path(torch.__file__).parent), sysconfig.get_path("stdlib"), sysconfig.get_path("purelib"), *packages)
    found = [_line(innermost)]
    generated = user = False
    frame: FrameType | None = innermost
    while frame is not None and not user:
        name = frame.f_code.co_filename
        if not generated and any(mark in name for mark in _GENERATED):
            generated = True
            found.append(_line(frame))
        elif frame.f_lineno == frame.f_code.co_firstlineno and frame.f_code.co_name != "<module>":
            pass  # the code that Dynamo put in a function's place: it has the function's first line everywhere
        elif not name.startswith((*foreign, "<")) and not any(mark in name for mark in _GENERATED):
            user = True
            found.append(_line(frame))
        frame = frame.f_back
    return list(dict.fromkeys(reversed(found)))


def _line(frame: FrameType) -> str:
    code = frame.f_code
    text = linecache.getline(code.co_filename, frame.f_lineno).strip()
    file = code.co_filename.partition(" from ")[0]  # FX names the maker of generated code too
    return f"{file}:{frame.f_lineno} in {code.co_name}: {text.partition(';')[0][:120]}"
