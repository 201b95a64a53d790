"""The options of ``torch.compile(..., backend="collective_identity", options={...})``."""

from __future__ import annotations

import dataclasses
import difflib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from torch import fx

from .device_policy import OperatorPolicy
from .lite_mode import strict_lite_options
from .upstream import inductor_option_exists, mode_options

KINDS = ("all_gather", "reduce_scatter", "all_reduce")
ORDERS = ("param_group", "graph", "fqn")
INNER = ("inductor", "aot_eager")
DEDUP = ("off", "drop", "refuse")
KERNELS = ("ops", "triton", "auto")


class OptionError(ValueError):
    """An option that the backend does not know, or a value it cannot have."""


@dataclass(frozen=True, slots=True)
class BackendOptions:
    """One compile's options, validated.

    Attributes:
        inner: ``"inductor"``, or ``"aot_eager"`` to run the captured graphs eagerly (for comparing numbers).
        bucketing: merge FSDP collectives by role; False only labels and reports them.
        kinds: the transports that are bucketed.
        cap_mb: size limit of a bucket in MiB, one for all or one by bucket index; None: no limit.
        order: ``"param_group"`` (what FSDP2 gathers together), ``"graph"`` (across parameter groups in graph
            order, up to the cap) or ``"fqn"`` (by parameter name).
        fqns: names in the order that ``"fqn"`` follows; by number and letter where it is empty.
        mixed_dtypes: gathers of several element types may share a bucket, sent as bytes.
        coalesced: the kinds whose buckets are sent member by member, each where it lies, in one coalesced call, instead
            of being copied into one buffer; where a member does not lie contiguous, the bucket is copied.
        kernels: what packs and unpacks the other buckets, and casts for a coalesced gather: ``"ops"``, torch's
            operators; ``"triton"``, one operator of our own each (:mod:`inductor_passes.kernels`), Triton kernels on
            CUDA; ``"auto"``, ours where they run so.
        dedup: ``"off"``; ``"drop"``: ``RS(a) + RS(b)`` becomes ``RS(a + b)``, which reassociates the sum, and mixed
            roles merge without a role; ``"refuse"``: likewise, equal roles only.
        fusion: fuse all-gather + matmul and matmul + reduce-scatter of tensor parallelism on groups with symmetric
            memory.
        overlap: how many parameter groups ahead of its first use a gather starts; reductions are then waited for
            one group later. 0: collectives stay where the capture put them. Inductor's reordering for peak memory,
            which would undo it, is off then.
        reshard: honour ``reshard_after_forward`` by gathering again in backward.
        pre_passes: callables run on each forward, backward and inference graph before anything of ours sees it.
            One with a ``uuid()`` keeps the compile caches usable; without it they are off for this compile.
        strict_lite: compile in lite mode with :func:`inductor_passes.strict_lite_options`; Inductor options that
            are given as well count before those.
        policy: an accelerator's operator policy for this compile (docs/device-policy.md).
        dump: save each graph as it was captured, before any pass of ours or of Inductor's, under ``graphs/`` of the
            session's run folder (`collective-identity dump` lists them). The compile caches are off for this compile.
        inductor: Inductor's own options, passed on.
    """

    inner: str = "inductor"
    bucketing: bool = True
    kinds: tuple[str, ...] = KINDS
    cap_mb: float | tuple[float, ...] | None = None
    order: str = "param_group"
    fqns: tuple[str, ...] = ()
    mixed_dtypes: bool = False
    coalesced: tuple[str, ...] = ()
    kernels: str = "auto"
    dedup: str = "off"
    fusion: bool = False
    overlap: int = 0
    reshard: bool = True
    pre_passes: tuple[Callable[[fx.GraphModule], Any], ...] = ()
    strict_lite: bool = False
    policy: OperatorPolicy | None = None
    dump: bool = False
    inductor: Mapping[str, Any] = field(default_factory=lambda: MappingProxyType({}))

    @property
    def cacheable(self) -> bool:
        """Whether everything that can change the output has a stable name, and no graph has to be seen."""
        return not self.dump and all(callable(getattr(one, "uuid", None)) for one in self.pre_passes)

    @property
    def inductor_patches(self) -> Mapping[str, Any]:
        """Inductor's options for this compile: the user's, and what a pass of ours needs."""
        return {"reorder_for_peak_memory": False, **self.inductor} if self.overlap else self.inductor

    def fingerprint(self) -> str:
        """These options as one line of JSON, for cache keys and for the agreement between ranks."""
        values = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        values["pre_passes"] = [_name_of(one) for one in self.pre_passes]
        values["policy"] = self.policy and self.policy.identity
        values["inductor"] = {key: _stable(value) for key, value in sorted(self.inductor.items())}
        return json.dumps(values, sort_keys=True)


