"""What else is alive that this model belongs to? torch keeps no way up, from a module or from its parameters."""

from __future__ import annotations

import gc
import weakref
from typing import Any

from torch import nn
from torch.distributed.fsdp import FSDPModule

from .errors import InstallError


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


def check_outermost(model: nn.Module) -> None:
    """Refuse a part of a larger model before FSDP2's lazy initialisation makes a root of it for good.

    Raises:
        InstallError: naming the part and the model.
    """
    above = sharded_above(model)
    if above is not None:
        outer, name = above
        raise InstallError(
            f"install expects the outermost fully_shard module, found {name!r} of {type(outer).__name__}, which is one "
            "as well: call fsdp_hooks.install on that model"
        )


def _name(outer: nn.Module, model: nn.Module) -> str:
    return next((name for name, module in outer.named_modules() if module is model), "")
