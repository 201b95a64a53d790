"""``install`` and ``uninstall``: put capture in the place of FSDP2's forward hooks, and take it out again."""

from __future__ import annotations

import contextlib
import functools
import logging
import weakref
from dataclasses import dataclass, field
from os import PathLike
from typing import Any

import torch
from torch import nn

import collective_identity

from . import compat, refusals
from .accumulated import Accumulated
from .errors import InstallError
from .expected import declare_again, expected_collectives
from .live_objects import check_outermost
from .runtime import BINDINGS, METHODS, UNIT, Binding, Unit, capture_by_class
from .stale_optimizers import warn_of_stale_optimizers
from .survey import Found, Managed, attribute_names, managed, outermost, parameters_of

logger = logging.getLogger("collective_identity.fsdp_hooks")

_INSTALLED = "_fsdp_hooks_installation"
_DYNAMO_MANAGED = "_is_fsdp_managed_module"


@dataclass
class _Installation:
    """What ``uninstall`` needs to undo, kept on the root module."""

    plans: tuple[_Planned, ...]
    classes: list[tuple[nn.Module, type[nn.Module]]] = field(default_factory=list)
    hooks: list[tuple[dict[int, Any], int, Any]] = field(default_factory=list)
    managed: list[nn.Module] = field(default_factory=list)
    methods: list[tuple[nn.Module, str, Any]] = field(default_factory=list)
    bound: list[nn.Module] = field(default_factory=list)
    watched: list[torch.utils.hooks.RemovableHandle] = field(default_factory=list)


@dataclass(frozen=True)
class _Planned:
    """One ``fully_shard`` call: its unit, where FSDP2's hooks are, its parameters and the attributes that read them."""

    modules: tuple[nn.Module, ...]
    unit: Unit
    hooks: tuple[tuple[dict[int, Any], int], ...]
    found: tuple[Found, ...]

    def read_options(self) -> None:
        """Take FSDP2's options as they are now into the unit and its bindings."""
        unit = self.unit
        sources = []
        for found in self.found:
            spec = found.spec()
            sources.append((*found.owners[0], spec))
            if spec.trainable and spec.args.sync != "all":
                now = functools.partial(compat.sync_of, found.group)
                unit.accumulated.setdefault(spec.fqn, Accumulated(now)).prepare(spec, unit.device)
            for owner, attribute in found.owners:
                if BINDINGS in owner.__dict__:
                    owner.__dict__[BINDINGS][attribute] = Binding(unit, spec)
        unit.hold(sources, self.modules)


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
        InstallError: no module of it was given to ``fully_shard``, it is part of a larger model that was, it is
            installed or compiled already, or this torch's FSDP2 is unknown.
        UnsupportedOption: an FSDP2 option that capture does not honour; the message names module and option.
    """
    planned = _checked(model)
    expected = expected_collectives(model)
    session = collective_identity.session.ensure(run_dir=run_dir)

    with contextlib.ExitStack() as undo:
        _capture(model, planned, undo)
        warn_of_stale_optimizers(model)
        if expected.rows:  # one rank alone neither gathers nor reduces
            session.declare(expected, model)
        undo.pop_all()
    logger.info(
        "installed on %s: %d attributes read through %d fully_shard modules",
        type(model).__name__,
        sum(len(found.owners) for plan in planned for found in plan.found),
        len(planned),
    )
    return model


def install_undeclared(model: nn.Module) -> None:
    """As :func:`install`, for a while: no report is to expect anything of it."""
    with contextlib.ExitStack() as undo:
        _capture(model, _checked(model), undo)
        warn_of_stale_optimizers(model)
        undo.pop_all()


def _checked(model: nn.Module) -> list[_Planned]:
    compat.check_version()
    _check_model(model)
    check_outermost(model)
    _check_options(model)
    roots = outermost(model)
    for name, root in roots:
        compat.finish_lazy_init(root, name)
    return _plan(model, {id(root) for _, root in roots})


def _capture(model: nn.Module, planned: list[_Planned], undo: contextlib.ExitStack) -> None:
    """Put capture in FSDP2's place; ``undo`` learns how to take it out again."""
    installation = _Installation(tuple(planned))
    undo.callback(_give_back, model, installation)
    for plan in planned:
        _take_over(installation, plan)
        plan.unit.options_changed = functools.partial(_read_options_again, weakref.ref(model))
        plan.unit.check_waiting = functools.partial(_check_waiting, weakref.ref(model))
        plan.unit.reset = functools.partial(_reset, weakref.ref(model))
    touched = (*installation.managed, *installation.bound)
    capture_by_class(touched, installation.classes, refusals.methods_of_installed)
    model.__dict__[_INSTALLED] = installation


def is_installed(model: nn.Module) -> bool:
    """Whether ``install`` or ``data_parallel`` captures this model's parameters."""
    return _INSTALLED in model.__dict__ or any(BINDINGS in module.__dict__ for module in model.modules())


def _plans_of(model: nn.Module | None) -> tuple[_Planned, ...]:
    installation = None if model is None else model.__dict__.get(_INSTALLED)
    return () if installation is None else installation.plans


def _read_options_again(root: weakref.ref[nn.Module]) -> None:
    """An FSDP2 setter was called: every later forward is another graph, and another declaration."""
    model = root()
    for plan in _plans_of(model):
        plan.read_options()
    if model is not None and _plans_of(model):
        declare_again(collective_identity.session.ensure(), expected_collectives(model), model)


