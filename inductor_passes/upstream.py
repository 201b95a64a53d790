"""Every private torch name that the passes use, in one place.

Read in torch 2.11.0, 2.12.0, 2.13.0, 2.14.1 and 2.15.0. Nothing here patches torch: configuration is patched for
the duration of one compile, in the thread that compiles, and put back.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch._functorch.config as functorch_config
import torch._inductor.config as inductor_config
import torch.compiler.config as compiler_config
from torch import fx
from torch._dynamo.backends.common import aot_autograd
from torch._inductor.custom_graph_pass import CustomGraphPass, get_hash_for_files
from torch.utils.checkpoint import CheckpointPolicy

from collective_identity.ledger import GraphKind

SUPPORTED = ((2, 11), (2, 15))

GraphCompiler = Callable[..., Any]


class UnsupportedTorch(RuntimeError):
    """This torch is not one whose compiler the passes know."""


def check_version() -> None:
    """Refuse a torch outside 2.11 to 2.15, or one whose hooks are not as they were read."""
    found = tuple(int(part) for part in torch.__version__.split("+")[0].split(".")[:2])
    low, high = SUPPORTED
    if not low <= found <= high:
        raise UnsupportedTorch(
            f"inductor_passes expects torch {low[0]}.{low[1]} to {high[0]}.{high[1]}, found {torch.__version__}: "
            "install a torch in that range, or a newer collective-identity"
        )
    missing = [
        f"{module.__name__}.{name}"
        for module, name in (
            (functorch_config, "joint_custom_pass"),
            (inductor_config, "post_grad_custom_pre_pass"),
            (inductor_config, "fallback_by_default"),
            (compiler_config, "cache_key_tag"),
        )
        if not hasattr(module, name)
    ]
    if "inner_compile" not in inspect.signature(_compile_fx()).parameters:
        missing.append("torch._inductor.compile_fx.compile_fx(inner_compile=)")
    if missing:
        raise UnsupportedTorch(
            f"inductor_passes expects {', '.join(missing)} (seen in torch 2.11 to 2.15), not found in torch "
            f"{torch.__version__}: use a released torch in that range"
        )


def inductor_flag(name: str) -> Any:
    """The value that an Inductor option has now, in this thread; dotted names reach nested options."""
    return functools.reduce(getattr, name.split("."), inductor_config)


def inductor_option_exists(name: str) -> bool:
    """True when ``name`` is an option of Inductor's configuration."""
    return name in inductor_config._config  # type: ignore[attr-defined]


def mode_options() -> Mapping[str, Mapping[str, Any]]:
    """Inductor's options of every ``torch.compile`` mode."""
    return torch._inductor.list_mode_options()


@dataclass(frozen=True, slots=True)
class CallersConfig:
    """What the caller has configured where we add to it, read when the backend is called.

    A backward that compiles later, in another thread, does not see the caller's ``config.patch`` (torch 2.13).
    """

    cache_key_tag: str
    post_grad_passes: tuple[Any, ...]


def callers_config(options: Mapping[str, Any]) -> CallersConfig:
    """The configuration of this thread, with the Inductor ``options`` of this ``torch.compile`` in force."""
    user = options.get("post_grad_custom_pre_pass", inductor_config.post_grad_custom_pre_pass)
    passes = tuple(user) if isinstance(user, (list, tuple)) else () if user is None else (user,)
    return CallersConfig(compiler_config.cache_key_tag, passes)


@contextmanager
def cache_key(tag: str, user: str) -> Iterator[None]:
    """Append ``tag`` to the user's ``cache_key_tag``, which is in the keys of both compile caches.

    Nesting is harmless: a tag that is there already is not appended again.
    """
    if user.endswith(tag):
        yield
        return
    with compiler_config.patch(cache_key_tag=f"{user}+{tag}" if user else tag):  # type: ignore[attr-defined]
        yield


@contextmanager
def caches_disabled(yes: bool) -> Iterator[None]:
    """Compile without reading or writing any cache."""
    if not yes:
        yield
        return
    with compiler_config.patch(force_disable_caches=True):  # type: ignore[attr-defined]
        yield


