"""Which tables does the documentation show? Each is written from the code that it describes.

``python -m collective_identity.tables docs/contract.md`` writes them anew into the page, between its marks.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Final

from .codes import CODES
from .merge import RULES
from .roles import DEFAULT_ROLES

_MARKED: Final = re.compile(r"(<!-- table: (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)


def codes_table() -> str:
    """Every code: id, word, severity, what happened, what to do."""
    rows = ((code.id, f"`{code.slug}`", code.severity, code.text, code.remedy) for code in CODES.values())
    return _table(("code", "word", "severity", "what happened", "what to do"), rows)


def roles_table() -> str:
    """Every role of the closed namespace and the transports that may carry it."""
    rows = ((f"`{role}`", DEFAULT_ROLES.expected(role).replace("_", "-")) for role in DEFAULT_ROLES.rows)
    return _table(("role", "transport"), rows)


def rules_table() -> str:
    """What every transformation does to an identity."""
    rows = ((r.event, r.kept, f"{r.lost.id} `{r.lost.slug}`" if r.lost else "-", r.carried_out_by) for r in RULES)
    return _table(("event", "what the new node carries", "otherwise lost as", "carried out by"), rows)


TABLES: Final[Mapping[str, Callable[[], str]]] = MappingProxyType(
    {"codes": codes_table, "roles": roles_table, "rules": rules_table}
)


def rewritten(page: str) -> str:
    """The page with every marked table written anew.

    Raises:
        KeyError: a mark names no table of `TABLES`.
    """
    return _MARKED.sub(lambda found: f"{found[1]}{TABLES[found[2]]()}{found[3]}", page)


def _table(head: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> str:
    lines = [head, ("---",) * len(head), *rows]
    return "".join(f"| {' | '.join(cell.replace('|', '/') for cell in line)} |\n" for line in lines)


if __name__ == "__main__":
    for name in sys.argv[1:]:
        path = Path(name)
        path.write_text(rewritten(path.read_text()))
