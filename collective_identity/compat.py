"""What differs between torch versions, and what may be missing: looked up here, defensively."""

from __future__ import annotations

import functools
import gc
import importlib
import logging
import os
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import Any, Final

import torch

SUPPORTED: Final[tuple[tuple[int, int], tuple[int, int]]] = ((2, 11), (2, 16))
"""Supported torch versions: first included, last excluded."""


def torch_version() -> tuple[int, int]:
    """(major, minor) of the installed torch; ``(0, 0)`` when the version string cannot be read."""
    match = re.match(r"(\d+)\.(\d+)", str(torch.__version__))
    return (int(match[1]), int(match[2])) if match else (0, 0)


@contextmanager
def collector_paused(*, long: bool = False) -> Iterator[None]:
    """Keep Python's cyclic collector from walking the whole heap while many acyclic objects are made.

    The heap of a process that compiles is large, and each walk costs as much as the work here: on a million
    nodes a third of it. Left alone where it is off already.

    Args:
        long: what was made meanwhile is old: else all of it is walked at once when the collector goes on, in vain.
            Not where the program has frozen objects (`gc.freeze`), which would be thawed.
    """
    if not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        if long and not gc.get_freeze_count():
            gc.freeze()  # from all generations to none, and from there to the oldest
            gc.unfreeze()
        gc.enable()


def find_op(qualified: str, overload: str = "default") -> Any | None:
    """The operator overload ``namespace::name`` if this torch has it, else None."""
    namespace, _, name = qualified.partition("::")
    packet = getattr(getattr(torch.ops, namespace), name, None)
    return getattr(packet, overload, None)


def op_name(target: object) -> str | None:
    """``"namespace::name"`` of an FX target that is an operator overload or packet, else None."""
    return _operator_name(target) if isinstance(target, _OPERATORS) else None


_OPERATORS: Final = (torch._ops.OpOverload, torch._ops.OpOverloadPacket)


@functools.lru_cache(maxsize=4096)
def _operator_name(target: Any) -> str:
    return str(target._schema.name if isinstance(target, torch._ops.OpOverload) else target._qualified_op_name)


def op_overload_of(target: object) -> torch._ops.OpOverload | None:
    """The overload behind a target; a packet (Dynamo keeps those) stands for its default one."""
    if isinstance(target, torch._ops.OpOverload):
        return target
    if isinstance(target, torch._ops.OpOverloadPacket):
        return getattr(target, "default", None)
    return None


def arguments(node: torch.fx.Node) -> dict[str, object]:
    """What a call of an operator was given, by the names of its schema; positions where there is no schema."""
    overload = op_overload_of(node.target)
    names: tuple[str, ...] = argument_names(overload) if overload is not None else ()
    given, kwargs = node.args, node.kwargs
    if len(given) > len(names):
        names += tuple(map(str, range(len(names), len(given))))
    found: dict[str, object] = dict(zip(names, given, strict=False))
    return {**found, **kwargs} if kwargs else found


@functools.lru_cache(maxsize=4096)
def argument_names(overload: torch._ops.OpOverload) -> tuple[str, ...]:
    """The names of an operator's arguments, in the order of its schema."""
    return tuple(argument.name for argument in overload._schema.arguments)


def higher_order_name(target: object) -> str | None:
    """Name of a higher-order operator (``"control_deps"``, ``"invoke_subgraph"``), else None."""
    if isinstance(target, torch._ops.HigherOrderOperator):
        return str(target.name())
    return None


def group_name_of(value: object) -> str | None:
    """Name behind a group argument's value: a str, a ProcessGroup, or a script-object stand-in for one.

    torch 2.13 types ``group_name`` as Any and may pass a ProcessGroup; a traced one may be wrapped in a
    FakeScriptObject that keeps the original as ``real_obj``.
    """
    if isinstance(value, str):
        return value
    for candidate in (value, getattr(value, "real_obj", None)):
        try:
            name = getattr(candidate, "group_name", None)
        except Exception:  # a stand-in may refuse any attribute
            name = None
        if isinstance(name, str):
            return name
    return None


def surely_equal(one: object, other: object) -> bool:
    """Whether two sizes are equal whatever their symbols stand for. Never guards; undecided is False.

    PyTorch 2.11-2.15 ``fx/experimental/symbolic_shapes.statically_known_true`` evaluates without a guard.
    """
    if type(one) is int and type(other) is int:
        return one == other
    if one is other:
        return True
    from torch.fx.experimental.symbolic_shapes import statically_known_true

    try:
        return bool(statically_known_true(one == other))  # type: ignore[arg-type]
    except Exception:  # sizes of different symbol tables, or of a kind that cannot be compared
        return False


