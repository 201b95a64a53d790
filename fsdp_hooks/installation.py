"""``install`` and ``uninstall``: put capture in the place of FSDP2's forward hooks, and take it out again."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from os import PathLike
from typing import Any

import torch
from torch import nn

import collective_identity

from . import compat, refusals
from .errors import InstallError
from .expected import expected_collectives
from .runtime import BINDINGS, FORWARD, UNIT, Binding, Unit, capturing_class
from .survey import attribute_names, outermost, parameters_of

logger = logging.getLogger("collective_identity.fsdp_hooks")

_INSTALLED = "_fsdp_hooks_installation"
_DYNAMO_MANAGED = "_is_fsdp_managed_module"


@dataclass
class _Installation:
    """What ``uninstall`` needs to undo, kept on the root module."""

    classes: list[tuple[nn.Module, type[nn.Module]]] = field(default_factory=list)
    hooks: list[tuple[dict[int, Any], int, Any]] = field(default_factory=list)
    managed: list[nn.Module] = field(default_factory=list)
    bound: list[nn.Module] = field(default_factory=list)


@dataclass(frozen=True)
class _Planned:
    """One FSDP module: its unit, where FSDP2's hooks are, every attribute that reads one of the unit's parameters."""

    module: nn.Module
    unit: Unit
    hooks: tuple[tuple[dict[int, Any], int], ...]
    reads: tuple[tuple[nn.Module, str, Binding], ...]


def install(model: nn.Module, *, run_dir: str | PathLike[str] | None = None) -> nn.Module:
    """Make a ``fully_shard`` model capturable: every FSDP collective functional, with an explicit role.

    Parameters, gradients, optimizer state, ``state_dict`` and checkpoints stay FSDP2's own DTensors. Call it
    after the last ``fully_shard`` and before ``torch.compile``; the optimizer may be built before or after.

    Args:
        model: the model that is trained; some of its modules, usually itself, were given to ``fully_shard``.
        run_dir: folder for this run's report (see docs/run-format.md); None keeps it in memory.

    Returns:
        The same model.

    Raises:
        InstallError: no module of it was given to ``fully_shard``, it is installed or compiled already, or this
            torch's FSDP2 is unknown.
        UnsupportedOption: an FSDP2 option that capture does not honour; the message names module and option.
    """
    compat.check_version()
    _check_model(model)
    _check_options(model)
    roots = outermost(model)
    for name, root in roots:
        compat.finish_lazy_init(root, name)
    planned = _plan(model, {id(root) for _, root in roots})
    expected = expected_collectives(model)
    session = collective_identity.session.ensure(run_dir=run_dir)

    installation = _Installation()  # nothing below refuses
    for plan in planned:
        _take_over(installation, plan)
    _swap_classes(installation)
    model.__dict__[_INSTALLED] = installation

    session.declare(expected)
    logger.info(
        "installed on %s: %d attributes read through %d fully_shard modules",
        type(model).__name__,
        sum(len(plan.reads) for plan in planned),
        len(planned),
    )
    return model


def uninstall(model: nn.Module) -> nn.Module:
    """Give the model back to eager FSDP2, exactly as it was before :func:`install`.

    Raises:
        InstallError: the model is not installed.
    """
    installation = model.__dict__.pop(_INSTALLED, None)
    if installation is None:
        raise InstallError(
            f"uninstall expects the model that was given to fsdp_hooks.install, found {type(model).__name__} without "
            "an installation: pass the root model itself (not the torch.compile wrapper, not a sub-module)"
        )
    for module, original in reversed(installation.classes):
        module.__class__ = original
    for hooks, key, original_hook in installation.hooks:
        hooks[key] = original_hook
    for module in installation.managed:
        setattr(module, _DYNAMO_MANAGED, True)
        del module.__dict__[UNIT]
        if FORWARD in module.__dict__:
            module.__dict__["forward"] = module.__dict__.pop(FORWARD)
    for module in installation.bound:
        module.__dict__.pop(BINDINGS, None)
    torch._dynamo.reset()  # compiled code of this process may hold the captured forward
    return model


def _check_model(model: nn.Module) -> None:
    if not isinstance(model, nn.Module):
        raise InstallError(f"install expects an nn.Module, found {type(model).__name__}")
    if hasattr(model, "_orig_mod"):
        raise InstallError(
            "install expects the model before torch.compile, found a compiled one: call "
            "fsdp_hooks.install(model) first, then model = torch.compile(model, backend='collective_identity')"
        )
    for name, module in model.named_modules():
        if _INSTALLED in module.__dict__ or BINDINGS in module.__dict__:
            where = "this model" if name == "" else f"its sub-module {name!r}"
            raise InstallError(
                f"{where} is installed already: call fsdp_hooks.install once, on the root, after the last "
                "fully_shard (fsdp_hooks.uninstall undoes it)"
            )
    if not any(True for _ in compat.fsdp_modules(model)):
        raise InstallError(
            f"install expects a model with fully_shard applied, found {type(model).__name__} with none: call "
            "torch.distributed.fsdp.fully_shard on its blocks and on the model, then fsdp_hooks.install(model)"
        )


def _check_options(model: nn.Module) -> None:
    """Refuse every option by name before FSDP2's lazy initialisation, which changes the model or complains itself."""
    names = attribute_names(model)
    gathered = 0
    for name, module in compat.fsdp_modules(model):
        state = compat.state_of(module, name)
        refusals.check_state(state, name)
        for group in compat.groups_of(state, name):
            refusals.check_group(group, name)
        for found in parameters_of(name, module, names):
            refusals.check_param(found.param, name, found.fqn)
            gathered += 1
    if not gathered:
        raise InstallError(
            f"install expects fully_shard modules with parameters, found none in {type(model).__name__}: "
            "leave out fsdp_hooks.install, there is nothing to capture"
        )


