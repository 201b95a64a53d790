"""What becomes of each FSDP2 option: followed, a hint without effect, or refused by name. None is ignored."""

from __future__ import annotations

import functools
import inspect
import itertools
import warnings
from collections.abc import Callable, Container, Mapping
from types import MappingProxyType
from typing import Any

import torch
from torch import nn

from . import compat
from .errors import UnsupportedOption
from .runtime import UNIT, Unit
from .survey import Managed

WAY_OUT = "remove it, or train this model with eager FSDP2 (leave out fsdp_hooks.install)"

_GROUP_OPTIONS: tuple[tuple[str, Callable[[Any], bool]], ...] = (
    ("gradients that eager FSDP2 accumulated and did not reduce yet", compat.gradients_wait),
    ("set_symm_mem_for_comm", compat.uses_symm_mem),
    ("a custom all-gather or reduce-scatter object", lambda g: not compat.uses_default_comms(g)),
    ("set_all_reduce_hook", lambda g: getattr(g, "_all_reduce_hook", None) is not None),
    ("set_reduce_scatter_unused_params(True)", lambda g: bool(getattr(g, "reduce_scatter_unused_params", False))),
    ("dp_mesh_dims (an SPMD mesh)", lambda g: bool(getattr(g.mesh_info, "is_spmd_mesh", False))),
    ("replicate() (a mesh without a shard dimension)", lambda g: compat.shard_group(g) is None),
)

_GRADIENT_HOOK = "a gradient hook (Tensor.register_hook), which eager FSDP2 never calls and autograd would"

_PARAM_OPTIONS: tuple[tuple[str, Callable[[Any], bool]], ...] = (
    ("fsdp_pre_all_gather / fsdp_post_all_gather", compat.has_all_gather_extension),
    (
        _GRADIENT_HOOK,
        lambda p: bool(p.sharded_param._backward_hooks),
    ),
    ("keep_unsharded_storage", lambda p: bool(getattr(p, "keep_unsharded_storage", False))),
    ("a sharded gradient dtype of its own", lambda p: bool(getattr(p, "_has_sharded_grad_dtype_override", False))),
)

#: Setters that FSDP2 and we both follow: the next forward is captured with the new value.
FOLLOWED = (
    "set_requires_gradient_sync",
    "set_requires_all_reduce",
    "set_reshard_after_forward",
    "set_reduce_scatter_divide_factor",
    "set_gradient_divide_factor",
    "set_force_sum_reduction_for_comms",
    "set_separate_reduce_scatter_group",
)

#: FSDPModule methods that would change, behind our back, what a captured graph does. True, False: only this argument
#: (the default) is accepted.
REFUSED: Mapping[str, bool | None] = MappingProxyType(
    {
        "set_custom_all_gather": None,
        "set_custom_reduce_scatter": None,
        "set_all_reduce_hook": None,
        "set_reduce_scatter_unused_params": False,
        "set_keep_unsharded_storage": False,
        "set_manual_backward_finalization": False,
        "finalize_backward": None,
        "set_symm_mem_for_comm": None,
        "unshard": None,
    }
)

_UNINSTALL = "call fsdp_hooks.uninstall(model) first, and train with eager FSDP2"
_WAYS_OUT: Mapping[str, str] = MappingProxyType(
    {"unshard": "read a full parameter with parameter.full_tensor(), or call fsdp_hooks.uninstall(model) first"}
)

#: Hints about when eager FSDP2 issues or frees things. Values are the same; a captured graph has its own order.
HINTS = (
    "set_is_last_backward",
    "set_modules_to_forward_prefetch",
    "set_modules_to_backward_prefetch",
    "set_post_optim_event",
    "set_reduce_scatter_max_input_buffers",
    "set_reshard_after_backward",
    "set_unshard_in_backward",
    "set_allocate_memory_from_process_group_for_comm",
)


def check_state(one: Managed, roots: Container[int]) -> None:
    """Refuse a ``fully_shard([a, b])`` that is nowhere below another: FSDP2 wants one root."""
    if len(one.modules) > 1 and id(one.modules[0][1]) in roots:
        refuse(one.name, "fully_shard([a, b, ...]) without a root", "call fully_shard on the whole model as well")


def set_on(one: Managed) -> tuple[str, ...]:
    """The options that capture does not honour and that are set on a module now, its parameters' included."""
    groups = compat.groups_of(one.state, one.name)
    params = [param for group in groups for param in compat.params_of(group, one.name)]
    return (
        *(option for option, is_set in _GROUP_OPTIONS if any(map(is_set, groups))),
        *(option for option, is_set in _PARAM_OPTIONS if any(map(is_set, params))),
    )


def check_group(group: Any, name: str) -> None:
    """Refuse every option of a parameter group that capture does not honour."""
    for option, is_set in _GROUP_OPTIONS:
        if is_set(group):
            refuse(name, option)


