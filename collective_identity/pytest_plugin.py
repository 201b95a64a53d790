"""The pytest fixture ``debugify``: does a pass keep identities? Loaded by pytest through its entry point."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest


@pytest.fixture
def debugify() -> Callable[..., Any]:
    """Call as ``debugify(passes, gm, stamps=..., allow=...)``: fails the test unless every pass keeps the contract.

    Arguments and result are those of `collective_identity.debugify.debugify`; ``allow`` names kinds of fault that
    are accepted.
    """
    from collective_identity.debugify import debugify as run

    def check(passes: Any, gm: Any, *, allow: Any = (), **given: Any) -> Any:
        report = run(passes, gm, **given)
        report.check(allow=allow)
        return report

    return check
