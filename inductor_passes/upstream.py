"""Every private torch name that the passes use, in one place.

Read in torch 2.11.0, 2.12.0, 2.13.0, 2.14.1 and 2.15.0. Configuration is patched for the duration of one compile, in
the thread that compiles, and put back. One function of torch's is replaced, while a user asks for it
(``compile_fx_replaced``), and then for the threads that do.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import operator
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
import torch._functorch.config as functorch_config
import torch._inductor.config as inductor_config
import torch.compiler.config as compiler_config
from torch import fx
from torch._dynamo.backends.common import aot_autograd
from torch._inductor import custom_graph_pass
from torch._inductor.custom_graph_pass import CustomGraphPass, CustomPartitionerFn, get_hash_for_files
from torch.utils import _pytree as pytree
from torch.utils.checkpoint import CheckpointPolicy

from collective_identity.ledger import GraphKind
from collective_identity.profiling import mark_graph

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
def autograd_cache_disabled(yes: bool) -> Iterator[None]:
    """Compile without reading or writing AOTAutogradCache, local or remote; FxGraphCache stays as it is."""
    if not yes:
        yield
        return
    with functorch_config.patch(  # type: ignore[attr-defined]
        enable_autograd_cache=False, enable_remote_autograd_cache=False
    ):
        yield


def autograd_cache_bypassed(reasons: Sequence[str]) -> None:
    """Count it under ``torch._dynamo.utils.counters["collective_identity"]``, by reason and in all."""
    from torch._dynamo.utils import counters

    counters["collective_identity"]["autograd_cache_bypass"] += 1
    for reason in reasons:
        counters["collective_identity"][f"autograd_cache_bypass: {reason}"] += 1


def autograd_cache_is_on() -> bool:
    """Whether this thread's configuration would use AOTAutogradCache."""
    on = functorch_config.enable_autograd_cache or functorch_config.enable_remote_autograd_cache
    return bool(on) and not compiler_config.force_disable_caches


def has_joint_pass() -> bool:
    """Whether the user set a joint pass. It is in no key of torch's (``_save_config_ignore`` in its config)."""
    return callable(functorch_config.joint_custom_pass)


TORCHS_NAMESPACES = frozenset(
    "_c10d_functional _c10d_functional_autograd _dtensor aten c10d c10d_functional debug_mode_ops debugprims export "
    "flex_lib fsdp inductor mkl mkldnn onednn onnx onnx_symbolic prim prims quantized quantized_decomposed rngprims "
    "streams symm_mem".split()
)
"""Namespaces of torch's own operators that have Python kernels; one that is missing costs a cache hit."""

_KERNELS = frozenset(
    "CPU CUDA XPU MPS HPU MTIA PrivateUse1 Meta BackendSelect CompositeExplicitAutograd "
    "CompositeExplicitAutogradNonFunctional".split()
)
"""Dispatch keys below the tracer: it has recorded the operator before their code runs."""


def operators(target: Any) -> list[torch._ops.OpOverload]:
    """The overloads that an FX target may call; none for what is no operator."""
    if isinstance(target, torch._ops.OpOverload):
        return [target]
    if isinstance(target, torch._ops.OpOverloadPacket):
        return [getattr(target, name) for name in target.overloads()]
    return []


def python_above_kernels(op: torch._ops.OpOverload) -> bool:
    """Whether tracing ``op`` runs Python code of its owner's instead of recording the operator alone.

    Registered through ``torch.library`` (``_impls`` there holds ``"namespace/name.overload/key"``), by
    ``custom_op`` (which always registers an autograd kernel of torch's; the owner's part is its backward), by
    ``register_torch_dispatch``, or on the overload itself (``py_impl``).
    """
    from torch._library import simple_registry
    from torch._library.custom_ops import _maybe_get_opdef

    schema = op._schema
    name = f"{schema.name.split('::')[-1]}{'.' if schema.overload_name else ''}{schema.overload_name}"
    prefix = f"{schema.name.split('::')[0]}/{name}/"
    keys = {key.removeprefix(prefix) for key in torch.library._impls if key.startswith(prefix)} - _KERNELS
    definition = _maybe_get_opdef(op)
    if definition is not None:
        keys -= {"Autograd", "ADInplaceOrView"}
        if definition._backward_fn is not None:
            return True
    rules = simple_registry.singleton.find(schema.name).torch_dispatch_rules._data
    above = [key for key in op.py_kernels if getattr(key, "name", "") not in _KERNELS]
    return bool(keys or rules or above or op.python_key_table)