def check_param(param: Any, name: str, fqn: str) -> None:
    """Refuse every option of one parameter that capture does not honour."""
    for option, is_set in _PARAM_OPTIONS:
        if is_set(param):
            refuse(name, f"{option} (parameter {fqn!r})")
    if param.sharded_param.is_meta:
        refuse(
            name,
            f"a parameter on the meta device ({fqn!r})",
            "materialise the model first (model.to_empty(device=...), then initialise it), then install",
        )


def check_owner(param: Any, name: str, fqn: str, taken: dict[int, str]) -> None:
    """Refuse a parameter that two ``fully_shard`` calls were given, as FSDP2 does in its first forward (torch 2.12)."""
    number = compat.original_number(param)
    if number is not None and taken.setdefault(number, fqn) != fqn:
        refuse(
            name,
            f"a parameter shared across groups ({fqn!r} is {taken[number]!r}, which another fully_shard call has)",
            "give both modules to one call, fully_shard([a, b]), or leave both to the call on the model",
        )


def warn_of_hooks(one: Managed, unit: Unit) -> None:
    """Warn of the user's hooks that eager FSDP2 runs between its casts and a captured module outside them."""
    own = {key for _, key in compat.hook_slots(one.state, one.name)}  # no two hooks of a process have one number
    for name, module in one.modules:
        earlier = list(itertools.takewhile(lambda key: key not in own, module._forward_hooks))
        others = [key for key in module._forward_pre_hooks if key not in own]
        if (unit.cast_inputs_to is not None and others) or (unit.cast_outputs_to is not None and earlier):
            warnings.warn(
                f"module {name!r}: has a forward hook that eager FSDP2 runs between the casts of its mp_policy and a "
                "captured module outside them, so it sees other dtypes: register it on a module inside or around this "
                "one",
                stacklevel=5,
            )


def watch_gradient(param: Any, group: Any, name: str, fqn: str) -> torch.utils.hooks.RemovableHandle | None:
    """Refuse a gradient hook that was registered after install, in the first backward that ran it.

    One that runs after accumulation is right but where no gradient is reduced: FSDP2 does not call it there, autograd
    does in compiled code, for the parameter is an input of the compiled function. None where there is no gradient.
    """

    def check(leaf: torch.Tensor) -> None:
        if leaf._backward_hooks:
            refuse(name, f"{_GRADIENT_HOOK} (parameter {fqn!r})")
        if compat.sync_of(group) != "all" and compat.gradient_hooks(leaf):
            refuse(
                name,
                f"register_post_accumulate_grad_hook with gradient sync off in compiled code (parameter {fqn!r}): it "
                "would be called without a gradient of this step",
                "keep gradient sync on, leave out torch.compile, or do the hook's work after the step that reduces",
            )

    return compat.watch_accumulation(param.sharded_param, check)


def late_method(name: str) -> Callable[..., Any]:
    """What a method runs first that was registered on an installed module."""

    def refuse_it(*args: Any) -> None:
        refuse(
            name,
            "register_fsdp_forward_method on an installed model, whose method would gather outside every graph",
            "call it before fsdp_hooks.install",
        )

    return refuse_it


def refuse(name: str, option: str, way_out: str = WAY_OUT) -> None:
    """Raise :class:`UnsupportedOption` for one option of one module."""
    where = "the root module" if name == "" else f"module {name!r}"
    raise UnsupportedOption(f"{where}: fsdp_hooks does not support {option}: {way_out}")


def methods_of_installed(base: type[nn.Module]) -> dict[str, Callable[..., Any]]:
    """Replacements for the option setters of an installed FSDP module's class."""
    followed = {name: _following(base, name) for name in FOLLOWED if hasattr(base, name)}
    if hasattr(base, "reset_iter_state"):
        followed["reset_iter_state"] = _resetting(base)
    return followed | {name: _refusing(base, name, only) for name, only in REFUSED.items() if hasattr(base, name)}


def _following(base: type[nn.Module], method: str) -> Callable[..., Any]:
    original = getattr(base, method)

    @functools.wraps(original)
    def setter(self: nn.Module, *args: Any, **kwargs: Any) -> None:
        unit = self.__dict__[UNIT][0]
        unit.check_waiting()
        original(self, *args, **kwargs)
        unit.options_changed()

    return setter


def _resetting(base: type[nn.Module]) -> Callable[..., Any]:
    method = "reset_iter_state"
    original: Callable[..., Any] = getattr(base, method)

    @functools.wraps(original)
    def reset_iter_state(self: nn.Module) -> None:
        original(self)
        self.__dict__[UNIT][0].reset()

    return reset_iter_state


def _refusing(base: type[nn.Module], method: str, accepted: bool | None) -> Callable[..., Any]:
    parameters = list(inspect.signature(getattr(base, method)).parameters)[1:]

    def setter(self: nn.Module, *args: Any, **kwargs: Any) -> None:
        given = args[0] if args else kwargs.get(parameters[0]) if parameters else None
        if accepted is not None and given is accepted:
            return
        refuse(
            self.__dict__[UNIT][0].name,
            f"{method} on an installed model, whose collectives are in the captured graph",
            _WAYS_OUT.get(method, _UNINSTALL),
        )

    setter.__name__ = method
    return setter
