"""What around the graph was as it is when a step was traced, and does it still hold?

A graph knows no option, no flag and no hook: it is what they made of the step. One frozen value says all of them; it is
taken when the step is traced and compared at every call, because eager FSDP2 would follow each change.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, NamedTuple

from torch import nn

from . import compat, compat_step, refusals
from .data_parallel_record import data_parallel_specs
from .errors import InstallError, UnsupportedOption
from .runtime import UNIT
from .survey import attribute_names, managed, parameters_of

_OBJECT = "object"
_SYNC = "gradient sync (set_requires_gradient_sync, set_requires_all_reduce)"
_WAITING = "gradients that wait for communication"
_HOOKS = "gradient hooks (register_hook, register_post_accumulate_grad_hook)"
_OPTIONS = "FSDP2's options that a graph does not honour"

#: What has to have this value, at the trace and at every call, and what to do if it has not.
_REQUIRED: Mapping[str, tuple[Any, str]] = MappingProxyType(
    {
        _SYNC: ("all", "set both to True; a step traced without optimizer adds reduced gradients up in param.grad"),
        _WAITING: ((), "run one more eager forward and backward with gradient sync on first"),
        _HOOKS: (0, "remove them, a graph calls none; a step traced without optimizer leaves param.grad to you"),
        _OPTIONS: ((), "set them back, or train this model with eager FSDP2"),
    }
)

#: Who sets a field of ``UnshardArgs``; the others follow from ``fully_shard`` itself.
_SETTERS: Mapping[str, str] = MappingProxyType(
    {
        "reshard_after_forward": "set_reshard_after_forward",
        "reduce_group": "set_separate_reduce_scatter_group",
        **dict.fromkeys(
            ("reduce_op", "replicate_op", "predivide", "postdivide"),
            "set_gradient_divide_factor, set_force_sum_reduction_for_comms",
        ),
    }
)


class Fact(NamedTuple):
    """One thing that a step was made from."""

    where: str
    what: str
    value: Any


@dataclass(frozen=True, slots=True)
class Standing:
    """Modules and tensors with their flags and hooks; then FSDP2's options. Objects are compared by their ids."""

    structure: tuple[Fact, ...]
    options: tuple[Fact, ...]
    alive: tuple[Any, ...] = field(compare=False)  # so that no other object gets one of their ids

    @classmethod
    def of(cls, model: nn.Module) -> Standing:
        """What holds now.

        Raises:
            UnsupportedOption: no graph could do what eager FSDP2 would.
        """
        structure, options = tuple(_structure(model)), tuple(_options(model))
        for where, what, value in (*structure, *options):
            required, way_out = _REQUIRED.get(what, (value, ""))
            if value != required:
                raise UnsupportedOption(
                    f"trace_train_step expects {what} of {where} to be {_say(required)}, found {_say(value)}: {way_out}"
                )
        return cls(structure, options, (*model.modules(), *model.parameters(), *model.buffers()))

    def expect(self, model: nn.Module) -> None:
        """Compare with what holds now, FSDP2's shards being in their places.

        Raises:
            InstallError: names the first thing that is not as it was traced, where it is, and what to do.
        """
        _compare(self.structure, tuple(_structure(model)))
        _compare(self.options, tuple(_options(model)))


def _compare(traced: tuple[Fact, ...], now: tuple[Fact, ...]) -> None:
    if traced == now:
        return
    before, after = ({fact[:2]: fact.value for fact in facts} for facts in (traced, now))
    none = object()
    where, what = key = next(k for k in (*before, *after) if before.get(k, none) != after.get(k, none))
    if what == _OBJECT or key not in before or key not in after:
        raise InstallError(
            "the step expects the modules, parameters and buffers that it was traced with, found "
            f"{where} replaced, added or taken away: trace it again"
        )
    was, found = before[key], after[key]
    way_out = _REQUIRED[what][1] if what in _REQUIRED else "set it back, or trace the step again"
    if what == "":
        what, was, found = next((n, a, b) for n, a, b in zip(was._fields, was, found, strict=True) if a != b)
        what = f"FSDP2's {what} ({_SETTERS.get(what, 'fully_shard')})"
    raise InstallError(
        f"the step expects {what} of {where} to be {_say(was)}, as it was traced, found {_say(found)}: {way_out}"
    )


def _say(value: Any) -> str:
    if isinstance(value, tuple):
        return ", ".join(map(str, value)) or "none"
    return repr(value)


def _structure(model: nn.Module) -> Iterator[Fact]:
    for name, module in model.named_modules():
        where = _module(name)
        yield Fact(where, _OBJECT, id(module))
        yield Fact(where, "train() or eval()", module.training)
        yield Fact(where, "hooks", compat_step.hooks_of(module))
        for kind, table in (("parameter", module._parameters), ("buffer", module._buffers)):
            for attribute, tensor in table.items():
                if tensor is None:
                    continue
                fqn = f"{name}.{attribute}" if name else attribute
                where = f"{kind} {fqn!r}"
                yield Fact(where, _OBJECT, id(tensor))
                yield Fact(where, "requires_grad", tensor.requires_grad)
                yield Fact(where, _HOOKS, len(compat.gradient_hooks(tensor)))


def _options(model: nn.Module) -> Iterator[Fact]:
    for spec in data_parallel_specs(model):
        yield Fact(f"parameter {spec.fqn!r}", "", spec.args)
    names = attribute_names(model)
    for one in managed(model):
        where = _module(one.name)
        yield Fact(where, "mp_policy", one.state._mp_policy)
        yield Fact(where, _OPTIONS, refusals.set_on(one))
        unit = one.modules[0][1].__dict__.get(UNIT, (None,))[0]
        waiting = () if unit is None else tuple(name for name, held in unit.accumulated.items() if held.waits)
        yield Fact(where, _WAITING, waiting)
        for spec in (found.spec() for found in parameters_of(one, names)):
            if spec.trainable:
                yield Fact(f"parameter {spec.fqn!r}", _SYNC, spec.args.sync)
            yield Fact(f"parameter {spec.fqn!r}", "", spec.args._replace(sync="all"))


def _module(name: str) -> str:
    return f"module {name!r}" if name else "the root module"
