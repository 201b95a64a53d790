"""What did each pass do, and is it allowed? The result of `debugify`, as values, text and JSON."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from .findings import Finding, Kind


class DebugifyFault(AssertionError):
    """A pass broke the contract; the text names the pass, each fault and who did it."""


@dataclass(frozen=True, slots=True)
class PassReport:
    """What one pass did to one set of identities.

    Attributes:
        name: the pass.
        stamp: which identities were stamped, a key of `STAMPS`.
        changed: whether the pass changed the graph's code.
        findings: everything it did, in graph order.
    """

    name: str
    stamp: str
    changed: bool
    findings: tuple[Finding, ...]

    @property
    def counts(self) -> Mapping[Kind, int]:
        """Findings by kind; a kind that did not occur is missing."""
        counts = Counter(finding.kind for finding in self.findings)
        return {kind: counts[kind] for kind in Kind if counts[kind]}

    @property
    def faults(self) -> tuple[Finding, ...]:
        """The findings that break the contract."""
        return tuple(finding for finding in self.findings if finding.fault)

    def to_dict(self) -> dict[str, Any]:
        """JSON values."""
        return {
            "pass": self.name,
            "stamp": self.stamp,
            "changed": self.changed,
            "counts": {kind.value: count for kind, count in self.counts.items()},
            "findings": [finding.to_dict() for finding in self.findings],
        }


@dataclass(frozen=True, slots=True)
class DebugifyReport:
    """What every pass did, for every set of identities that was stamped."""

    passes: tuple[PassReport, ...]

    @property
    def faults(self) -> tuple[tuple[PassReport, Finding], ...]:
        """What breaks the contract, with the pass that did it."""
        return tuple((one, finding) for one in self.passes for finding in one.faults)

    def check(self, *, allow: Iterable[Kind | str] = ()) -> None:
        """Do nothing when every pass keeps the contract.

        Args:
            allow: kinds of fault that are accepted.

        Raises:
            DebugifyFault: a pass does not.
        """
        allowed = frozenset(Kind(kind) for kind in allow)
        wrong = [(one, finding) for one, finding in self.faults if finding.kind not in allowed]
        if wrong:
            text = "\n".join(_line(one, finding) for one, finding in wrong)
            raise DebugifyFault(
                f"expected passes that keep identities as the contract says, found {len(wrong)} faults:\n{text}\n"
                "docs/how-to-update-collective-identity.md says what a pass must do"
            )

    def to_dict(self) -> dict[str, Any]:
        """JSON values."""
        return {"ok": not self.faults, "passes": [one.to_dict() for one in self.passes]}

    def __str__(self) -> str:
        lines = []
        for one in self.passes:
            counts = ", ".join(f"{count} {kind}" for kind, count in one.counts.items()) or "no collective"
            changed = "" if one.changed else " (graph unchanged)"
            lines.append(f"{'FAULT' if one.faults else 'ok   '} {one.name} [{one.stamp}]{changed}: {counts}")
            lines += [f"      {_line(one, finding)}" for finding in one.faults]
        return "\n".join(lines)


def _line(one: PassReport, finding: Finding) -> str:
    nodes = ", ".join(finding.nodes[:4]) + (", ..." if len(finding.nodes) > 4 else "")
    place = " at " + nodes if nodes else ""
    was = f" (was {', '.join(finding.was[:4])})" if finding.was else ""
    by = "".join(f"\n        {frame}" for frame in finding.stack[:4])
    return f"{one.name} [{one.stamp}]: {finding.kind}{place}{was}: {finding.detail}{by}"
