"""A policy for a device, for every ``torch.compile`` of the process, until it is closed."""

from __future__ import annotations

import inspect
import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType, TracebackType
from typing import Any

import torch
from torch import fx

from .. import upstream
from . import torch_names
from .backend import scope
from .decompositions import ScopedTable
from .devices import graph_devices, node_device
from .faults import PolicyError
from .model import OperatorPolicy

logger = logging.getLogger("collective_identity.inductor_passes.device_policy")

_LOCK = threading.Lock()


class Registration:
    """What :func:`register_policy` returns; ``close()`` or the end of a ``with`` undoes it."""

    def __init__(self, policy: OperatorPolicy, dispatch: _Dispatch) -> None:
        self.policy, self._dispatch = policy, dispatch
        self._open = True

    def close(self) -> None:
        """Undo the registration; the second call does nothing."""
        with _LOCK:
            if not self._open:
                return
            self._open = False
            before = self._dispatch.policies
            self._dispatch.hold({kind: one for kind, one in before.items() if kind != self.policy.device_type})
            if not self._dispatch.policies and torch_names.current_compile_fx() is self._dispatch:
                torch_names.set_compile_fx(self._dispatch.stock)
        torch.compiler.reset()

    def __enter__(self) -> Registration:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def register_policy(device: str, policy: OperatorPolicy) -> Registration:
    """Have every Inductor compile of a graph with a tensor on ``device`` go through ``policy``.

    All or nothing: on an error nothing is registered. Graphs without a tensor on the device, and every graph in lite
    mode, compile exactly as before, with torch's own cache keys. What Dynamo had compiled is dropped
    (``torch.compiler.reset()``), here and on closing, so that no function keeps another policy's code. An explicit
    ``policy.backend()`` wins.

    Args:
        device: the device type; it must be the policy's.
        policy: the policy.

    Raises:
        PolicyError: another device's policy, or one is registered for the device already.
        UnsupportedTorch: torch is not 2.11 to 2.15.
    """
    upstream.check_version()
    if not isinstance(policy, OperatorPolicy):
        raise PolicyError(f"register_policy expects an OperatorPolicy, found a {type(policy).__qualname__}")
    if device != policy.device_type:
        raise PolicyError(
            f"register_policy expects the policy's own device {policy.device_type!r}, found {device!r}: build a policy "
            "for that device"
        )
    policy.check_unchanged()
    with _LOCK:
        current = torch_names.current_compile_fx()
        dispatch = current if isinstance(current, _Dispatch) else _Dispatch(current)
        if device in dispatch.policies:
            raise PolicyError(
                f"device {device!r} has the policy {dispatch.policies[device].name!r} already: close its registration "
                "first"
            )
        dispatch.hold({**dispatch.policies, device: policy})
        torch_names.set_compile_fx(dispatch)
    torch.compiler.reset()
    return Registration(policy, dispatch)


def registered_policy(device: str) -> OperatorPolicy | None:
    """The policy registered for a device type, None when there is none.

    Nor is one found while another tool's function stands in the place of ours as ``compile_fx``.
    """
    current = torch_names.current_compile_fx()
    return current.policies.get(device) if isinstance(current, _Dispatch) else None


def replacement_allowed(node: fx.Node, role: str | None, what: str, policy: OperatorPolicy | None = None) -> bool:
    """Whether a pass may replace the collective at start node ``node`` by a low-contention or fused form.

    Asks ``policy`` when it is for the node's device, else the policy registered for that device; a device without
    a policy forbids nothing.

    Args:
        node: the start node.
        role: its resolved role, None when there is none.
        what: ``"low_contention"`` or ``"fused"``.
        policy: the policy of this compile (``PassContext.options.policy``).
    """
    device = node_device(node)
    if policy is None or policy.device_type != device:
        policy = registered_policy(device) if device is not None else None
    return policy is None or policy.allows(role, what)


class _Dispatch:
    """Stands in for Inductor's ``compile_fx`` while a policy is registered; holds the registered policies.

    It asks for its policies at each compile: where another tool has put a function around it, it stays, and does
    nothing once the last registration is closed.
    """

    policies: Mapping[str, OperatorPolicy]

    def __init__(self, stock: Callable[..., Any]) -> None:
        self.stock = stock
        self.hold({})
        self.__signature__ = inspect.signature(stock)  # for whoever asks what compile_fx takes

    def hold(self, policies: Mapping[str, OperatorPolicy]) -> None:
        """Take these policies for every compile that begins from now on."""
        self.policies = MappingProxyType(dict(policies))

    def __call__(self, gm: fx.GraphModule, inputs: Sequence[Any], *args: Any, **kwargs: Any) -> Any:
        policies = self.policies
        bound = torch_names.compile_arguments(self.stock, gm, inputs, *args, **kwargs)
        if isinstance(bound.get("decompositions"), ScopedTable):
            return self.stock(gm, inputs, *args, **kwargs)  # under a policy already
        found = sorted(graph_devices(gm, inputs) & policies.keys()) if isinstance(gm, fx.GraphModule) else []
        if not found:
            return self.stock(gm, inputs, *args, **kwargs)
        if len(found) > 1:
            raise PolicyError(
                f"one graph has tensors on {', '.join(found)}, which all have a policy: a compile takes one; give it "
                "with backend=policy.backend()"
            )
        options = bound.get("config_patches") or {}
        if upstream.is_lite(options):
            logger.info("lite mode: the policy of %s is not applied", found[0])
            return self.stock(gm, inputs, *args, **kwargs)
        added = scope(policies[found[0]], gm, options, bound.get("decompositions"))
        return torch_names.compile_scoped(self.stock, bound, **added)
