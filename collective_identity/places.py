"""Which parameters does a node carry, and which line of the user's code is it from? For messages only."""

from __future__ import annotations

import re

from torch import fx

from . import store
from .canonical import fields

_FRAME = re.compile(r'File "(.+)", line (\d+), in (.+)')


def place_of(node: object) -> tuple[tuple[str, ...] | None, str | None]:
    """(FQNs, ``file:line in function``) of an FX node, each None where the graph does not say.

    FQNs are those of the payload, valid or not, else of its parameter group, else of the module the node was traced
    in. The line is the innermost one that the graph's ``stack_trace`` holds.
    """
    if not isinstance(node, fx.Node):
        return None, None
    try:
        frames = _FRAME.findall(str(node.meta.get("stack_trace") or ""))
        return _names(node), "{}:{} in {}".format(*frames[-1]) if frames else None
    except Exception:  # metadata may hold any object, with any behaviour
        return None, None


def _names(node: fx.Node) -> tuple[str, ...] | None:
    for payload in store.raw_payloads(node).values():
        held = fields(payload) or {}
        params, unit = held.get("params"), held.get("param_group")
        if type(params) in (list, tuple) and params and all(type(name) is str for name in params):
            return tuple(params)
        if type(unit) is str and unit:
            return (unit,)
    modules = node.meta.get("nn_module_stack")
    if isinstance(modules, dict) and modules:
        last = list(modules.values())[-1]
        if isinstance(last, tuple) and last and type(last[0]) is str and last[0]:
            return (last[0],)
    return None
