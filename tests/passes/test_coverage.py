"""The coverage record beside Inductor's cache: what was captured, for a compile that a cache answers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import fx

import collective_identity as ci
from collective_identity import PARAM_UNSHARD, session
from inductor_passes import coverage
from tests.graphs import Builder
from tests.unit.rows import gathers, reduces, row


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache folder that does not exist yet."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache" / "collective_identity"


TABLES = {
    "forward": (gathers(), gathers(1)),
    "backward": ((*reduces(), row(9, params=None, role=None, absence="never_had")), ()),
}


def test_round_trip(folder: Path) -> None:
    coverage.save("k", TABLES)
    assert coverage.load("k") == TABLES
    assert [path.name for path in folder.iterdir()] == ["k.json"], "no temporary file is left"
    coverage.save("k", {"inference": ((), ())})
    assert coverage.load("k") == {**TABLES, "inference": ((), ())}, "another rank has compiled what this one took"
    coverage.save("k", {"forward": ((), ())})
    assert coverage.load("k") == {**TABLES, "inference": ((), ()), "forward": ((), ())}


@pytest.mark.parametrize("role, used", [(PARAM_UNSHARD, True), ("user.weights", False)])
def test_a_record_counts_only_for_the_graph_it_was_made_of(role: str, used: bool) -> None:
    """A role that only AOTAutograd's trace brings in is in FxGraphCache's key and not in the record's."""
    from inductor_passes.backend import _Graph
    from inductor_passes.contract import PassContext
    from inductor_passes.lite_mode import LiteState
    from inductor_passes.options import BackendOptions

    def gather(role: str) -> fx.GraphModule:
        b = Builder()
        b.output(b.all_gather(b.placeholder("w"), role=role).wait)
        return b.module()

    after = gathers(1)
    with ci.enable(agreement_timeout=0) as handle:
        log = session.ensure().begin_graph("forward", "0/0", "test")
        context = PassContext("forward", LiteState.OFF, observe=False, options=BackendOptions(), log=log)
        graph = _Graph(gather(role), context, log)
        graph.finish(0.0, (ci.collective_table(gather(PARAM_UNSHARD)), after))
        (found,) = handle.report().to_dict()["graphs"]
    assert (found["cached"], graph.rows_known, graph.after == after) == (True, used, used)


def test_no_record() -> None:
    assert coverage.load("k") is None


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b"\xff\xfe",
        b"[]",
        b"3",
        b"null",
        b'{"forward": 3}',
        b'{"forward": [[]]}',
        b'{"forward": [[1], []]}',
        b'{"forward": [[{}], []]}',
        b'{"forward": [[{"params": null}], []]}',
        b'{"forward": [[{"params": null, "unknown": 1}], []]}',
    ],
    ids=lambda content: content.decode(errors="replace")[:30] or "empty",
)
def test_a_damaged_record_counts_as_none(folder: Path, content: bytes) -> None:
    folder.mkdir(parents=True)
    (folder / "k.json").write_bytes(content)
    assert coverage.load("k") is None
    coverage.save("k", TABLES)
    assert coverage.load("k") == TABLES


def test_a_truncated_record_counts_as_none(folder: Path) -> None:
    coverage.save("k", TABLES)
    whole = (folder / "k.json").read_bytes()
    (folder / "k.json").write_bytes(whole[: len(whole) // 2])
    assert coverage.load("k") is None


def test_a_folder_that_cannot_be_written_is_no_error(folder: Path) -> None:
    folder.parent.mkdir(parents=True)
    folder.write_text("a file is in the way")
    coverage.save("k", TABLES)
    assert coverage.load("k") is None


# ---- the key ----


def graph(op: Callable[..., Any] = torch.relu, *, nested: Callable[..., Any] = torch.neg) -> fx.GraphModule:
    inner = Builder()
    inner.graph.output(inner.graph.call_function(nested, (inner.placeholder("y"),)))
    b = Builder()
    b.root.add_module("inner", inner.module())
    x = b.placeholder("x")
    b.output(b.graph.call_function(op, (b.graph.call_module("inner", (x,)),)))
    return b.module()


def key(gm: fx.GraphModule | None = None, inputs: tuple[Any, ...] = (torch.ones(4, 8),), tag: str = "options") -> str:
    return coverage.coverage_key(gm or graph(), inputs, tag)


def test_the_same_program_has_the_same_key() -> None:
    assert key() == key(inputs=(torch.zeros(4, 8),)), "values do not matter"
    assert len(key()) == 64


def test_the_key_changes_with_everything_that_makes_the_artifact(monkeypatch: pytest.MonkeyPatch) -> None:
    keys = [
        key(),
        key(graph(torch.sigmoid)),
        key(graph(nested=torch.abs)),
        key(tag="other options"),
        key(inputs=(torch.ones(8, 4),)),
        key(inputs=(torch.ones(4, 8, dtype=torch.float64),)),
        key(inputs=(torch.ones(4, 8, requires_grad=True),)),
        key(inputs=(torch.ones(4, 8, device="meta"),)),
        key(inputs=(torch.nn.Parameter(torch.ones(4, 8), requires_grad=False),)),
        key(inputs=(3,)),
        key(inputs=()),
    ]
    monkeypatch.setattr(torch, "__version__", "2.11.1")
    keys.append(key())
    assert len(set(keys)) == len(keys)
