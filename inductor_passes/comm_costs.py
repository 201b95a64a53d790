"""What does a collective cost on this machine, and how large should a bucket be for that?"""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Iterator, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any

from torch.distributed import ProcessGroup

from .options import KINDS

MIB = 2**20
SEEN = 0.01
"""The least share of a measured time that is taken for more than noise: a latency below this share of the shortest
time, or a growth with the size below this share of it, is counted as so much, never as nothing."""


@dataclass(frozen=True, slots=True)
class KindCosts:
    """The two costs of one kind of collective: ``bytes`` take ``latency_us + 1e6 * bytes / bandwidth`` microseconds.

    Attributes:
        latency_us: microseconds that a collective of any size takes: to launch it and for the ranks to meet.
        bandwidth: bytes per second on top of that, counted as `CommCosts` says.

    Raises:
        ValueError: one that is not a positive finite number.
    """

    latency_us: float
    bandwidth: float

    def __post_init__(self) -> None:
        for name in ("latency_us", "bandwidth"):
            value = getattr(self, name)
            if not _is_number(value) or not 0 < value < math.inf:
                raise ValueError(f"expected {name} to be a positive number, found {value!r}")


@dataclass(frozen=True, slots=True)
class CommCosts:
    """What collectives cost on one process group, as `measure_comm_costs` found it; equal on all of its ranks.

    Bytes are counted as the backend's option ``cap_mb`` counts them: on one rank, the larger of what the collective
    reads and what it writes. That is the output of an all-gather (the whole parameter), the input of a reduce-scatter
    (the whole gradient) and either side of an all-reduce.

    Attributes:
        all_gather: costs of ``all_gather_into_tensor``.
        reduce_scatter: costs of ``reduce_scatter_tensor`` with ``sum``.
        all_reduce: costs of ``all_reduce`` with ``sum``.
        group_size: ranks in the group.
        device: type of the device whose tensors were sent (``"cuda"``, ``"cpu"``).

    Raises:
        ValueError: a field of another type, a group of fewer than two ranks.
    """

    all_gather: KindCosts
    reduce_scatter: KindCosts
    all_reduce: KindCosts
    group_size: int
    device: str

    def __post_init__(self) -> None:
        for kind in KINDS:
            if not isinstance(getattr(self, kind), KindCosts):
                raise ValueError(f"expected {kind} to be KindCosts, found {getattr(self, kind)!r}")
        if not isinstance(self.group_size, int) or isinstance(self.group_size, bool) or self.group_size < 2:
            raise ValueError(f"expected group_size to be two ranks or more, found {self.group_size!r}")
        if not isinstance(self.device, str) or not self.device:
            raise ValueError(f"expected device to be a device type such as 'cuda', found {self.device!r}")

    def of(self, kind: str) -> KindCosts:
        """The costs of ``"all_gather"``, ``"reduce_scatter"`` or ``"all_reduce"``.

        Raises:
            ValueError: another kind.
        """
        if kind not in KINDS:
            raise ValueError(f"expected a kind out of {', '.join(KINDS)}, found {kind!r}")
        found: KindCosts = getattr(self, kind)
        return found

    def seconds(self, kind: str, nbytes: float) -> float:
        """Seconds that one collective of ``nbytes`` bytes is expected to take alone, nothing else running.

        Raises:
            ValueError: an unknown kind, a size that is negative or no finite number.
        """
        costs = self.of(kind)
        if not _is_number(nbytes) or not 0 <= nbytes < math.inf:
            raise ValueError(f"expected a size in bytes, 0 or more, found {nbytes!r}")
        return 1e-6 * costs.latency_us + nbytes / costs.bandwidth

    def cap_mb(
        self,
        efficiency: float = 0.9,
        *,
        kinds: Collection[str] = ("all_gather", "reduce_scatter"),
        group: ProcessGroup | None = None,
    ) -> float:
        """The size in MiB from which a collective of each kind reaches this share of its bandwidth.

        For the backend's option of that name, with ``order="graph"``. A collective of ``latency * bandwidth *
        efficiency / (1 - efficiency)`` bytes spends ``1 - efficiency`` of its time on latency; the largest of these
        sizes is rounded up to a power of two. Two measurements of one machine differ by some per cent: rounded, they
        mostly give the same cap, and with it the same cache keys. Near a power of two they may not, so keep the costs
        (`to_json`) where a job is to start warm.

        Args:
            efficiency: between 0 and 1, both excluded.
            kinds: what the buckets hold. The default is what FSDP sends on its shard group; HSDP's all-reduces run on
                the replicate group, which is measured by itself.
            group: what the buckets are sent on, to be told when kept costs are of a group of another size.

        Raises:
            ValueError: an efficiency outside (0, 1), an unknown kind, no kind, a group of another size.
        """
        if group is not None and group.size() != self.group_size:
            raise ValueError(
                f"expected costs of a group of {group.size()} ranks, as these buckets are sent on, found those of "
                f"{self.group_size}: call measure_comm_costs on this group"
            )
        if not _is_number(efficiency) or not 0 < efficiency < 1:
            raise ValueError(f"expected an efficiency between 0 and 1, both excluded, found {efficiency!r}")
        if isinstance(kinds, str) or not kinds:
            raise ValueError(f"expected kinds to be a tuple or list out of {', '.join(KINDS)}, found {kinds!r}")
        waited = max(1e-6 * one.latency_us * one.bandwidth for one in map(self.of, kinds))
        nbytes = math.ceil(waited * efficiency / (1 - efficiency))
        return (1 << (nbytes - 1).bit_length()) / MIB

    def to_json(self) -> str:
        """One line of JSON; `from_json` gives an equal value back."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> CommCosts:
        """The value whose `to_json` this is.

        Raises:
            ValueError: not JSON, a field that is missing, unknown or of another type; the message names it.
        """
        try:
            given = _with_fields(json.loads(text), cls)
            costs = {kind: KindCosts(**_with_fields(given[kind], KindCosts)) for kind in KINDS}
            return cls(**{**given, **costs})
        except (ValueError, TypeError, RecursionError) as error:
            found = repr(text)[:80]
            raise ValueError(f"expected the text of CommCosts.to_json, found {found}: {error}") from error


def fit_costs(points: Sequence[tuple[int, float]]) -> KindCosts:
    """Latency and bandwidth out of times at several sizes: the line ``seconds = latency + bytes / bandwidth``.

    The line with the least sum of ``|measured - line| / measured``: relative, so that small sizes count as much as
    large ones; absolute and not squared, so that a few sizes at which something else ran do not move it. It is found
    exactly: the best line goes through two of the points, or through one with the least latency or growth that `SEEN`
    leaves. Only sums, products and comparisons, so hosts that are given equal points get equal bits.

    Args:
        points: (bytes, seconds), at two different sizes or more.

    Raises:
        ValueError: fewer than two sizes, a size or time that is not positive and finite.
    """
    for nbytes, seconds in points:
        if not (0 < nbytes < math.inf and 0 < seconds < math.inf):
            raise ValueError(f"expected positive bytes and seconds, found {nbytes!r} bytes in {seconds!r} s")
    if len({nbytes for nbytes, _ in points}) < 2:
        raise ValueError(f"expected times at two different sizes or more, found {list(points)!r}")
    latency, slope = min(_lines(points), key=lambda line: _misfit(points, *line))
    return KindCosts(latency_us=1e6 * latency, bandwidth=1 / slope)


def _lines(points: Sequence[tuple[int, float]]) -> Iterator[tuple[float, float]]:
    """Every line (seconds, seconds a byte) that can be the best one."""
    least_latency = SEEN * min(seconds for _, seconds in points)
    least_slope = least_latency / max(nbytes for nbytes, _ in points)
    for i, (nbytes, seconds) in enumerate(points):
        yield least_latency, (seconds - least_latency) / nbytes
        yield seconds - least_slope * nbytes, least_slope
        for other, later in points[i + 1 :]:
            if nbytes != other:
                slope = (later - seconds) / (other - nbytes)
                latency = seconds - slope * nbytes
                if slope >= least_slope and latency >= least_latency:
                    yield latency, slope


def _misfit(points: Sequence[tuple[int, float]], latency: float, slope: float) -> float:
    return sum(abs(seconds - latency - slope * nbytes) / seconds for nbytes, seconds in points)


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _with_fields(given: Any, kind: type) -> dict[str, Any]:
    """``given`` as it is, if it is an object with exactly the fields of this dataclass."""
    wanted = [one.name for one in fields(kind)]
    if not isinstance(given, dict) or set(given) != set(wanted):
        raise ValueError(f"expected an object with {', '.join(wanted)}, found {given!r}")
    return given
