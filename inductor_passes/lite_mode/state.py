"""Whether, and how far, the graph in hand is compiled in Inductor's lite mode.

Asked inside the pass, never at registration: options, ``config.patch``, regions and, from torch 2.15, the variable
``TORCHINDUCTOR_LITE_MODE`` decide per compile. ``fallback_by_default`` is what makes a graph lite
(torch/_inductor/__init__.py, ``list_mode_options("lite")``, read in torch 2.11.0 to 2.15.0); the mode's other
switches say whether it is all of lite or a part.
"""

from __future__ import annotations

from enum import Enum

from torch import fx

from ..upstream import LITE_SWITCH as SWITCH
from ..upstream import inductor_flag, mode_options, region_patches


class LiteState(str, Enum):
    """Lite mode as seen by one graph."""

    OFF = "off"
    FULL = "full"
    PARTIAL = "partial"
    REGION = "region"


def lite_state(gm: fx.GraphModule) -> LiteState:
    """The lite mode under which ``gm`` is compiled now.

    A nested compile region has options of its own from torch 2.14 on (torch/_inductor/compile_fx.py,
    ``_patch_nested_region_inductor_config``); they count before the configuration of the moment, also where that
    is asked from outside the region.

    Returns:
        OFF when Inductor optimises; FULL with ``mode="lite"`` or equal options; PARTIAL when some of its switches
        were turned back on (then joint and post-grad hooks do run); REGION when only a nested region of an
        otherwise normal compile is lite.
    """
    own = region_patches(gm)
    if not own.get(SWITCH, inductor_flag(SWITCH)):
        return LiteState.OFF
    if gm.meta.get("nested_region_config") is not None:
        return LiteState.REGION
    lite = mode_options()["lite"]
    return LiteState.FULL if all(inductor_flag(name) == value for name, value in lite.items()) else LiteState.PARTIAL


def lite_parts(gm: fx.GraphModule) -> tuple[fx.GraphModule, ...]:
    """The graphs in which nothing may change: the whole of a lite graph, or its lite regions and what is in them."""
    if lite_state(gm) is not LiteState.OFF:
        return _within(gm)
    regions = (one for one in _within(gm)[1:] if lite_state(one) is LiteState.REGION)
    return tuple({id(part): part for region in regions for part in _within(region)}.values())


def _within(gm: fx.GraphModule) -> tuple[fx.GraphModule, ...]:
    """The graph and all its sub-graphs, each once."""
    if not gm._modules:
        return (gm,)
    return tuple(one for one in gm.modules() if isinstance(one, fx.GraphModule))
