"""What does pytest find by itself? Fixtures ``debugify`` and ``run_on_ranks``, and the marker ``on_ranks``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

_MARKER = (
    "on_ranks(ranks, timeout=60, backend='gloo', roles=None, nothing_lost=False): run the test's body on that many "
    "processes with a process group; `roles` and `nothing_lost` ask the run's report afterwards (docs/diagnostics.md)"
)


def pytest_configure(config: pytest.Config) -> None:
    """Make the marker known."""
    config.addinivalue_line("markers", _MARKER)


@pytest.fixture
def debugify() -> Callable[..., Any]:
    """Call as ``debugify(passes, gm, stamps=..., allow=...)``: fails the test unless every pass keeps the contract.

    Arguments and result are those of `collective_identity.debugify.debugify`; ``allow`` names kinds of fault that
    are accepted.
    """
    from collective_identity.debugify import debugify as run

    def check(passes: Any, gm: Any, *, allow: Any = (), **given: Any) -> Any:
        __tracebackhide__ = True
        report = run(passes, gm, **given)
        report.check(allow=allow)
        return report

    return check


@pytest.fixture
def run_on_ranks(request: pytest.FixtureRequest) -> Callable[..., Any]:
    """Call as ``run_on_ranks(function, 2, *args, timeout=60)``; the result has ``values``, ``assert_roles`` and
    ``assert_nothing_lost``.

    Arguments and result are those of `collective_identity.testing.run_on_ranks`; each rank's log is a section of
    the test's report.
    """

    def call(function: Callable[..., Any], ranks: int, *args: Any, **given: Any) -> Any:
        __tracebackhide__ = True
        return _run(request.node, function, ranks, args, given)

    return call


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Run a test that is marked ``on_ranks`` on its ranks instead of here."""
    __tracebackhide__ = True
    marker = pyfuncitem.get_closest_marker("on_ranks")
    if marker is None:
        return None
    given = dict(marker.kwargs)
    roles, nothing_lost = given.pop("roles", None), given.pop("nothing_lost", False)
    if len(marker.args) != 1 or not isinstance(marker.args[0], int):
        raise pytest.UsageError(f"{pyfuncitem.nodeid}: expected on_ranks(NUMBER, ...), found {marker.args!r}")
    code = pyfuncitem.function.__code__
    names = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
    args = tuple(pyfuncitem.funcargs[name] for name in names if name in pyfuncitem.funcargs)
    run = _run(pyfuncitem, pyfuncitem.function, marker.args[0], args, given)
    if nothing_lost:
        run.assert_nothing_lost()
    if roles is not None:
        run.assert_roles(roles)
    return True


def _run(item: pytest.Item, function: Callable[..., Any], ranks: int, args: tuple[Any, ...], given: Any) -> Any:
    __tracebackhide__ = True
    from collective_identity.testing import run_on_ranks as run

    found = run(function, ranks, *args, **given)
    for outcome in found.outcomes:
        if outcome.log:
            item.add_report_section("call", f"rank {outcome.rank}", outcome.log)
    return found
