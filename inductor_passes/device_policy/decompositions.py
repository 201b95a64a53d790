"""One compile's decomposition table: torch's, with entries that ask on which device the call is."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from .devices import call_device
from .faults import PolicyError
from .model import OperatorPolicy

Decomposition = Callable[..., Any]


class _ByDevice:
    """The policy's decomposition on its device (None: whole), torch's elsewhere."""

    __slots__ = ("_device", "_ours", "_stock")

    def __init__(self, device: str, ours: Decomposition | None, stock: Decomposition | None) -> None:
        self._device, self._ours, self._stock = device, ours, stock

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        chosen = self._ours if call_device(args, kwargs) == self._device else self._stock
        return NotImplemented if chosen is None else chosen(*args, **kwargs)


class ScopedTable(dict[Any, Decomposition]):
    """A copy of torch's table with the policy's rows; what is pickled is its name alone."""

    def __init__(self, policy: OperatorPolicy, stock: Mapping[Any, Decomposition], stock_name: str) -> None:
        super().__init__(stock)
        self.name = (policy.identity, stock_name)
        device = policy.device_type
        for op, function in policy.decompositions.items():
            self[op] = _ByDevice(device, function, stock.get(op))
        for op in policy.remove_decompositions | policy.lowerings.keys():
            if op in stock:
                self[op] = _ByDevice(device, None, stock[op])

    def __reduce_ex__(self, protocol: Any) -> Any:
        return Named, self.name


class Provider:
    """What Inductor calls for the table while it lowers; a cached graph keeps its name."""

    __slots__ = ("_table",)

    def __init__(self, table: ScopedTable) -> None:
        self._table = table

    def __call__(self) -> ScopedTable:
        return self._table

    def __reduce__(self) -> Any:
        return Named, self._table.name


class Named:
    """What :class:`ScopedTable` and :class:`Provider` unpickle to: enough for a key, nothing to compile with."""

    __slots__ = ("_name",)

    def __init__(self, identity: str, stock_name: str) -> None:
        self._name = (identity, stock_name)

    def __call__(self) -> ScopedTable:
        raise PolicyError(f"the decompositions of {self._name[0]} were not kept with a cached graph: compile it again")

    def __reduce__(self) -> Any:
        return Named, self._name