def _plan(model: nn.Module, root_ids: set[int]) -> list[_Planned]:
    """Read every FSDP2 decision. Changes nothing, but reshards what an earlier eager forward left unsharded."""
    names = attribute_names(model)
    planned = []
    for name, module in compat.fsdp_modules(model):
        state = compat.state_of(module, name)
        policy = state._mp_policy
        unit = Unit(
            name,
            is_root=id(module) in root_ids,
            device=state._device,
            cast_inputs_to=policy.param_dtype if policy.cast_forward_inputs else None,
            cast_outputs_to=policy.output_dtype,
        )
        reads: list[tuple[nn.Module, str, Binding]] = []
        for found in parameters_of(name, module, names):
            binding = Binding(unit, found.spec())
            reads += [(owner, attribute, binding) for owner, attribute in found.owners]
            unit.sources += ((*found.owners[0], binding.spec),)
        planned.append(_Planned(module, unit, _fsdp2_hooks(module, state, name), tuple(reads)))
    for plan in planned:
        plan.module.reshard()  # type: ignore[operator]
    return planned


def _fsdp2_hooks(module: nn.Module, state: Any, name: str) -> tuple[tuple[dict[int, Any], int], ...]:
    """The hook dicts of the module, with the keys of FSDP2's own hooks in them."""
    return tuple(
        (hooks, compat.hook_slot(handle, hooks, name))
        for handle, hooks in (
            (state._pre_forward_hook_handle, module._forward_pre_hooks),
            (state._post_forward_hook_handle, module._forward_hooks),
        )
    )


def _take_over(installation: _Installation, plan: _Planned) -> None:
    module = plan.module
    for hooks, key in plan.hooks:
        installation.hooks.append((hooks, key, hooks[key]))
        hooks[key] = _no_hook
    module.__dict__[UNIT] = plan.unit
    if "forward" in module.__dict__:
        module.__dict__[FORWARD] = module.__dict__.pop("forward")
    # Dynamo drops its guards on FSDP-managed modules (builder.py, skip_fsdp_guards): a captured model needs them.
    setattr(module, _DYNAMO_MANAGED, False)
    installation.managed.append(module)
    for owner, attribute, binding in plan.reads:
        if BINDINGS not in owner.__dict__:
            owner.__dict__[BINDINGS] = {}
            installation.bound.append(owner)
        owner.__dict__[BINDINGS][attribute] = binding


def _no_hook(*args: object) -> None:
    """Keeps the place of an FSDP2 hook, for ``uninstall``."""


def _swap_classes(installation: _Installation) -> None:
    """Give every touched module a class that reads its parameters through their bindings; equal ones share it."""
    made: dict[tuple[type[nn.Module], tuple[str, ...], bool], type[nn.Module]] = {}
    touched = {id(module): module for module in (*installation.managed, *installation.bound)}
    for module in touched.values():
        key = type(module), tuple(sorted(module.__dict__.get(BINDINGS, ()))), UNIT in module.__dict__
        base, names, has_unit = key
        if key not in made:
            methods = refusals.refusing_methods(base) if has_unit else {}
            made[key] = capturing_class(base, names, has_unit=has_unit, methods=methods)
        installation.classes.append((module, base))
        module.__class__ = made[key]
