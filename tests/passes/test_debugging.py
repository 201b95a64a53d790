"""Our own pipeline keeps every identity that debugify stamps, and really merges."""

from __future__ import annotations

import pytest

from collective_identity.debugify import Kind
from inductor_passes.debugging import debugify
from inductor_passes.manager import Pipeline
from inductor_passes.passes import Bucket, Normalize
from tests.passes.upstream_graphs import GRAPHS


@pytest.mark.usefixtures("fake_world")
@pytest.mark.parametrize("graph", sorted(GRAPHS))
def test_our_pipeline(graph: str) -> None:
    report = debugify(Pipeline([Normalize(), Bucket()]), GRAPHS[graph]())
    report.check()
    merged = {one.stamp for one in report.passes if one.changed}
    assert "different" not in merged
    assert all(set(one.counts) <= {Kind.UNCHANGED, Kind.PRESERVED} for one in report.passes), str(report)
