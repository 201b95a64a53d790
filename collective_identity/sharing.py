"""What do the other ranks get to know of one compiled graph? The ledger's side of the board."""

from __future__ import annotations

from collections.abc import Sequence

from .agreement import AgreementResult, AgreementState, no_real_group
from .digest import CollectiveRow
from .exchange import Exchange
from .service import Service
from .standing import Place


class Shared:
    """One graph of one rank: that it compiles, what it is, and whether the others have the same."""

    def __init__(self, state: AgreementState, service: Service | None, number: int, kind: str, name: str) -> None:
        self._state, self._service = state, service
        self._number, self._kind, self._name = number, kind, name
        self._exchange: Exchange | None = None
        self.place = Place(number, ())
        self.busy(f"compiles {kind} graph {name}")

    def busy(self, what: str | None) -> None:
        """What this rank does with the graph, for `watch`; None ends it. A joint graph has no end of its own: its
        halves are compiled."""
        if self._service is not None and self._kind != "joint" and self._service.start():
            self._service.standing.doing(self, what)

    def publish(
        self, rows: Sequence[CollectiveRow], *, tag: str, cached: bool = False, groups: Sequence[str] | None = None
    ) -> None:
        """Let the other ranks know of the graph, once, without waiting. Without other ranks nothing happens."""
        used = (*(row.group for row in rows if row.group is not None), *(groups or ()))
        self.place = Place(self._number, tuple(dict.fromkeys(used)))
        if self._exchange is None and no_real_group() is None:
            self._exchange = Exchange(
                rows, kind=self._kind, cached=cached, tag=tag, groups=groups, state=self._state, name=self._name
            )
            if self._service is not None:
                self._service.publish(self._exchange, self._number, self._kind, self._name)

    def agree(self, timeout: float) -> AgreementResult:
        """Compare the published graph with the other ranks'; `agreement.agree` says what comes of it."""
        if timeout <= 0:
            return AgreementResult("off", "agreement_timeout is 0")
        if self._exchange is None:
            return AgreementResult("skipped", no_real_group() or "the graph was not published")
        self.busy(f"waits for other ranks before the first run of {self._kind} graph {self._name}")
        try:
            return self._exchange.agree(timeout)
        finally:
            self.busy(None)
