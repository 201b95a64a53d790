"""The same for plain ``torch.compile(mode="lite")``, without the backend of this package."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch import fx

from .. import upstream
from .decompose import select
from .lowering import prepare
from .marks import marks_digest

_PACKAGE = Path(__file__).parent.parent


@contextmanager
def one_trace() -> Iterator[None]:
    """While entered, ``torch.compile(mode="lite")`` and equal options compile marked regions, in one trace.

    Enter it around the first call of the compiled function, when it compiles; a backward that compiles later needs
    it no more. Compiles that are not lite, or have decompositions of their own, are left alone, and so are those of
    other threads, which may enter and leave meanwhile.

        compiled = torch.compile(model, mode="lite")
        with one_trace():
            loss = compiled(batch).sum()
        loss.backward()

    Raises:
        UnsupportedTorch: ``compile_fx`` is not as it was read.
    """
    with upstream.compile_fx_replaced(_compile):
        yield


def _compile(original: Callable[..., Any], call: inspect.BoundArguments) -> Any:
    gm, given = call.arguments["model_"], call.arguments
    selection = select(given["config_patches"] or {})
    if selection.table is None or given["decompositions"] is not None or not isinstance(gm, fx.GraphModule):
        return original(*call.args, **call.kwargs)
    user = upstream.callers_config({}).cache_key_tag
    inner = given["inner_compile"]

    def prepared(graph: fx.GraphModule, inputs: Sequence[Any], *args: Any, **kwargs: Any) -> Any:
        with selection.as_asked(), upstream.cache_key(_tag(gm, graph), user):
            prepare(graph)
            return inner(graph, inputs, *args, **kwargs)

    given.update(
        inner_compile=prepared, config_patches=dict(selection.options), decompositions=selection.table
    )
    with upstream.cache_key(_tag(gm), user):
        return original(*call.args, **call.kwargs)


def _tag(*graphs: fx.GraphModule) -> str:
    """The marks of what was captured and, for Inductor's key, of what AOTAutograd traced from it; and our sources."""
    return f"lite:{upstream.source_hash(_PACKAGE)}:{':'.join(map(marks_digest, graphs))}"