def module_of(function: Any) -> str:
    """The module that a decomposition was written in."""
    while isinstance(function, functools.partial):
        function = function.func
    return str(getattr(function, "__module__", None) or type(function).__module__)


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


def removes_common_subexpressions(*, inductor: bool) -> bool:
    """Whether the partitioner that is about to run makes equal nodes one.

    Torch's min-cut partitioner does (``torch._functorch.config.cse``), no other function of torch's. With
    ``inductor``, a ``custom_partitioner_fn`` stands in its place, and what that does is not known.
    """
    replaced = inductor and inductor_config.custom_partitioner_fn is not None
    return not replaced and bool(getattr(functorch_config, "cse", True))


def without_common_subexpressions(graph: fx.Graph) -> fx.Graph:
    """The copy of a graph that the partitioner goes on with. Marks mutation regions in ``graph``, as it will itself.

    From torch 2.14 on it merges no value that only forward needs with one that backward needs (``partition_key`` in
    torch/_functorch/partitioners.py, read in torch 2.14.1 and 2.15.0; torch 2.11 to 2.13 have no such key).
    """
    from torch._functorch.compile_utils import fx_graph_cse

    if "extra_node_key" not in inspect.signature(fx_graph_cse).parameters:
        return fx_graph_cse(graph)
    return fx_graph_cse(graph, extra_node_key=_needed_by_backward(graph).__contains__)  # type: ignore[call-arg]


def _needed_by_backward(graph: fx.Graph) -> set[fx.Node]:
    """Everything that gradients are computed from; they come last among the outputs, as their ``desc`` says."""
    (output,) = graph.find_nodes(op="output")
    said = pytree.arg_tree_leaves(output.meta.get("desc", ()))
    first = next((i for i, one in enumerate(said) if one is not None and one.is_grad()), None)
    needed: set[fx.Node] = set()
    left = [] if first is None else pytree.arg_tree_leaves(*output.args)[first:]
    while left:
        node = left.pop()
        if isinstance(node, fx.Node) and node not in needed:
            needed.add(node)
            left += node.all_input_nodes
    return needed


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


_SchedulerPass: type[Any] = getattr(custom_graph_pass, "CustomSchedulerPass", CustomGraphPass)  # 2.13 and later


class _BeforeFusion(_SchedulerPass):  # type: ignore[misc]
    """The user's ``_pre_fusion_custom_pass`` first, then ours on each kernel that is called and not generated."""

    def __init__(self, run: Callable[[Any, list[fx.Node]], None], identity: str, user: Any) -> None:
        self._run, self._identity, self._user = run, identity, user

    def __deepcopy__(self, memo: object) -> _BeforeFusion:
        return self  # Inductor copies its configuration deeply

    def __call__(self, nodes: list[Any]) -> list[Any]:
        from torch._inductor import ir

        if self._user is not None:
            nodes = self._user(nodes)
        for node in nodes:
            for one in node.get_nodes():
                if isinstance(one.node, ir.ExternKernel):
                    self._run(one.node, [n for n in one.node.get_origins() if isinstance(n, fx.Node)])
        return nodes

    def uuid(self) -> Any | None:
        if self._user is None:
            return self._identity
        user = self._user.uuid() if hasattr(self._user, "uuid") else None
        return None if user is None else (self._identity, user)


@contextmanager
def called_kernels(run: Callable[[Any, list[fx.Node]], None], identity: str) -> Iterator[None]:
    """Show ``run`` each kernel that the compile calls and does not generate, and the FX nodes it comes from.

    ``_pre_fusion_custom_pass``, which lite mode runs as well; ``identity`` enters the cache key.
    """
    user = inductor_config._pre_fusion_custom_pass
    with inductor_config.patch(_pre_fusion_custom_pass=_BeforeFusion(run, identity, user)):  # type: ignore[attr-defined]
        yield


