"""What differs between torch versions, and what may be missing: looked up here, defensively."""

from __future__ import annotations

import functools
import gc
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, Final

import torch

SUPPORTED: Final[tuple[tuple[int, int], tuple[int, int]]] = ((2, 11), (2, 16))
"""Supported torch versions: first included, last excluded."""


def torch_version() -> tuple[int, int]:
    """(major, minor) of the installed torch; ``(0, 0)`` when the version string cannot be read."""
    match = re.match(r"(\d+)\.(\d+)", str(torch.__version__))
    return (int(match[1]), int(match[2])) if match else (0, 0)


@contextmanager
def collector_paused() -> Iterator[None]:
    """Keep Python's cyclic collector from walking the whole heap while many acyclic objects are made.

    The heap of a process that compiles is large, and each walk costs as much as the work here: on a million
    nodes a third of it. Left alone where it is off already.
    """
    if not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
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
