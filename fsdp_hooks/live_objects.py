"""What else is alive that this model belongs to? torch keeps no way up, from a module or from its parameters."""

from __future__ import annotations

import gc
import weakref
from typing import Any

from torch import nn
from torch.distributed.fsdp import FSDPModule


def instances(base: type[Any]) -> list[Any]:
    """Every live object of ``base``: what refers to it, or to a class below it, as its type."""
    kinds = [base]
    for kind in kinds:  # grows while it is read
        kinds += [below for below in type.__subclasses__(kind) if below not in kinds]
    return [one for one in gc.get_referrers(*kinds) if type(one) in kinds]


def sharded_above(model: nn.Module) -> tuple[nn.Module, str] | None:
    """The largest ``fully_shard`` model that holds ``model`` as a sub-module, and its name there."""
    inside = {id(module) for module in model.modules()}
    above = [weakref.ref(one) for one in instances(FSDPModule) if id(one) not in inside and _name(one, model)]
    if above:
        gc.collect()  # one that nobody can reach any more runs nothing
    alive = [(one, _name(one, model)) for ref in above if (one := ref()) is not None]
    return max(alive, key=lambda found: len(found[1]), default=None)


def _name(outer: nn.Module, model: nn.Module) -> str:
    return next((name for name, module in outer.named_modules() if module is model), "")
