"""What every test process has in common: few threads, one private compile cache, deterministic examples.

Variables are set before torch is imported and reach the processes that tests start. The session's own
inductor cache folder keeps what was compiled and what was learnt of the processor (in a new folder the first
compile takes 8 s longer), but no whole graph is taken from it: on a hit no pass runs, and under pytest-xdist
it is chance which test comes first. A test about caching turns it on, in a folder of its own
(`fx_graph_cache=True`, or in a child process `TORCHINDUCTOR_FX_GRAPH_CACHE=1`).

Fixtures are in tests/conftest.py.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path

import pytest

DEFAULTS = {
    "OMP_NUM_THREADS": "1",
    "TORCHINDUCTOR_COMPILE_THREADS": "1",
    "TORCHINDUCTOR_FX_GRAPH_CACHE_DEFAULT": "0",
}

for name, value in DEFAULTS.items():
    os.environ.setdefault(name, value)


def pytest_configure(config: pytest.Config) -> None:
    from hypothesis import settings

    settings.register_profile("ci", derandomize=True, deadline=None, database=None, print_blob=True)
    settings.register_profile("explore", deadline=None, max_examples=2000)
    settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci"))
    if "PYTEST_XDIST_WORKER" not in os.environ:  # workers inherit the controller's folder
        folder = tempfile.mkdtemp(prefix="collective-identity-tests-")
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = folder
        config.add_cleanup(lambda: shutil.rmtree(folder, ignore_errors=True))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    unstable = [item.nodeid for item in items if " at 0x" in item.nodeid]
    if unstable:  # pytest-xdist's workers would each collect other names
        raise pytest.UsageError(f"test ids must not hold an object's address: {', '.join(unstable[:3])}")
    distributed = Path(__file__).parent / "tests" / "distributed"
    for item in items:
        if distributed in item.path.parents:
            item.add_marker(pytest.mark.distributed)