def group_size_of(name: str) -> int | None:
    """Ranks in the named process group of this process, or None when it is not registered here."""
    try:
        from torch.distributed.distributed_c10d import _resolve_process_group

        return int(_resolve_process_group(name).size())  # type: ignore[arg-type]
    except Exception:  # not registered, or a torch built without distributed
        return None


def group_order(name: str) -> int | None:
    """Position of the named group among those this process created, or None when it is not registered.

    ``new_group`` must be called in the same order on every rank, so the position among the groups of one kind
    (`group_place`) in one graph means the same on every rank, although names and members differ.
    """
    try:
        from torch.distributed import distributed_c10d

        names = [str(n) for n in distributed_c10d._world.pg_names.values()]
    except Exception:
        return None
    return names.index(name) if name in names else None


def group_place(name: str) -> tuple[str, ...] | None:
    """What says the same on every rank of a mesh about its groups along one dimension; None when not registered.

    The dimension, for a group that `DeviceMesh` made: it describes them as ``"mesh_<dimension>"`` (PyTorch 2.11-2.15
    ``distributed/device_mesh.py``, ``_init_one_process_group``). Else how far each member's global rank lies from the
    first one's, ``("0", "2")`` for ranks 1 and 3.
    """
    try:
        from torch.distributed.distributed_c10d import _resolve_process_group

        description = str(_resolve_process_group(name).group_desc)  # type: ignore[arg-type]
    except Exception:  # not registered, or a torch built without distributed
        return None
    if description.startswith("mesh_"):
        return (description,)
    ranks = group_ranks(name)
    return None if ranks is None else tuple(str(rank - ranks[0]) for rank in ranks)


def default_store() -> Any | None:
    """The job's store on a connection of its own where the store can be cloned; None without a process group.

    A clone keeps our polling from waiting behind another thread's blocking call on the same client.
    PyTorch 2.11-2.15 ``distributed_c10d._get_default_store`` is private and raises without a group.
    """
    try:
        from torch.distributed import distributed_c10d

        store = distributed_c10d._get_default_store()
    except (ImportError, AttributeError, ValueError):
        return None
    try:
        return store.clone()  # type: ignore[attr-defined]
    except (AttributeError, NotImplementedError, RuntimeError):
        return store


def root_store(store: Any) -> Any:
    """The store under every prefix (``PrefixStore.underlying_store``, PyTorch 2.11-2.15)."""
    while hasattr(store, "underlying_store"):
        store = store.underlying_store
    return store


def store_address(store: Any) -> str | None:
    """``tcp://host:port`` or ``file:/path``: where another process finds this root store; None for any other."""
    if isinstance(store, torch.distributed.TCPStore):
        return f"tcp://{store.host}:{store.port}"
    if isinstance(store, torch.distributed.FileStore):
        return f"file:{store.path}"  # type: ignore[attr-defined]
    return None


def group_names() -> list[str]:
    """Names of the process groups this process is a member of, oldest first."""
    try:
        from torch.distributed import distributed_c10d

        return [str(name) for name in list(distributed_c10d._world.pg_names.values())]
    except Exception:  # a torch built without distributed
        return []


def counting_devices(name: str) -> tuple[torch.device, ...]:
    """One device for each backend of the named group, to read the backend's count by; none when it is not there."""
    try:
        group = _resolver()(name)
        return tuple({group._get_backend(device).name(): device for device in group._device_types}.values())
    except Exception:  # destroyed meanwhile, or a torch built without distributed
        return ()


def issued(name: str, devices: Sequence[torch.device]) -> int | None:
    """Collectives this process has issued on the named group since it was made; None when it is not there.

    The sequence numbers of its backends (`counting_devices`), which are plain counters: reading one launches nothing
    and waits for nothing. One collective counts one; under gloo a coalesced reduce-scatter counts its tensors (seen
    on 2.11-2.14). Private in PyTorch 2.11-2.15 (``torch/csrc/distributed/c10d/init.cpp``).
    """
    try:
        group = _resolver()(name)
        return sum(group._get_backend(device)._get_sequence_number_for_group() for device in devices)
    except Exception:  # destroyed meanwhile, or a backend that does not count
        return None


