"""What torch's passes do to identities, held against a committed baseline per torch version.

Write it anew with ``python -m tests.passes.test_upstream_losses``, once for each torch version.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import pytest

from collective_identity import compat
from collective_identity.debugify import debugify
from inductor_passes.upstream_passes import upstream_passes
from tests.passes.upstream_graphs import GRAPHS, as_on_gpus

FOLDER = Path(__file__).parent / "upstream_losses"
STAMPS = ("same", "different")
Losses = Mapping[str, Mapping[str, int]]


def baseline() -> Path:
    return FOLDER / "torch-{}.{}.json".format(*compat.torch_version())


def measured(graph: str) -> dict[str, dict[str, int]]:
    """``pass [identities]`` → faults by kind, for one graph."""
    found: dict[str, dict[str, int]] = {}
    with as_on_gpus():
        for name, one in upstream_passes().items():
            for report in debugify({name: one}, GRAPHS[graph](), stamps=STAMPS).passes:
                counts: dict[str, int] = {}
                for fault in report.faults:
                    counts[fault.kind.value] = counts.get(fault.kind.value, 0) + 1
                if counts:
                    found[f"{name} [{report.stamp}]"] = counts
    return found


def differences(graph: str, before: Losses, now: Losses) -> list[str]:
    """Each pass that does something else than the baseline says, in words."""
    return [
        f"{graph}: {key}: baseline {before.get(key) or 'no fault'}, now {now.get(key) or 'no fault'}"
        for key in sorted({*before, *now})
        if before.get(key) != now.get(key)
    ]


@pytest.mark.usefixtures("fake_world")
@pytest.mark.parametrize("graph", sorted(GRAPHS))
def test_no_new_loss(graph: str) -> None:
    found = differences(graph, json.loads(baseline().read_text())[graph], measured(graph))
    assert not found, (
        "\n".join(found) + f"\nIf torch changed, run `python -m tests.passes.test_upstream_losses` and commit "
        f"{baseline().name}; reconcile.py must still put every one right (tests/passes/test_reconcile.py)"
    )


def test_a_new_loss_is_told() -> None:
    (told,) = differences("g", {"p [same]": {"drop": 1}}, {"p [same]": {"drop": 1, "spread": 2}})
    assert "'spread': 2" in told and "baseline {'drop': 1}" in told


if __name__ == "__main__":
    import torch.distributed as dist
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=4)
    FOLDER.mkdir(exist_ok=True)
    baseline().write_text(json.dumps({graph: measured(graph) for graph in sorted(GRAPHS)}, indent=1) + "\n")
    print(baseline())