def write_around(kernel: Any, imports: str, before: str, after: str) -> None:
    """Have the generated Python code hold these lines around the call of a kernel.

    ``ExternKernel.codegen(wrapper)`` in torch/_inductor/ir.py. C++ and FX wrappers hold no Python lines and get none.
    """
    if "codegen" in vars(kernel):
        return  # marked already: a scheduler may be built twice
    original = kernel.codegen

    def codegen(wrapper: Any) -> None:
        from torch._inductor.virtualized import V

        if V.graph.cpp_wrapper or V.graph.fx_wrapper:
            return original(wrapper)  # type: ignore[no-any-return]
        wrapper.add_import_once(imports)
        wrapper.writeline(before)
        original(wrapper)
        wrapper.writeline(after)

    kernel.codegen = codegen


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


def custom_value(node: fx.Node, key: str) -> Any:
    """A producer's own annotation on a node, None when there is none."""
    custom = node.meta.get("custom")
    return custom.get(key) if isinstance(custom, Mapping) else None


_RECOMPUTED = (CheckpointPolicy.MUST_RECOMPUTE, CheckpointPolicy.PREFER_RECOMPUTE)


def mark_recompute(node: fx.Node, region: int) -> None:
    """Have the partitioner compute ``node`` again in backward; ``region`` orders checkpoint regions."""
    node.meta["recompute"] = CheckpointPolicy.MUST_RECOMPUTE
    node.meta["ac_graph_id"] = region


def mark_save(node: fx.Node) -> None:
    """Have the partitioner save what ``node`` returns, a tuple's items one by one, and not compute it again."""
    for one in (node, *(user for user in node.users if user.target is operator.getitem)):
        one.meta["recompute"] = CheckpointPolicy.MUST_SAVE


def misplaced_random_ops(gm: fx.GraphModule) -> list[fx.Node]:
    """Random operators to be recomputed from a saved generator state, in a graph that takes opaque objects.

    As ``functionalize_rng_ops`` in torch/_functorch/partitioners.py finds them. An accelerator's generator is
    threaded through as an input instead, unless configuration forbids that or there are several devices.
    """
    if not any(_is_opaque(node.meta.get("val")) for node in gm.graph.find_nodes(op="placeholder")):
        return []
    found = [
        node
        for node in gm.graph.nodes
        if node.meta.get("recompute") in _RECOMPUTED
        and torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ())
    ]
    accelerators = {device for node in found if (device := _device(node)).type != "cpu"}
    threaded = functorch_config.graphsafe_rng_functionalization and not inductor_config.fallback_random
    if threaded and len(accelerators) <= 1:
        return [node for node in found if _device(node).type == "cpu"]
    return found


def _is_opaque(value: Any) -> bool:
    from torch._library.fake_class_registry import FakeScriptObject
    from torch._library.opaque_object import is_opaque_value

    return isinstance(value, (FakeScriptObject, torch.ScriptObject)) or is_opaque_value(value)


def _device(node: fx.Node) -> torch.device:
    value = node.meta.get("val")
    values = value if isinstance(value, (tuple, list)) else (value,)
    devices = [one.device for one in values if isinstance(one, torch.Tensor)]
    return next((device for device in devices if device.type != "cpu"), torch.device("cpu"))


def cache_dir() -> Path:
    """Inductor's cache folder."""
    from torch._inductor.runtime.cache_dir_utils import cache_dir as inductor_cache_dir

    return Path(inductor_cache_dir())


@functools.cache
def source_hash(*packages: Path) -> str:
    """Hash of the Python sources of packages: any edit is another pass."""
    files = tuple(str(path) for package in packages for path in sorted(package.rglob("*.py")))
    return get_hash_for_files(files).hex()


# ---- lite mode (lite_mode/ says what for) ----


LITE_SWITCH = "fallback_by_default"
"""What makes a compile lite (lite_mode/state.py)."""


def is_lite(options: Mapping[str, Any]) -> bool:
    """Whether a compile with these Inductor options is in lite mode, in this thread now."""
    return bool(options.get(LITE_SWITCH, getattr(inductor_config, LITE_SWITCH)))


