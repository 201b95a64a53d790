"""Fixtures of the unit tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from collective_identity import session


@pytest.fixture(autouse=True)
def _no_session_left() -> Iterator[None]:
    """``fsdp_hooks.install`` opens the process's implicit session; the next test starts without one."""
    yield
    if (left := session.current()) is not None:
        left.close()
