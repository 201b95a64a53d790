"""One compile under a policy: alone as a ``torch.compile`` backend, or around another backend's compile."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import fx

from .. import upstream
from ..lite_mode import OneTraceTable, is_marked, lite_parts
from . import torch_names
from .decompositions import Provider, ScopedTable
from .faults import PolicyError
from .lowering import retarget
from .model import OperatorPolicy

logger = logging.getLogger("collective_identity.inductor_passes.device_policy")


def compile_under(
    policy: OperatorPolicy | None,
    gm: fx.GraphModule,
    inputs: Sequence[Any],
    around: Callable[[upstream.GraphCompiler], upstream.GraphCompiler],
    options: Mapping[str, Any],
    table: OneTraceTable | None = None,
) -> Callable[..., Any]:
    """Compile with Inductor, ``around`` its inner compiler, under ``policy``; without one exactly as torch does.

    ``table``: lite mode's decompositions, for marked code only. The policy then has a say in marked code only; a
    node that it lowers is no longer an operator that torch could write into a cache key: call this with the caches
    off.

    Raises:
        PolicyError: the policy changed since it was built, or Inductor is in a mode that policies do not cover.
    """
    if policy is None:
        return upstream.inductor(gm, inputs, around, options, table)
    if table is None:
        return upstream.inductor(gm, inputs, around, **scope(policy, gm, options))
    refuse_modes(policy, gm, {**options, upstream.LITE_SWITCH: False, **torch_names.PASSES_ON})  # it uses no pass
    scoped = ScopedTable(policy, *torch_names.stock_decompositions(options))
    inner = _lowering_marked(policy)
    return upstream.inductor(
        gm, inputs, lambda compiler: around(inner(compiler)), options, table.over(scoped), Provider(scoped)
    )


def _lowering_marked(policy: OperatorPolicy) -> Callable[[upstream.GraphCompiler], upstream.GraphCompiler]:
    """In lite mode no pass runs that could hand nodes to the policy: done just before, marked nodes alone."""

    def wrap(compiler: upstream.GraphCompiler) -> upstream.GraphCompiler:
        @functools.wraps(compiler)
        def compile_graph(gm: fx.GraphModule, *args: Any, **kwargs: Any) -> Any:
            for part in gm.modules():
                if isinstance(part, fx.GraphModule):
                    retarget(part.graph, policy, is_marked)
            return compiler(gm, *args, **kwargs)

        return compile_graph

    return wrap


def refuse_modes(policy: OperatorPolicy, gm: fx.GraphModule, options: Mapping[str, Any]) -> None:
    """Refuse a policy that changed since it was built, and every mode of Inductor that policies do not cover.

    Raises:
        PolicyError: the message lists all of it.
        UnsupportedTorch: a private name is not as it was read.
    """
    torch_names.check_names()
    policy.check_unchanged()
    modes = torch_names.unsupported_modes(options)
    if not modes and lite_parts(gm):
        modes = ["a nested region is compiled in lite mode, which would get the policy's decompositions: leave one out"]
    if modes:
        raise PolicyError(f"policy {policy.name!r} cannot be applied to this compile:", modes)


def scope(
    policy: OperatorPolicy,
    gm: fx.GraphModule,
    options: Mapping[str, Any],
    stock: Mapping[Any, Callable[..., Any]] | None = None,
) -> dict[str, Any]:
    """What one compile under ``policy`` adds: the pass in ``patches`` and the table with its provider.

    Everything is read here, once: a lazy backward compiles later and elsewhere, with these same objects.
    """
    refuse_modes(policy, gm, options)

    def run(graph: fx.Graph) -> None:
        policy.check_unchanged()  # a backward is lowered later, and saved under the identity as it was
        logger.debug("policy %s lowers %d nodes", policy.name, retarget(graph, policy))

    table, name = torch_names.stock_decompositions(options) if stock is None else (stock, "given")
    scoped = ScopedTable(policy, table, name)
    patches = {**options, **torch_names.post_grad_post_pass(run, policy.identity, options)}
    return {"patches": patches, "decompositions": scoped, "provider": Provider(scoped)}


def _check_options(options: Mapping[str, Any]) -> None:
    unknown = [repr(name) for name in options if not upstream.inductor_option_exists(name)]
    if unknown:
        raise PolicyError(f"expected options of Inductor (torch._inductor.list_options()), found {', '.join(unknown)}")


@dataclass(frozen=True, slots=True)
class PolicyBackend:
    """``torch.compile(backend=...)``: Inductor under one policy.

    Backends are equal when policy and options are, so Dynamo takes a graph compiled under an equal policy again
    and compiles under any other.
    """

    policy: OperatorPolicy
    options: tuple[tuple[str, Any], ...] = ()

    def __post_init__(self) -> None:
        _check_options(dict(self.options))

    def __call__(
        self,
        gm: fx.GraphModule,
        inputs: Sequence[Any],
        *,
        mode: str | None = None,
        options: Mapping[str, Any] | None = None,
    ) -> Callable[..., Any]:
        """Compile one graph that Dynamo captured.

        Args:
            gm: the graph.
            inputs: its inputs, real or fake tensors.
            mode: a ``torch.compile`` mode; its Inductor options come first.
            options: Inductor's options, over those that the backend was made with.

        Raises:
            PolicyError: see :func:`compile_under`.
        """
        upstream.check_version()
        if mode and mode not in upstream.mode_options():
            raise PolicyError(f"mode expects one of {', '.join(upstream.mode_options())}, found {mode!r}")
        chosen = {**(upstream.mode_options()[mode] if mode else {}), **dict(self.options), **(options or {})}
        _check_options(chosen)
        return compile_under(self.policy, gm, inputs, lambda inner: inner, chosen)

    def get_compiler_config(self) -> Mapping[str, Any]:
        """Inductor's configuration for this backend, which Dynamo keeps with a compiled function."""
        return torch_names.patched_config(dict(self.options))

    def __hash__(self) -> int:
        return hash((self.policy, tuple(name for name, _ in self.options)))
