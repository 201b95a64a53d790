"""One compile under a policy: alone as a ``torch.compile`` backend, or around another backend's compile."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import fx

from .. import upstream
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
    table: Mapping[Any, Any] | None = None,
) -> Callable[..., Any]:
    """Compile with Inductor, ``around`` its inner compiler, under ``policy``; without one exactly as torch does.

    Raises:
        PolicyError: the policy changed since it was built, or Inductor is in a mode that policies do not cover.
    """
    if policy is None:
        return upstream.inductor(gm, inputs, around, options, table)
    return upstream.inductor(gm, inputs, around, **scope(policy, options))


def scope(
    policy: OperatorPolicy, options: Mapping[str, Any], stock: Mapping[Any, Callable[..., Any]] | None = None
) -> dict[str, Any]:
    """What one compile under ``policy`` adds: the pass in ``patches`` and the table with its provider.

    Everything is read here, once: a lazy backward compiles later and elsewhere, with these same objects.
    """
    policy.check_unchanged()
    modes = upstream.unsupported_modes(options)
    if modes:
        raise PolicyError(f"policy {policy.name!r} cannot be applied to this compile:", modes)

    def run(graph: fx.Graph) -> None:
        logger.debug("policy %s lowers %d nodes", policy.name, retarget(graph, policy))

    table, name = upstream.stock_decompositions() if stock is None else (stock, "given")
    scoped = ScopedTable(policy, table, name)
    patches = {**options, **upstream.post_grad_post_pass(run, policy.identity, options)}
    return {"patches": patches, "decompositions": scoped, "provider": Provider(scoped)}


@dataclass(frozen=True, slots=True)
class PolicyBackend:
    """``torch.compile(backend=...)``: Inductor under one policy.

    Backends are equal when policy and options are, so Dynamo takes a graph compiled under an equal policy again
    and compiles under any other.
    """

    policy: OperatorPolicy
    options: tuple[tuple[str, Any], ...] = ()

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
        chosen = {**(upstream.mode_options()[mode] if mode else {}), **dict(self.options), **(options or {})}
        return compile_under(self.policy, gm, inputs, lambda inner: inner, chosen)

    def get_compiler_config(self) -> Mapping[str, Any]:
        """Inductor's configuration for this backend, which Dynamo keeps with a compiled function."""
        return upstream.patched_config(dict(self.options))

    def __hash__(self) -> int:
        return hash((self.policy, tuple(name for name, _ in self.options)))
