"""How does a producer say why it communicates? One context manager around each hop."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager

import torch
from torch.fx.traceback import annotate

from .identity import VERSION, Identity, Source
from .profiling import label_of, marked
from .roles import DEFAULT_ROLES
from .store import BACKWARD_KEY, KEY


def role_scope(
    role: str,
    *,
    producer: str,
    group: str | None = None,
    param_group: str | None = None,
    params: Iterable[str] | None = None,
    backward: bool | None = None,
) -> AbstractContextManager[None]:
    """Give every collective traced inside an explicit identity; outside a trace only profiles show it.

    Open one scope per hop: the role of a reduction is never that of the gather before it. In an autograd
    backward (``torch.autograd.Function.backward`` under AOTAutograd or ``make_fx``) the backward key is
    written too, since AOTAutograd copies forward metadata over backward nodes (PyTorch 2.13
    ``_functorch/_aot_autograd/utils.py``, ``copy_fwd_metadata_to_bw_nodes``).

        with role_scope(PARAM_UNSHARD, producer="fsdp2", group=pg.group_name, param_group="layers.0"):
            full = all_gather_into_tensor(shard, ...)

    Args:
        role: namespaced role, ``"fsdp.param_unshard"`` or one of a namespace of your own.
        producer: what writes it, ``"fsdp2"``.
        group: name of the process group the collective runs on.
        param_group: FQN of the producer's own unit.
        params: FQNs of the parameters the collective carries.
        backward: whether the region runs in a backward. None finds out, except where Dynamo itself traces the
            region: it cannot ask autograd, so a ``backward`` that Dynamo traces must say True.

    Raises:
        ValueError: a value is empty or of the wrong type, or the role is not namespaced, or unknown in
            ``fsdp.``.
    """
    names = params if params is None or isinstance(params, str) else tuple(params)
    keys = {KEY: _payload(role, producer, group, param_group, names)}
    if _in_autograd_backward() if backward is None else backward:
        keys[BACKWARD_KEY] = _payload(role, producer, group, param_group, names)
    if torch.compiler.is_dynamo_compiling() or not torch.autograd._profiler_enabled():
        return annotate(keys)
    return _profiled(keys, label_of(role, None if isinstance(names, str) else names, param_group))


@contextmanager
def _profiled(keys: dict[str, dict[str, object]], name: str) -> Iterator[None]:
    with annotate(keys), marked(name):
        yield


def _in_autograd_backward() -> bool:
    if torch.compiler.is_dynamo_compiling():
        return False
    return bool(torch._C._current_graph_task_id() != -1)


def _payload(
    role: str, producer: str, group: str | None, param_group: str | None, params: Iterable[str] | None
) -> dict[str, object]:
    for name, value in (("role", role), ("producer", producer)):
        if not isinstance(value, str) or not value:
            raise ValueError(f"role_scope: expected a non-empty str as {name}, found {value!r}")
    for name, optional in (("group", group), ("param_group", param_group)):
        if optional is not None and not isinstance(optional, str):
            raise ValueError(
                f"role_scope: expected a str or None as {name}, found {optional!r}"
                + ("; pass the process group's group_name" if name == "group" else "")
            )
    if not DEFAULT_ROLES.knows(role):
        known = ", ".join(sorted(DEFAULT_ROLES.rows))
        raise ValueError(
            f"role_scope: expected one of {known}, or a role of another namespace such as "
            f"'user.metric_gather', found {role!r}"
        )
    names: tuple[str, ...] | None = None
    if params is not None:
        if isinstance(params, str):
            raise ValueError(f"role_scope: expected several names as params, found the str {params!r}; pass a list")
        names = tuple(params)
        for name in names:
            if not isinstance(name, str):
                raise ValueError(f"role_scope: expected str names as params, found {name!r}")
    identity = Identity(VERSION, role, Source.EXPLICIT, producer, group, param_group, names)
    return identity.to_payload()
