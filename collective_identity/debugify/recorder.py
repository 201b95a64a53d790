"""Who created a node, erased it, or wrote its metadata? The Python stack of each, while a pass runs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Final

from torch import fx

from ..callers import stack
from ..lineage import Step, Takeover, Watch
from ..subgraphs import graph_modules

_CUSTOM: Final = "custom"
Stack = tuple[str, ...]


class Recorder:
    """What a pass did to one graph and its sub-graphs.

    Attributes:
        log: in order, every start node that was erased, and for each rebuilt graph old node → new node.
        created: new node → the stack that created it.
        written: node → the last stack that wrote its ``meta["custom"]`` as a whole.
    """

    def __init__(self) -> None:
        self.log: list[Takeover | Mapping[fx.Node, fx.Node]] = []
        self.created: dict[fx.Node, Stack] = {}
        self.written: dict[fx.Node, Stack] = {}
        self._last: fx.Node | None = None

    def who(self, node: fx.Node) -> Stack:
        """The stack to blame for what a node carries: the last writer, else the creator, else nothing."""
        return self.written.get(node) or self.created.get(node, ())

    @property
    def takeovers(self) -> list[Takeover]:
        """Every start node that was erased, in order."""
        return [one for one in self.log if isinstance(one, Takeover)]

    @contextmanager
    def recording(self, gm: fx.GraphModule) -> Iterator[None]:
        """Record while open; hooks and watched metadata are gone afterwards."""
        watches = [
            Watch(
                module,
                self._step,
                name=lambda: "",
                stack=_stack,
                on_create=self._on_create,
                on_rebuilt=self.log.append,
            )
            for module in graph_modules(gm)
        ]
        watched = [node for module in graph_modules(gm) for node in module.graph.nodes]
        for node in watched:
            node.meta = _Meta(node.meta, self, node)
        try:
            with _all(watches):
                yield
        finally:
            for node in (*watched, *self.created):
                if isinstance(node.meta, _Meta):
                    node.meta = dict(node.meta)

    def _step(self, step: Step) -> None:
        self.log += step.takeovers

    def _on_create(self, node: fx.Node) -> None:
        if self._last is not None and type(self._last.meta) is dict:  # node_copy gave it another one
            self._last.meta = _Meta(self._last.meta, self, self._last)
        self._last = node
        self.created[node] = _stack()
        node.meta = _Meta(node.meta, self, node)


def _stack() -> Stack:
    return stack(until="_call_pass")


@contextmanager
def _all(watches: list[Watch]) -> Iterator[None]:
    if not watches:
        yield
        return
    with watches[0].watching(), _all(watches[1:]):
        yield


class _Meta(dict[str, Any]):
    """A node's metadata that notes who writes ``custom``. A copy is a plain dict."""

    def __init__(self, meta: dict[str, Any], recorder: Recorder, node: fx.Node) -> None:
        super().__init__(meta)
        self._recorder, self._node = recorder, node

    def _note(self, wrote: bool) -> None:
        if wrote:
            self._recorder.written[self._node] = _stack()

    def __setitem__(self, key: str, value: Any) -> None:
        self._note(key == _CUSTOM)
        super().__setitem__(key, value)

    def __delitem__(self, key: str) -> None:
        self._note(key == _CUSTOM)
        super().__delitem__(key)

    def update(self, *args: Any, **kwargs: Any) -> None:
        given = dict(*args, **kwargs)
        self._note(_CUSTOM in given)
        super().update(given)

    def setdefault(self, key: str, default: Any = None) -> Any:
        self._note(key == _CUSTOM and key not in self)
        return super().setdefault(key, default)

    def pop(self, key: str, *default: Any) -> Any:
        self._note(key == _CUSTOM and key in self)
        return super().pop(key, *default)

    def clear(self) -> None:
        self._note(_CUSTOM in self)
        super().clear()

    def copy(self) -> dict[str, Any]:
        return dict(self)

    def __copy__(self) -> dict[str, Any]:
        return dict(self)

    def __deepcopy__(self, memo: dict[int, Any]) -> dict[str, Any]:
        import copy

        return copy.deepcopy(dict(self), memo)

    def __reduce__(self) -> Any:
        return dict, (dict(self),)
