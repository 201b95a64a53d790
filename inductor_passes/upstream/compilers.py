"""How is a graph compiled? By Inductor, or by AOTAutograd alone."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import fx
from torch._dynamo.backends.common import aot_autograd

from collective_identity.ledger import GraphKind
from collective_identity.profiling import mark_graph

GraphCompiler = Callable[..., Any]


def _compile_fx() -> Callable[..., Any]:
    from torch._inductor.compile_fx import compile_fx

    return compile_fx


def inductor(
    gm: fx.GraphModule,
    inputs: Sequence[Any],
    around: Callable[[GraphCompiler], GraphCompiler],
    patches: Mapping[str, Any],
    decompositions: Mapping[Any, Any] | None = None,
    provider: Callable[[], Mapping[Any, Any]] | None = None,
) -> Callable[..., Any]:
    """Compile with Inductor; ``around`` wraps the compiler of each forward, backward or inference graph.

    ``decompositions`` and their ``provider``: a table for this compile only, and what lowering reads it from.
    """
    from torch._inductor.compile_fx import compile_fx, compile_fx_inner

    inner = around(compile_fx_inner if provider is None else reading(provider, compile_fx_inner))
    more = {} if decompositions is None else {"decompositions": decompositions}
    return compile_fx(gm, inputs, inner_compile=inner, config_patches=dict(patches) or None, **more)  # type: ignore[return-value, arg-type]


def reading(provider: Callable[[], Mapping[Any, Any]], inner: GraphCompiler) -> GraphCompiler:
    """``inner``, whose lowering reads decompositions from ``provider`` (torch 2.11 and 2.12 have no such argument)."""

    @functools.wraps(inner)
    def compile_graph(gm: fx.GraphModule, inputs: Sequence[Any], *args: Any, **kwargs: Any) -> Any:
        if "get_decomp_fn" in kwargs:
            kwargs["get_decomp_fn"] = provider
        return inner(gm, inputs, *args, **kwargs)

    return compile_graph


def aot_eager(
    gm: fx.GraphModule, inputs: Sequence[Any], compiler: Callable[[fx.GraphModule, GraphKind], None]
) -> Callable[..., Any]:
    """AOTAutograd with Inductor's partitioner, each graph run eagerly after ``compiler(graph, kind)``."""
    from functorch.compile import make_boxed_func
    from torch._functorch.partitioners import min_cut_rematerialization_partition

    def compile_as(kind: GraphKind) -> Callable[[fx.GraphModule, Sequence[Any]], Any]:
        def compile_graph(graph: fx.GraphModule, _: Sequence[Any]) -> Any:
            compiler(graph, kind)
            mark_graph(graph)
            graph.recompile()
            return make_boxed_func(graph.forward)

        return compile_graph

    backend = aot_autograd(
        fw_compiler=compile_as("forward"),
        bw_compiler=compile_as("backward"),
        inference_compiler=compile_as("inference"),
        partition_fn=min_cut_rematerialization_partition,
        keep_inference_input_mutations=True,
    )
    return backend(gm, inputs)  # type: ignore[no-any-return]


def kind_of_inner(kwargs: Mapping[str, Any]) -> GraphKind:
    """Which graph Inductor's inner compiler was called for."""
    if kwargs.get("is_backward"):
        return "backward"
    return "inference" if kwargs.get("is_inference") else "forward"
