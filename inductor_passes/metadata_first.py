"""Have torch's own classifiers read identities first, opt-in and for as long as a context is open.

Torch takes a collective for FSDP's by the shape of the graph. Inside `metadata_first` the functions that decide this
ask the collective's identity; only one without a valid explicit identity is judged by shape, by torch's own function.
What is replaced, by version, is `upstream.CLASSIFIERS`.
"""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Final

import torch
from torch import fx

from collective_identity import classify, compat, identity_of, launch_of
from collective_identity.roles import is_fsdp

from .upstream import (
    ALL_REDUCES_BY_MB,
    CLASSIFIERS,
    FX_PASSES,
    Classifier,
    UnsupportedTorch,
    fx_passes_module,
    group_names,
)

Wrap = Callable[[Callable[..., Any]], Callable[..., Any]]


class ForeignWrapper(RuntimeError):
    """Another package has replaced one of torch's classifiers already; the text names it."""


def _says(start: object) -> bool | None:
    """Whether an explicit identity calls the collective FSDP's; None when it has none."""
    identity = identity_of(start) if isinstance(start, fx.Node) else None
    return is_fsdp(identity.role) if identity is not None and identity.explicit else None


def _by_start(original: Callable[..., Any]) -> Callable[..., Any]:
    def classifier(node: fx.Node, *args: Any, **kwargs: Any) -> bool:
        said = _says(node)
        return bool(original(node, *args, **kwargs)) if said is None else said

    return classifier


def _by_transport(word: str) -> Wrap:
    def wrap(original: Callable[..., Any]) -> Callable[..., Any]:
        def classifier(node: fx.Node, *args: Any, **kwargs: Any) -> bool:
            launch = launch_of(node)
            said = _says(node) if launch is not None and launch.transport.value == word else None
            return bool(original(node, *args, **kwargs)) if said is None else said

        return classifier

    return wrap


def _by_wait(original: Callable[..., Any]) -> Callable[..., Any]:
    def classifier(wait: fx.Node) -> bool:
        said = _says(wait.args[0]) if wait.args else None
        return bool(original(wait)) if said is None else said

    return classifier


def _groups(original: Callable[..., Any]) -> Callable[..., Any]:
    """A group is FSDP's because a collective on it is: one that says so, else one that looks so and says nothing."""

    def classifier(gm: fx.GraphModule) -> tuple[Any, int | None]:
        found: list[str] = []
        size: int | None = None
        for node, identity in classify(gm, rules="compatible").items():
            launch = launch_of(node)
            if launch is None or launch.group is None or identity is None or not is_fsdp(identity.role):
                continue
            if not identity.explicit and launch.transport.value != "all_gather":
                continue
            found.append(launch.group)
            size = launch.group_size if size is None else size
        return group_names(found), size

    return classifier


def _all_reduces(original: Callable[..., Any]) -> Callable[..., Any]:
    """Only all-reduces that an identity calls FSDP's, where any says anything; merging is torch's own."""

    def bucket(
        gm: fx.GraphModule,
        bucket_cap_mb_by_bucket_idx: Callable[[int], float] | None = None,
        fsdp_groups: Any = None,
    ) -> None:
        where, name = ALL_REDUCES_BY_MB
        module = fx_passes_module(where)
        by_mb = getattr(module, name)

        def filtered(gm: fx.GraphModule, cap: Any, filter_wait_node: Any = None, **kwargs: Any) -> Any:
            def mine(wait: fx.Node) -> bool:
                said = _says(wait.args[0]) if wait.args else None
                return bool(filter_wait_node is None or filter_wait_node(wait)) if said is None else said

            return by_mb(gm, cap, filter_wait_node=mine, **kwargs)

        with _bound(module, name, filtered):
            original(gm, bucket_cap_mb_by_bucket_idx, fsdp_groups)

    return bucket


def _replacing(original: Callable[..., Any]) -> Callable[..., Any]:
    """Torch's lowering of "FSDP collectives" takes every gather and scatter; not one that says it is something else."""

    def replace(node: fx.Node, *args: Any, **kwargs: Any) -> Any:
        return False if _says(node) is False else original(node, *args, **kwargs)

    return replace


_WRAPS: Final = MappingProxyType(
    {
        "gather": _by_start,
        "gather by wait": _by_wait,
        "scatter by wait": _by_wait,
        "gather in the bucketer": _by_transport("all_gather"),
        "scatter in the bucketer": _by_transport("reduce_scatter"),
        "groups": _groups,
        "all-reduces": _all_reduces,
        "low contention": _replacing,
        "low contention with a target": _replacing,
    }
)
"""How each of torch's classifiers is made to read identities first."""


