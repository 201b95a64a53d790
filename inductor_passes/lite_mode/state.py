"""Whether, and how far, the graph in hand is compiled in Inductor's lite mode.

Asked inside the pass, never at registration: options, ``config.patch`` and regions decide per compile.
``fallback_by_default`` is what makes a graph lite (torch/_inductor/__init__.py, ``list_mode_options("lite")``,
read in torch 2.11.0 to 2.15.0); the mode's other switches say whether it is all of lite or a part.
"""

from __future__ import annotations

from enum import Enum

import torch
from torch import fx

from ..upstream import inductor_flag


class LiteState(str, Enum):
    """Lite mode as seen by one graph."""

    OFF = "off"
    FULL = "full"
    PARTIAL = "partial"
    REGION = "region"


def lite_state(gm: fx.GraphModule) -> LiteState:
    """The lite mode under which ``gm`` is compiled now.

    Returns:
        OFF when Inductor optimises; FULL with ``mode="lite"`` or equal options; PARTIAL when some of its switches
        were turned back on (then joint and post-grad hooks do run); REGION when only a nested region of an
        otherwise normal compile is lite.
    """
    if not inductor_flag("fallback_by_default"):
        return LiteState.OFF
    if gm.meta.get("nested_region_config") is not None:
        return LiteState.REGION
    lite = torch._inductor.list_mode_options("lite")
    return LiteState.FULL if all(inductor_flag(name) == value for name, value in lite.items()) else LiteState.PARTIAL