@functools.cache
def _resolver() -> Any:
    from torch.distributed.distributed_c10d import _resolve_process_group

    return _resolve_process_group


def recent_operations(keep: int = 32) -> dict[str, list[list[Any]]]:
    """By group: ``[number, "all_gather [[4]]", ended]`` of its newest collectives, oldest first.

    From torch's flight recorder, on by default under gloo and NCCL; empty where it is off
    (``TORCH_FR_BUFFER_SIZE=0``). On an accelerator ``ended`` is what the device has finished. PyTorch 2.11-2.15
    ``torch/csrc/distributed/c10d/FlightRecorder.hpp``, read by ``torch/distributed/flight_recorder``.
    """
    import json

    found: dict[str, list[list[Any]]] = {}
    for name in ("_dump_fr_trace_json", "_dump_nccl_trace_json"):
        dump = getattr(getattr(torch._C, "_distributed_c10d", None), name, None)
        try:
            for entry in json.loads(dump())["entries"] if dump is not None else ():
                if not entry["is_p2p"]:
                    called = str(entry["profiling_name"]).rpartition(":")[2]
                    ended = bool(entry["retired"]) or entry["state"] == "completed"
                    operation = [entry["collective_seq_id"], f"{called} {entry['input_sizes']}", ended]
                    found.setdefault(str(entry["process_group"][0]), []).append(operation)
        except Exception:  # another format, or no recorder: the counters remain
            continue
    return {group: operations[-keep:] for group, operations in found.items()}


def compiling() -> bool:
    """Whether a thread of this process is in ``torch.compile`` (PyTorch 2.11-2.15 ``_dynamo/convert_frame.py``)."""
    for running in sys._current_frames().values():
        frame: FrameType | None = running
        while frame is not None:
            code = frame.f_code
            if code.co_name == "_compile" and code.co_filename.endswith("convert_frame.py"):
                return True
            frame = frame.f_back
    return False


def group_ranks(name: str) -> tuple[int, ...] | None:
    """Global ranks of the named process group in group order, or None when it is not registered here."""
    try:
        from torch.distributed.distributed_c10d import _resolve_process_group, get_process_group_ranks

        return tuple(get_process_group_ranks(_resolve_process_group(name)))  # type: ignore[arg-type]
    except Exception:  # not registered, or a torch built without distributed
        return None


def fake_mode_of(values: Iterable[Any]) -> Any:
    """The fake-tensor mode of a graph's example values, a new one with symbolic shapes where they have none."""
    from torch._guards import detect_fake_mode
    from torch.utils._pytree import tree_leaves

    found = detect_fake_mode([leaf for leaf in tree_leaves(list(values)) if isinstance(leaf, torch.Tensor)])
    return found if found is not None else _new_fake_mode()


def dump_graph(gm: torch.fx.GraphModule) -> bytes:
    """A graph as bytes, node metadata included (``torch/fx/_graph_pickler.py``, PyTorch 2.11-2.15)."""
    from torch.fx._graph_pickler import GraphPickler, Options

    return GraphPickler.dumps(gm, Options(ops_filter=None, node_metadata_key_filter=None))


def load_graph(data: bytes) -> object:
    """What `dump_graph` wrote, its tensors in a fake mode of their own. Unpickling can run code."""
    from torch.fx._graph_pickler import GraphPickler

    return GraphPickler.loads(data, _new_fake_mode())


def _new_fake_mode() -> Any:
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    return FakeTensorMode(shape_env=ShapeEnv(), allow_non_fake_inputs=True)


def inductor_counters() -> Any | None:
    """``torch._dynamo.utils.counters["inductor"]`` (PyTorch 2.11-2.15), None before Dynamo was imported."""
    utils = sys.modules.get("torch._dynamo.utils")
    counters = getattr(utils, "counters", None)
    return None if counters is None else counters["inductor"]


def trace_artifact(name: str, text: Callable[[], str]) -> None:
    """A JSON artifact for ``TORCH_TRACE`` and tlparse; `text` is called only where a handler listens.

    ``trace_structured`` in torch/_logging/_internal.py, PyTorch 2.11-2.15.
    """
    handlers = logging.getLogger("torch.__trace").handlers
    if all(type(h).__name__ == "LazyTraceHandler" and getattr(h, "root_dir", None) is None for h in handlers):
        return  # nobody asked: torch's own handler would find that out after the text is made
    try:
        from torch._logging import trace_structured
    except ImportError:
        return
    trace_structured("artifact", metadata_fn=lambda: {"name": name, "encoding": "json"}, payload_fn=text)


