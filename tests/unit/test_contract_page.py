"""The contract's page says what the code does: its tables are the code's, its names exist."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from collective_identity import CODES, DEFAULT_ROLES, codes, identity, merge, store, tables
from collective_identity.identity import Identity
from tests.graphs import payload

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "contract.md"


def test_the_tables_are_the_codes() -> None:
    page = PAGE.read_text()
    assert set(re.findall(r"<!-- table: (\w+) -->", page)) == set(tables.TABLES)
    assert tables.rewritten(page) == page, "run: python -m collective_identity.tables docs/contract.md"


def test_the_command_writes_them(tmp_path: Path) -> None:
    copy = tmp_path / "contract.md"
    copy.write_text(re.sub(r"^\| CI.*\n", "", PAGE.read_text(), flags=re.MULTILINE))
    assert copy.read_text() != PAGE.read_text()
    command = [sys.executable, "-m", "collective_identity.tables", str(copy)]
    subprocess.run(command, check=True, timeout=120, cwd=ROOT)
    assert copy.read_text() == PAGE.read_text()


def test_an_unknown_table_is_an_error() -> None:
    with pytest.raises(KeyError, match="colours"):
        tables.rewritten("<!-- table: colours -->\n<!-- end -->")


def test_every_code_role_and_field_is_on_the_page() -> None:
    page = PAGE.read_text()
    for code in CODES.values():
        assert f"| {code.id} | `{code.slug}` | {code.severity} |" in page
    for role in DEFAULT_ROLES.rows:
        assert f"| `{role}` |" in page
    for field in ("version", "role", "source", "producer", "group", "param_group", "params"):
        assert f"| `{field}` |" in page and field in Identity.__dataclass_fields__
    assert f'"{store.KEY}"' in page and f"`{store.BACKWARD_KEY}`" in page
    assert identity.VERSION == 1 and payload("a.b")["version"] == 1


def test_every_rule_names_a_function_that_exists() -> None:
    import collective_identity
    from collective_identity import losses

    homes = {"merge": merge, "store": store, "losses": losses, "": collective_identity}
    for rule in merge.RULES:
        for name in re.findall(r"`([\w.]+)`", rule.carried_out_by):
            module, _, attribute = name.rpartition(".")
            assert callable(getattr(homes[module], attribute)), name


def test_every_deliberate_loss_has_a_rule() -> None:
    losses = {code for code in CODES.values() if code.id.startswith("CI03")}
    assert {rule.lost for rule in merge.RULES} - {None} == losses
    assert len({code.slug for code in CODES.values()}) == len(CODES) == len({c.text for c in CODES.values()})
    assert merge.BUCKET.lost is codes.DROPPED_MIXED


def test_the_commands_on_the_page_exist() -> None:
    from benchmarks import __main__ as benchmarks

    page = PAGE.read_text()
    assert {name for name in benchmarks.NAMES if f"python -m benchmarks {name} --json" in page} == {
        "classify",
        "identity",
    }
    for path in re.findall(r"`(tests/[\w/]+\.py)`", page):
        assert (ROOT / path).exists(), path