def decomposition_table() -> Mapping[Any, Callable[..., Any]]:
    """Inductor's decompositions under the configuration of the moment."""
    from torch._inductor.decomposition import select_decomp_table

    return select_decomp_table()


def traced_now() -> tuple[Mapping[str, Any], int | None, fx.Graph | None]:
    """What is being traced: the annotations in force, the sequence number of the gradient in hand, the graph.

    The number is None in forward (torch/fx/traceback.py, ``current_meta``).
    """
    from torch.fx.experimental.proxy_tensor import get_proxy_mode
    from torch.fx.traceback import current_meta

    mode = get_proxy_mode()
    graph = None if mode is None else mode.tracer.graph
    numbers = current_meta.get("grad_fn_seq_nr") if current_meta.get("in_grad_fn", 0) > 0 else None
    return current_meta.get("custom") or {}, numbers[-1] if numbers else None, graph


def region_patches(gm: fx.GraphModule) -> Mapping[str, Any]:
    """Inductor's options of a nested compile region (torch 2.14 and later; empty elsewhere)."""
    config = gm.meta.get("nested_region_config")
    return getattr(config, "inductor_config_patches", None) or {}


def inductor_flags(values: Mapping[str, Any]) -> AbstractContextManager[Any]:
    """Inductor's options set to these values in this thread, while entered."""
    return inductor_config.patch(dict(values))  # type: ignore[attr-defined, no-any-return]


LOWERED_AFTER_GRAD = (
    "auto_functionalized", "auto_functionalized_v2", "map_impl", "scan", "triton_kernel_wrapper_functional"
)  # fmt: skip
"""Higher-order operators without a lowering: torch rewrites them in its post-grad passes, which lite mode skips."""


def rewrite_unlowered(gm: fx.GraphModule) -> bool:
    """Rewrite what cannot be lowered as it is, with torch's own rewrites; True when there was something.

    Read in torch/_inductor/fx_passes/post_grad.py, ``post_grad_passes``; 2.15 runs the one for user-written Triton
    kernels in lite mode itself, for the same reason. A mutated tensor is always copied first: the pass that would
    find copies to spare does not run in lite mode, and without its answer torch spares every copy.
    """
    from torch._inductor.fx_passes import post_grad

    found = False
    for module in [module for module in gm.modules() if isinstance(module, fx.GraphModule)]:
        names = {name: node for node in module.graph.nodes if (name := _higher_order_name(node)) in LOWERED_AFTER_GRAD}
        if not names:
            continue
        found = True
        for node in module.graph.nodes:
            _copy_all_mutated(node)
        with _scalars_allowed(module):
            post_grad.decompose_triton_kernel_wrapper_functional(module.graph)
            post_grad.decompose_auto_functionalized(module.graph)
            post_grad.decompose_scan_to_while_loop(module)
            post_grad.decompose_map_to_while_loop(module)
        module.recompile()
    return found


@contextmanager
def _scalars_allowed(gm: fx.GraphModule) -> Iterator[None]:
    """Let the rewrites of loops read their index, whatever ``capture_scalar_outputs`` says of the user's program.

    torch/_subclasses/fake_tensor.py, ``FakeTensorMode.allow_scalar_outputs`` (read in torch 2.11.0, 2.13.0 and 2.14.1).
    """
    from torch._guards import detect_fake_mode

    mode = detect_fake_mode([node.meta.get("val") for node in gm.graph.nodes])
    if mode is None:
        yield
        return
    was, mode.allow_scalar_outputs = getattr(mode, "allow_scalar_outputs", False), True
    try:
        with mode:  # as it is while Inductor compiles
            yield
    finally:
        mode.allow_scalar_outputs = was


def _higher_order_name(node: fx.Node) -> str:
    return node.target.name() if isinstance(node.target, torch._ops.HigherOrderOperator) else ""


def _copy_all_mutated(node: fx.Node) -> None:
    """Torch's passes leave here what must be copied (torch/_higher_order_ops/auto_functionalize.py)."""
    name = _higher_order_name(node)
    if name == "auto_functionalized_v2":
        node.meta["only_clone_these_tensors"] = list(range(len(node.kwargs["_all_bases"])))  # type: ignore[arg-type]
    elif name == "auto_functionalized":
        from torch._higher_order_ops.auto_functionalize import get_mutable_args

        node.meta["only_clone_these_tensors"] = list(get_mutable_args(node.args[0])[0])  # type: ignore[arg-type]