@contextmanager
def timed(name: str) -> Iterator[None]:
    """Show a region in Dynamo's timings and PT2 compile events; nothing before Dynamo was imported.

    ``dynamo_timed`` in torch/_dynamo/utils.py, PyTorch 2.11-2.15.
    """
    utils = sys.modules.get("torch._dynamo.utils")
    if utils is None:
        yield
        return
    with utils.dynamo_timed(name, log_pt2_compile_event=True):
        yield


def tracing() -> bool:
    """Whether operators called now are being traced into a graph, or run on fake tensors only.

    ``torch._C._get_dispatch_mode`` and its keys, PyTorch 2.11-2.15.
    """
    if torch.compiler.is_compiling():
        return True
    key = torch._C._TorchDispatchModeKey
    return any(torch._C._get_dispatch_mode(mode) is not None for mode in (key.PROXY, key.FAKE, key.FUNCTIONAL))


def eager_fsdp_modules(*, running: bool = True, labelled: bool = False) -> tuple[str, ...]:
    """Names of the modules under ``fully_shard`` in whose eager forward this is called; "(root)" without a name.

    All modules of that root whose own hooks are on; without `running` those of every live model. A module that shards
    nothing, on a mesh of one rank, is left out. With `labelled` only those whose communication object says of itself,
    by ``says_roles``, that it opens `role_scope`.
    Private names: ``_composable_state._module_state_mapping``, of ``FSDPState`` ``_pre_forward_hook_handle`` and
    ``_state_ctx.iter_forward_root``, of ``FSDPParamGroup`` ``_module_fqn`` and ``_all_gather_comm``, PyTorch 2.11-2.15;
    where one is missing the answer is empty.
    """
    state_module = sys.modules.get("torch.distributed._composable_state")
    found = []
    try:
        for module, reference in list(getattr(state_module, "_module_state_mapping", {}).items()):
            state = reference()
            handle = getattr(state, "_pre_forward_hook_handle", None)
            groups = getattr(state, "_fsdp_param_groups", None) or [getattr(state, "_fsdp_param_group", None)]
            group = groups[0]
            if handle is None or group is None or group.mesh_info.mesh.size() == 1:
                continue
            if running and state._state_ctx.iter_forward_root is None:  # type: ignore[union-attr]
                continue  # no forward of its model is under way
            if labelled and not getattr(group._all_gather_comm, "says_roles", False):
                continue
            handles = getattr(handle, "handles", (handle,))
            if any((hooks := one.hooks_dict_ref()) is not None and one.id in hooks for one in handles):
                name = getattr(group, "_module_fqn", None)
                found.append(f"a {type(module).__name__}" if name is None else name or "(root)")
    except (AttributeError, TypeError, RuntimeError):
        return ()
    return tuple(dict.fromkeys(found))


_MAY_BE_WRAPPED: Final = (
    ("torch._inductor.compile_fx", "compile_fx"),
    ("torch._inductor.compile_fx", "compile_fx_inner"),
    ("torch._inductor.fx_passes.fsdp", "is_fsdp_all_gather_wait"),
    ("torch._inductor.fx_passes.fsdp", "is_fsdp_reduce_scatter_wait"),
    ("torch._inductor.fx_passes.fsdp", "is_fsdp_all_gather"),
    ("torch._inductor.fx_passes.fsdp", "identify_fsdp_groups"),
    ("torch._inductor.fx_passes.bucketing", "merge_all_gather"),
    ("torch._inductor.fx_passes.bucketing", "merge_reduce_scatter"),
    ("torch._inductor.fx_passes.post_grad", "post_grad_passes"),
)
"""What packages around FSDP's collectives wrap, ours included while a scope is open (PyTorch 2.11-2.15)."""


def replaced_functions() -> list[str]:
    """``MODULE.NAME (from WHERE)`` for each function of torch's passes that is not torch's own now."""
    found = []
    for module, name in _MAY_BE_WRAPPED:
        try:
            function = getattr(importlib.import_module(module), name, None)
        except ImportError:
            continue
        home = getattr(getattr(function, "__code__", None), "co_filename", "")
        if function is not None and home and f"{os.sep}torch{os.sep}" not in home:
            found.append(f"{module}.{name} (from {home})")
    return found