@contextmanager
def metadata_first() -> Iterator[None]:
    """Torch's classifiers read identities first while open; afterwards they are torch's own again.

    Module attributes are the process's: while any thread has it open, every thread's compiles see it. It may be
    opened again inside, and in several threads at once; the last one to leave puts the originals back.

    Raises:
        UnsupportedTorch: this torch lacks a classifier it should have, has one with other parameters, or binds
            another function where the classifier was bound again.
        ForeignWrapper: another package has replaced one already; both cannot decide.
        RuntimeError: on leaving, when somebody replaced one meanwhile; theirs stays, the others are put back.
    """
    _SWITCH.enter()
    try:
        yield
    finally:
        _SWITCH.leave()


@dataclass(frozen=True, slots=True)
class _Binding:
    module: Any
    name: str
    original: Callable[..., Any]
    ours: Callable[..., Any]


class _Switch:
    """How many have the context open, and what to put back."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._open = 0
        self._bindings: tuple[_Binding, ...] = ()

    def enter(self) -> None:
        with self._lock:
            if self._open == 0:
                bindings = tuple(_bindings())  # all are checked before any is replaced
                for one in bindings:
                    setattr(one.module, one.name, one.ours)
                self._bindings = bindings
            self._open += 1

    def leave(self) -> None:
        with self._lock:
            self._open -= 1
            if self._open:
                return
            taken = []
            for one in self._bindings:
                found = getattr(one.module, one.name, None)
                if found is one.ours:
                    setattr(one.module, one.name, one.original)
                else:
                    taken.append(f"{one.module.__name__}.{one.name} ({_from(found)})")
            self._bindings = ()
        if taken:
            raise RuntimeError(
                f"expected our own wrappers when metadata_first was left, found {', '.join(taken)}: leave contexts in "
                "the reverse order in which they were entered"
            )


_SWITCH: Final = _Switch()


def _bindings() -> Iterator[_Binding]:
    version = compat.torch_version()
    for asked, name in CLASSIFIERS.items():
        if version < name.since or (name.until is not None and version > name.until):
            continue
        module = _module(name.module)
        original = _checked(module, name)
        ours = _WRAPS[asked](original)
        ours.__module__, ours.__name__ = __name__, name.function
        yield _Binding(module, name.function, original, ours)
        for where, since in name.rebound:
            if version < since:
                continue
            again = _module(where)
            found = getattr(again, name.function, None)
            if found is not original:
                _refuse(again, name.function, found, f"{module.__name__}.{name.function}")
            yield _Binding(again, name.function, original, ours)


def _module(name: str) -> Any:
    try:
        return fx_passes_module(name)
    except ImportError as error:
        raise UnsupportedTorch(
            f"metadata_first expects {FX_PASSES}.{name} (torch 2.11 to 2.15), not found in torch {torch.__version__}: "
            "use a released torch in that range, or leave metadata_first out"
        ) from error


def _checked(module: Any, name: Classifier) -> Callable[..., Any]:
    found: Any = getattr(module, name.function, None)
    if not inspect.isfunction(found) or found.__module__ != module.__name__ or hasattr(found, "__wrapped__"):
        _refuse(module, name.function, found, f"torch's own function ({', '.join(name.parameters)})")
    parameters = tuple(inspect.signature(found).parameters)
    if parameters != name.parameters:
        raise UnsupportedTorch(
            f"metadata_first expects {module.__name__}.{name.function}({', '.join(name.parameters)}), found "
            f"({', '.join(parameters)}) in torch {torch.__version__}: use a released torch from 2.11 to 2.15, or leave "
            "metadata_first out"
        )
    return found  # type: ignore[no-any-return]


def _refuse(module: Any, name: str, found: object, expected: str) -> None:
    place = f"{module.__name__}.{name}"
    if found is None:
        raise UnsupportedTorch(
            f"metadata_first expects {place} ({expected}), not found in torch {torch.__version__}: use a released "
            "torch from 2.11 to 2.15, or leave metadata_first out"
        )
    raise ForeignWrapper(
        f"metadata_first expects {expected} at {place}, found one of {_from(found)}: only one package can decide; "
        "take its patch off, or leave metadata_first out"
    )


def _from(found: object) -> str:
    named = found if hasattr(found, "__qualname__") else type(found)
    return f"{named.__module__}.{named.__qualname__}"


@contextmanager
def _bound(module: Any, name: str, value: Any) -> Iterator[None]:
    before = getattr(module, name)
    setattr(module, name, value)
    try:
        yield
    finally:
        setattr(module, name, before)