def _check_waiting(root: weakref.ref[nn.Module]) -> None:
    for plan in _plans_of(root()):
        for fqn, accumulated in plan.unit.accumulated.items():
            accumulated.check(fqn)


def _reset(root: weakref.ref[nn.Module]) -> None:
    for plan in _plans_of(root()):
        plan.unit.close()
        for accumulated in plan.unit.accumulated.values():
            accumulated.forget()


def uninstall(model: nn.Module) -> nn.Module:
    """Give the model back to eager FSDP2, exactly as it was before :func:`install`, but lazily initialised.

    Raises:
        InstallError: the model is not installed, or gradients accumulated without communication wait in it.
    """
    installation = model.__dict__.get(_INSTALLED)
    if installation is None:
        raise InstallError(
            f"uninstall expects the model that was given to fsdp_hooks.install, found {type(model).__name__} without "
            "an installation: pass the root model itself (not the torch.compile wrapper, not a sub-module)"
        )
    for plan in installation.plans:
        for fqn, accumulated in plan.unit.accumulated.items():
            if accumulated.waits:
                raise InstallError(
                    f"uninstall expects no gradients that wait for communication, found those of {fqn!r}: run one more "
                    "forward and backward with set_requires_gradient_sync(True) and set_requires_all_reduce(True) first"
                )
    _give_back(model, installation)
    torch._dynamo.reset()  # compiled code of this process may hold the captured forward
    return model


def _give_back(model: nn.Module, installation: _Installation) -> None:
    """Undo whatever of an installation was done."""
    model.__dict__.pop(_INSTALLED, None)
    for module, original in reversed(installation.classes):
        module.__class__ = original
    for hooks, key, original_hook in installation.hooks:
        hooks[key] = original_hook
    for module in installation.managed:
        setattr(module, _DYNAMO_MANAGED, True)
        compat.replace_eager_forward(module, None)
        for name in (UNIT, METHODS):
            module.__dict__.pop(name, None)
    for module, name, original_method in installation.methods:
        module.__dict__[name] = original_method
    for module in installation.bound:
        module.__dict__.pop(BINDINGS, None)
    for handle in installation.watched:
        handle.remove()


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
    taken: dict[int, str] = {}
    gathered = 0
    roots = {id(root) for _, root in outermost(model)}
    for one in managed(model):
        refusals.check_state(one, roots)
        for group in compat.groups_of(one.state, one.name):
            refusals.check_group(group, one.name)
        for found in parameters_of(one, names):
            refusals.check_param(found.param, one.name, found.fqn)
            refusals.check_owner(found.param, one.name, found.fqn, taken)
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
    for one in managed(model):
        plan = _Planned(
            tuple(module for _, module in one.modules),
            _unit(one, root_ids),
            tuple(compat.hook_slots(one.state, one.name)),
            tuple(parameters_of(one, names)),
        )
        plan.read_options()
        refusals.warn_of_hooks(one, plan.unit)
        planned.append(plan)
    for plan in planned:
        if id(plan.modules[0]) in root_ids:
            inside = {id(module) for module in plan.modules[0].modules()}
            below = [one.unit for one in planned if one.unit.members > 1 and id(one.modules[0]) in inside]
            plan.unit.shared_below = tuple(below)
            for unit in below:
                unit.root = plan.unit
        for module in plan.modules:
            module.reshard()  # type: ignore[operator]
    return planned


def _unit(one: Managed, root_ids: set[int]) -> Unit:
    policy = one.state._mp_policy
    return Unit(
        one.name,
        is_root=id(one.modules[0][1]) in root_ids,
        device=one.state._device,
        cast_inputs_to=policy.param_dtype if policy.cast_forward_inputs else None,
        cast_outputs_to=policy.output_dtype,
        members=len(one.modules),
        casts_every_member=len(one.modules) == 1 or compat.casts_every_grouped_module(),
    )


def _take_over(installation: _Installation, plan: _Planned) -> None:
    for hooks, key in plan.hooks:
        installation.hooks.append((hooks, key, hooks[key]))
        hooks[key] = _no_hook
    for member, module in enumerate(plan.modules):
        methods = compat.registered_methods(module)
        installation.managed.append(module)
        module.__dict__.update({UNIT: (plan.unit, member), METHODS: methods})
        replaced = [*methods, *(["forward"] if "forward" in module.__dict__ else [])]
        for name in replaced:
            installation.methods.append((module, name, module.__dict__[name]))
            methods.setdefault(name, module.__dict__[name])
            del module.__dict__[name]
        # Dynamo drops its guards on FSDP-managed modules (builder.py, skip_fsdp_guards): a captured model needs them.
        setattr(module, _DYNAMO_MANAGED, False)
        compat.replace_eager_forward(module, refusals.late_method(plan.unit.name))
    for found in plan.found:
        for owner, _ in found.owners:
            if BINDINGS not in owner.__dict__:
                owner.__dict__[BINDINGS] = {}
                installation.bound.append(owner)
        handle = refusals.watch_gradient(found.param, found.group, plan.unit.name, found.fqn)
        installation.watched += [] if handle is None else [handle]
    plan.read_options()


def _no_hook(*args: object) -> None:
    """Keeps the place of an FSDP2 hook, for ``uninstall``."""