_REPLACING = threading.Lock()


class _ByThread:
    """``compile_fx`` for the threads that replace it now; the original for every other."""

    def __init__(self, original: Callable[..., Any]) -> None:
        functools.update_wrapper(self, original)
        self.original, self.signature = original, inspect.signature(original)
        self.inside: dict[int, list[Callable[..., Any]]] = {}

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        by = self.inside.get(threading.get_ident())
        if not by:
            return self.original(*args, **kwargs)
        bound = self.signature.bind(*args, **kwargs)
        bound.apply_defaults()
        return by[-1](self.original, bound)


@contextmanager
def compile_fx_replaced(by: Callable[..., Any]) -> Iterator[None]:
    """Have ``torch.compile`` call ``by(original, arguments)`` for ``compile_fx`` in this thread, while entered.

    ``arguments`` is the bound call (``inspect.BoundArguments``). What ``compile_fx`` calls itself for nested work
    goes through ``by`` as well. Threads may overlap: the last one to leave puts ``compile_fx`` back.
    """
    from torch._inductor import compile_fx as module

    thread = threading.get_ident()
    with _REPLACING:
        now: Any = module.compile_fx
        replaced = now if isinstance(now, _ByThread) else _ByThread(now)
        if replaced is not now:
            expected = {"model_", "example_inputs_", "inner_compile", "config_patches", "decompositions"}
            if missing := sorted(expected - set(replaced.signature.parameters)):
                raise UnsupportedTorch(
                    f"lite mode's one-trace decomposition expects torch._inductor.compile_fx.compile_fx with "
                    f"{', '.join(missing)} (seen in torch 2.11 to 2.15), found {replaced.signature} in torch "
                    f"{torch.__version__}: use a released torch in that range, or undo what replaced the function"
                )
            module.compile_fx = replaced
        replaced.inside.setdefault(thread, []).append(by)
    try:
        yield
    finally:
        with _REPLACING:
            replaced.inside[thread].pop()
            if not replaced.inside[thread]:
                del replaced.inside[thread]
            if not replaced.inside and module.compile_fx is replaced:
                module.compile_fx = replaced.original


class NonRecomputingPartitioner(CustomPartitionerFn):
    """Every operator runs where the program runs it, once: no min-cut, no common-subexpression elimination.

    Nodes that the user or a producer marked for recompute still are (torch/_functorch/partitioners.py,
    ``default_partition``, read in torch 2.11 to 2.15).
    """

    def __call__(self, gm: fx.GraphModule, joint_inputs: Sequence[object], **kwargs: Any) -> Any:
        from torch._functorch.partitioners import default_partition

        known = inspect.signature(default_partition).parameters
        _tag_forward(gm.graph, kwargs["num_fwd_outputs"])
        _draw_in_forward(gm.graph)
        with functorch_config.patch(cse=False):  # type: ignore[attr-defined]
            return default_partition(gm, joint_inputs, **{k: v for k, v in kwargs.items() if k in known})

    def uuid(self) -> Any | None:
        return f"collective_identity.inductor_passes.NonRecomputingPartitioner.{source_hash(Path(__file__).parent)}"


def _tag_forward(graph: fx.Graph, outputs: int) -> None:
    """Say where forward ends when no node says so; without, ``default_partition`` computes all again in backward.

    Torch's own ``selective_decompose`` traces the joint graph again and loses the tags of the first trace.
    """
    if any("partitioner_tag" in node.meta for node in graph.nodes):
        return
    needed, left = set[fx.Node](), list(pytree.arg_tree_leaves(*graph.output_node().args)[:outputs])
    while left:
        node = left.pop()
        if isinstance(node, fx.Node) and node not in needed:
            needed.add(node)
            left += node.all_input_nodes
    until: fx.Node | None = None
    of_backward = {node for node in graph.find_nodes(op="placeholder") if "tangents" in str(node.target)}
    for node in graph.nodes:
        if not of_backward.isdisjoint(node.all_input_nodes):
            break
        until = node if node in needed else until
    for node in graph.nodes if until is not None else ():
        if node.op in ("call_function", "get_attr"):
            node.meta["partitioner_tag"] = "is_forward"
        if node is until:
            break