def parse_options(options: Mapping[str, Any] | None, mode: str | None) -> BackendOptions:
    """Validate what ``torch.compile`` was given.

    Raises:
        OptionError: an unknown option, or a value out of range; the message lists what is possible.
    """
    ours = {f.name for f in dataclasses.fields(BackendOptions)} - {"inductor"}
    given = dict(options or {})
    own = {key: given.pop(key) for key in list(given) if key in ours}
    unknown = sorted(key for key in given if not inductor_option_exists(key))
    if unknown:
        near = [one for name in unknown for one in difflib.get_close_matches(name, ours, n=1)]
        meant = f" (did you mean {', '.join(map(repr, near))}?)" if near else ""
        raise OptionError(
            f"backend 'collective_identity' expects options among {', '.join(sorted(ours))}, or Inductor's own "
            f"(torch._inductor.list_options()), found {', '.join(map(repr, unknown))}{meant}: remove or correct them"
        )
    if mode:
        _one_of("mode", mode, tuple(mode_options()))
        given = {**mode_options()[mode], **given}
    _one_of("inner", own.get("inner", "inductor"), INNER)
    _one_of("order", own.get("order", "param_group"), ORDERS)
    _one_of("dedup", own.get("dedup", "off"), DEDUP)
    _one_of("kernels", own.get("kernels", "auto"), KERNELS)
    for name in ("bucketing", "dump", "fusion", "mixed_dtypes", "reshard", "strict_lite"):
        _one_of(name, own.get(name, True), (True, False))
    overlap = own.get("overlap", 0)
    if not isinstance(overlap, int) or isinstance(overlap, bool) or overlap < 0:
        raise OptionError(f"option 'overlap' expects a number of parameter groups, 0 or more, found {overlap!r}")
    if own.get("inner") == "aot_eager" and own.get("strict_lite"):
        raise OptionError(
            "inner='aot_eager' runs without Inductor, whose lite mode 'strict_lite' is: remove one of the two"
        )
    if own.get("strict_lite"):
        given = {**strict_lite_options(), **given}
    for name in ("kinds", "coalesced"):
        if name in own:
            own[name] = _several(name, own[name])
            for kind in own[name]:
                _one_of(name, kind, KINDS)
    if "fqns" in own:
        own["fqns"] = _several("fqns", own["fqns"])
        if not all(isinstance(one, str) for one in own["fqns"]):
            raise OptionError(f"option 'fqns' expects parameter names, found {own['fqns']!r}")
    if "cap_mb" in own:
        own["cap_mb"] = _cap(own["cap_mb"])
    if "pre_passes" in own:
        own["pre_passes"] = _several("pre_passes", own["pre_passes"])
        if not all(callable(one) for one in own["pre_passes"]):
            raise OptionError(f"option 'pre_passes' expects callables, found {own['pre_passes']!r}")
    if not isinstance(own.get("policy"), (OperatorPolicy, type(None))):
        raise OptionError(f"option 'policy' expects an OperatorPolicy, found {own['policy']!r}")
    if own.get("inner") == "aot_eager" and own.get("policy") is not None:
        raise OptionError(
            "inner='aot_eager' lowers nothing and expects no policy, found "
            f"{own['policy'].name!r}: remove it, or use inner='inductor'"
        )
    if own.get("inner") == "aot_eager" and given:
        raise OptionError(
            f"inner='aot_eager' runs without Inductor and expects none of its options, found "
            f"{', '.join(sorted(given))}: remove them, or use inner='inductor'"
        )
    return BackendOptions(**own, inductor=MappingProxyType(given))


def _one_of(name: str, value: Any, allowed: Sequence[Any]) -> None:
    if value not in allowed or isinstance(value, bool) != isinstance(allowed[0], bool):
        raise OptionError(f"option {name!r} expects one of {', '.join(map(repr, allowed))}, found {value!r}")


def _several(name: str, value: Any) -> tuple[Any, ...]:
    if not isinstance(value, (list, tuple)):
        raise OptionError(f"option {name!r} expects a list or a tuple, found {value!r}")
    return tuple(value)


def _cap(value: Any) -> float | tuple[float, ...] | None:
    if value is None:
        return None
    caps = tuple(value) if isinstance(value, (list, tuple)) else (value,)
    if not caps or not all(isinstance(c, (int, float)) and not isinstance(c, bool) and c > 0 for c in caps):
        raise OptionError(f"option 'cap_mb' expects a positive number of MiB, or several, found {value!r}")
    return tuple(map(float, caps)) if isinstance(value, (list, tuple)) else float(value)


def _stable(value: Any) -> str:
    """An Inductor option's value without the address of a callable, which differs from process to process."""
    return _name_of(value) if callable(value) else str(value)


def _name_of(one: Any) -> str:
    uuid = getattr(one, "uuid", None)
    return str(uuid()) if callable(uuid) else getattr(one, "__qualname__", type(one).__qualname__)
