"""What do PyTorch's own tools see of a compile? Counters, and an artifact that tlparse shows.

Nothing is loaded for it: outside a compile, or with a torch whose names are others, nothing happens.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterable, Sequence

from . import compat
from .digest import CollectiveRow
from .reporting.records import EventRecord, FinishRecord, json_values

PREFIX = "collective_identity_"
"""Of the names in ``torch._dynamo.utils.counters["inductor"]``."""


def count(finished: FinishRecord, captured: Iterable[CollectiveRow]) -> None:
    """Add one compile to ``counters["inductor"]``: graphs, collectives captured by source, left, lost, failed."""
    counters = compat.inductor_counters()
    if counters is None:
        return
    found = Counter(row.source or row.absence or "none" for row in captured)
    found["graphs"] = 1
    found["failed"] = int(finished.error is not None)
    found["from_cache"] = int(finished.cached)
    found["collectives_left"] = len(finished.rows)
    found["dropped"] += sum(row.absence == "dropped" for row in finished.rows)
    for name, number in found.items():
        if number:
            counters[PREFIX + name] += number


def trace(
    kind: str,
    name: str,
    finished: FinishRecord,
    captured: Sequence[CollectiveRow],
    events: Callable[[], Iterable[EventRecord]],
) -> None:
    """A JSON artifact of one compile for ``TORCH_TRACE``; built only where something listens.

    It holds what the run folder's ``captured``, ``event`` and ``finish`` lines hold (docs/run-format.md).
    """

    def text() -> str:
        table = json_values(finished)
        told = [json_values(event) for event in events()]
        values = {"phase": kind, "name": name, "captured": json_values(captured), "events": told, **table}
        return json.dumps(values, indent=1)

    compat.trace_artifact(f"collective_identity_{kind}", text)