def _draw_in_forward(graph: fx.Graph) -> None:
    """Have ``default_partition`` leave what forward draws out of backward.

    It copies into backward whatever needs no gradient, and removes no random operator from there, used or not: the
    generator would be further on in the next step. It also refuses one with several results of which none is used.
    """
    last = next((node for node in reversed(graph.nodes) if node.meta.get("partitioner_tag") == "is_forward"), None)
    for node in list(graph.nodes):
        if torch.Tag.nondeterministic_seeded not in getattr(node.target, "tags", ()):
            continue
        if node.meta.get("partitioner_tag") != "is_forward" or node.meta.get("recompute") in _RECOMPUTED:
            continue
        value = node.meta.get("val")
        if not node.users and isinstance(value, (tuple, list)):
            with graph.inserting_after(node):
                item = graph.call_function(operator.getitem, (node, 0))
            item.meta.update(node.meta, val=value[0])
            last = item if node is last else last
        # by the last node of forward, which has to keep its tag, torch tells where forward ends
        if all(user.op == "output" for user in node.users) or node is not last:
            node.meta["partitioner_tag"] = "must_be_in_forward"


FX_PASSES = "torch._inductor.fx_passes"


@dataclass(frozen=True, slots=True)
class Classifier:
    """A function of torch's by which its passes tell what is FSDP's (PyTorch ``torch/_inductor/fx_passes``).

    Attributes:
        module: where it is defined, below `FX_PASSES`.
        function: its name.
        parameters: names of its parameters.
        since: first version that has it so.
        until: last one, None for every later one.
        rebound: modules that bind it again, each with the first version that does.
    """

    module: str
    function: str
    parameters: tuple[str, ...]
    since: tuple[int, int] = (2, 11)
    until: tuple[int, int] | None = None
    rebound: tuple[tuple[str, tuple[int, int]], ...] = ()


_REPLACED = ("low_contention_collectives", "_replace_collective", ("node", "graph", "symm_mem", "is_ag", "group_name"))
_MANUAL = (("overlap_manual_scheduling", (2, 11)),)
CLASSIFIERS: Mapping[str, Classifier] = MappingProxyType(
    {
        "gather": Classifier(
            "fsdp", "is_fsdp_all_gather", ("n",), (2, 12), rebound=(("overlap_preserving_bucketer", (2, 12)),)
        ),
        "gather by wait": Classifier("fsdp", "is_fsdp_all_gather_wait", ("wait",)),
        "scatter by wait": Classifier("fsdp", "is_fsdp_reduce_scatter_wait", ("wait",)),
        "gather in the bucketer": Classifier(
            "bucketing", "is_fsdp_all_gather", ("node", "all_node_ancestors"), rebound=_MANUAL
        ),
        "scatter in the bucketer": Classifier("bucketing", "is_fsdp_reduce_scatter", ("node",), rebound=_MANUAL),
        "groups": Classifier("fsdp", "identify_fsdp_groups", ("gm",), (2, 13)),
        "all-reduces": Classifier(
            "fsdp", "bucket_fsdp_all_reduce", ("gm", "bucket_cap_mb_by_bucket_idx", "fsdp_groups"), (2, 13)
        ),
        "low contention": Classifier(*_REPLACED, (2, 13), (2, 13)),
        "low contention with a target": Classifier(*_REPLACED[:2], (*_REPLACED[2], "target"), (2, 14)),
    }
)
"""Every such function by what it is asked."""

ALL_REDUCES_BY_MB = ("fsdp", "bucket_all_reduce_by_mb")
"""What merges the all-reduces that ``bucket_fsdp_all_reduce`` chose: module and function (2.13 on)."""


def fx_passes_module(name: str) -> Any:
    """One of torch's modules of passes.

    Raises:
        ImportError: this torch lacks it.
    """
    return importlib.import_module(f"{FX_PASSES}.{name}")


def group_names(found: Iterable[str]) -> Any:
    """Names in the container that ``identify_fsdp_groups`` returns."""
    from torch.utils._ordered_set import OrderedSet

    return OrderedSet(found)