@contextmanager
def joint_pass(run: Callable[[fx.GraphModule], None]) -> Iterator[None]:
    """Run ``run`` on every joint graph before it is partitioned, after a pass that the user set there."""
    user = functorch_config.joint_custom_pass

    def both(gm: fx.GraphModule, inputs: Sequence[Any]) -> fx.GraphModule:
        if callable(user):
            gm = user(gm, inputs)
        run(gm)
        return gm

    with functorch_config.patch(joint_custom_pass=both):  # type: ignore[attr-defined]
        yield


def removes_common_subexpressions() -> bool:
    """Whether the partitioner makes equal nodes one (``torch._functorch.config.cse``)."""
    return bool(getattr(functorch_config, "cse", True))


def without_common_subexpressions(graph: fx.Graph) -> fx.Graph:
    """The copy of a graph that the partitioner goes on with. Marks mutation regions in ``graph``, as it will itself."""
    from torch._functorch.compile_utils import fx_graph_cse

    return fx_graph_cse(graph)


def is_symbolic(value: object) -> bool:
    """Whether an argument is a symbolic number, which cannot be hashed."""
    return isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool))


class _PostGrad(CustomGraphPass):
    """The user's ``post_grad_custom_pre_pass`` first, then ours, as one pass (2.11 and 2.12 have one slot)."""

    def __init__(self, run: Callable[[fx.GraphModule], None], identity: str, user: tuple[Any, ...]) -> None:
        self._run, self._identity, self._user = run, identity, user

    def __call__(self, graph: fx.Graph) -> None:
        for one in self._user:
            one(graph)
        gm = graph.owning_module
        assert gm is not None, "Inductor's post-grad stage works on the graph of a module"
        self._run(gm)

    def uuid(self) -> Any | None:
        users = [one.uuid() if isinstance(one, CustomGraphPass) else None for one in self._user]
        return None if any(one is None for one in users) else (self._identity, *users)


@contextmanager
def post_grad_pass(
    run: Callable[[fx.GraphModule], None], identity: str, user: tuple[Any, ...]
) -> Iterator[None]:
    """Run the user's passes, then ``run``, on the graph about to be lowered; ``identity`` enters its cache key."""
    both = _PostGrad(run, identity, user)
    with inductor_config.patch(post_grad_custom_pre_pass=both):  # type: ignore[attr-defined]
        yield


def _compile_fx() -> Callable[..., Any]:
    from torch._inductor.compile_fx import compile_fx

    return compile_fx


def inductor(
    gm: fx.GraphModule,
    inputs: Sequence[Any],
    around: Callable[[GraphCompiler], GraphCompiler],
    patches: Mapping[str, Any],
) -> Callable[..., Any]:
    """Compile with Inductor; ``around`` wraps the compiler of each forward, backward or inference graph."""
    from torch._inductor.compile_fx import compile_fx, compile_fx_inner

    return compile_fx(gm, inputs, inner_compile=around(compile_fx_inner), config_patches=dict(patches) or None)  # type: ignore[return-value]


def aot_eager(
    gm: fx.GraphModule, inputs: Sequence[Any], compiler: Callable[[fx.GraphModule, GraphKind], None]
) -> Callable[..., Any]:
    """AOTAutograd with Inductor's partitioner, each graph run eagerly after ``compiler(graph, kind)``."""
    from functorch.compile import make_boxed_func
    from torch._functorch.partitioners import min_cut_rematerialization_partition

    def compile_as(kind: GraphKind) -> Callable[[fx.GraphModule, Sequence[Any]], Any]:
        def compile_graph(graph: fx.GraphModule, _: Sequence[Any]) -> Any:
            compiler(graph, kind)
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


def custom_value(node: fx.Node, key: str) -> Any:
    """A producer's own annotation on a node, None when there is none."""
    custom = node.meta.get("custom")
    return custom.get(key) if isinstance(custom, Mapping) else None


def mark_recompute(node: fx.Node, region: int) -> None:
    """Have the partitioner compute ``node`` again in backward; ``region`` orders checkpoint regions."""
    node.meta["recompute"] = CheckpointPolicy.MUST_RECOMPUTE
    node.meta["ac_graph_id"] = region


def cache_dir() -> Path:
    """Inductor's cache folder."""
    from torch._inductor.runtime.cache_dir_utils import cache_dir as inductor_cache_dir

    return Path(inductor_cache_dir())


@functools.cache
def source_hash(*packages: Path) -> str:
    """Hash of the Python sources of packages: any edit is another pass."""
    files = tuple(str(path) for package in packages for path in sorted(package.rglob("*.py")))
    return get_hash_for_files(files).hex()
