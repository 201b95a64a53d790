"""The policy: what an accelerator wants of the compiler, as one immutable value."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from torch._ops import OpOverload

from .. import upstream
from .faults import (
    FALLBACK,
    REPLACEMENTS,
    Fallback,
    Operators,
    PolicyError,
    collective_table,
    conflicts,
    function_faults,
    name_faults,
)
from .identity import PYTHON, NoIdentity, content_identity

if TYPE_CHECKING:
    from .backend import PolicyBackend

_PACKAGE = Path(__file__).parent


@dataclass(frozen=True, slots=True, eq=False)
class OperatorPolicy:
    """Decompositions, lowerings and fallbacks of one accelerator, applied to one compile, node by node.

    An operator is an overload, a packet (all its overloads that write nothing) or text (``"aten::add.Tensor"``).
    Two policies are equal when their identities are. Source: pytorch/rfcs pull 101.

    Args:
        name: the backend's name, in messages and keys.
        version: the backend's own version, in keys.
        device_type: the accelerator, e.g. ``"cuda"``; never ``"cpu"``.
        decompositions: operator to a function of the operator's signature over tensors, traced instead of torch's.
        remove_decompositions: operators that reach lowering whole, although torch would decompose them.
        lowerings: operator to a function of the operator's signature over Inductor's IR (tensors are
            ``TensorBox``), or :data:`FALLBACK`.
        fallbacks: operators that run their eager kernel; the same as :data:`FALLBACK` in ``lowerings``.
        collectives: role (or ``"tp.*"``, or ``"*"``) to the replacements, among ``"low_contention"`` and
            ``"fused"``, that passes may make for collectives on the device; None: the policy forbids nothing.

    Raises:
        PolicyError: something is wrong; the message and ``.faults`` list all of it.
    """

    name: str
    version: str
    device_type: str
    decompositions: Mapping[Any, Callable[..., Any]] = field(default_factory=dict)
    remove_decompositions: Iterable[Any] = ()
    lowerings: Mapping[Any, Callable[..., Any] | Fallback] = field(default_factory=dict)
    fallbacks: Iterable[Any] = ()
    collectives: Mapping[str, Iterable[str]] | None = None
    identity: str = field(init=False, default="")
    """Name, version and a hash of the content; a part of both cache keys."""

    def __post_init__(self) -> None:
        ops = Operators()
        decompositions = ops.table("decompositions", self.decompositions)
        removed = ops.group("remove_decompositions", self.remove_decompositions)
        lowerings = ops.table("lowerings", self.lowerings)
        fallbacks = ops.group("fallbacks", self.fallbacks)
        collectives = collective_table(self.collectives, ops.faults)
        twice = sorted(str(op) for op in fallbacks if lowerings.get(op, FALLBACK) is not FALLBACK)
        lowerings = {**dict.fromkeys(fallbacks, FALLBACK), **lowerings}
        faults = [
            *name_faults(self.name, self.version, self.device_type),
            *ops.faults,
            *(f"{op} has both a lowering and a fallback" for op in twice),
            *conflicts(decompositions, removed, lowerings),
            *function_faults("decompositions", decompositions),
            *function_faults("lowerings", lowerings),
        ]
        if faults:
            plural = "s" if len(faults) > 1 else ""
            raise PolicyError(f"policy {self.name!r} cannot be built, {len(faults)} fault{plural}:", faults)
        self._set("decompositions", MappingProxyType(decompositions))
        self._set("remove_decompositions", removed)
        self._set("lowerings", MappingProxyType(lowerings))
        self._set("fallbacks", frozenset(op for op, value in lowerings.items() if value is FALLBACK))
        self._set("collectives", None if collectives is None else MappingProxyType(collectives))
        self._set("identity", self._content())

    def _set(self, name: str, value: object) -> None:
        object.__setattr__(self, name, value)

    def _content(self) -> str:
        rows = [f"python {PYTHON}", f"code {upstream.source_hash(_PACKAGE)}", f"device {self.device_type}"]
        for kind, table in (("decomposition", self.decompositions), ("lowering", self.lowerings)):
            rows += sorted(f"{kind} {_written(op)} {_of(function)}" for op, function in table.items())
        rows += sorted(f"removed {_written(op)}" for op in self.remove_decompositions)
        if self.collectives is not None:
            rows += sorted(f"collective {role} {sorted(allowed)}" for role, allowed in self.collectives.items())
        text = "\0".join((self.name, self.version, *rows, str(self.collectives is None)))
        return f"operator_policy:{self.name}:{self.version}:{hashlib.sha256(text.encode()).hexdigest()}"

    def check_unchanged(self) -> None:
        """Refuse a policy whose functions, or what they reach, are no longer what they were when it was built.

        Raises:
            PolicyError: a global, constant or helper was replaced since; build the policy again.
        """
        try:
            now = self._content()
        except NoIdentity as error:
            now = str(error)
        if now != self.identity:
            raise PolicyError(
                f"policy {self.name!r}: a function, or something that it reaches, changed after the policy was built; "
                "its cache identity would be wrong: build the policy again"
            )

    def allows(self, role: str | None, what: str) -> bool:
        """Whether a pass may replace a collective of ``role`` on the device by the form ``what``.

        The most exact row decides: the role, its namespace (``"tp.*"``), ``"*"``. A collective without a role is
        answered by ``"*"`` alone. No row: no. A policy that says nothing about collectives forbids nothing.

        Args:
            role: the resolved role, None when there is none.
            what: ``"low_contention"`` or ``"fused"``.

        Raises:
            ValueError: ``what`` is neither.
        """
        if what not in REPLACEMENTS:
            raise ValueError(f"allows() expects one of {', '.join(map(repr, REPLACEMENTS))}, found {what!r}")
        if self.collectives is None:
            return True
        keys = ("*",) if role is None else (role, f"{role.partition('.')[0]}.*", "*")
        found = next((self.collectives[key] for key in keys if key in self.collectives), ())
        return what in found

    def backend(self, **options: Any) -> PolicyBackend:
        """A backend for ``torch.compile(backend=...)``: Inductor, with this policy for its device.

        Args:
            options: Inductor's own options, as for ``torch.compile(options=...)``.

        Raises:
            PolicyError: an option that Inductor does not have.
        """
        from .backend import PolicyBackend

        return PolicyBackend(self, tuple(sorted(options.items())))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, OperatorPolicy) and other.identity == self.identity

    def __hash__(self) -> int:
        return hash(self.identity)

    def __copy__(self) -> OperatorPolicy:
        return self

    def __deepcopy__(self, memo: object) -> OperatorPolicy:
        return self

    def __repr__(self) -> str:
        return f"OperatorPolicy({self.identity})"

    def __reduce__(self) -> Any:
        raise TypeError("an OperatorPolicy belongs to its process: send its identity instead")


def _written(op: OpOverload) -> str:
    return f"{op.name()} {op._schema}"


def _of(function: Any) -> str:
    return "FALLBACK" if function is FALLBACK else content_identity(function)
