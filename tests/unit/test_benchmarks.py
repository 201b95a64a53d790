"""The benchmarks of this package run, print JSON lines, and keep what they promise of small graphs."""

from __future__ import annotations

import json
import sys
from typing import Any

import pytest

from benchmarks import classify, identity, synthetic
from collective_identity import classify_report, start_nodes
from collective_identity.compat import torch_version


def lines(module: Any, capsys: pytest.CaptureFixture[str], *arguments: str) -> list[dict[str, Any]]:
    patch = pytest.MonkeyPatch()
    patch.setattr(sys, "argv", ["benchmarks", "--json", *arguments])
    try:
        assert module.main() == 0
    finally:
        patch.undo()
    return [json.loads(line) for line in capsys.readouterr().out.splitlines()]


def test_classify(capsys: pytest.CaptureFixture[str]) -> None:
    first, *rows, last = lines(classify, capsys, "--nodes", "20000", "--deep", "1500")
    assert first["benchmark"] == "classify"
    explicit, *growing, joins, compatible = rows
    assert explicit["us_per_node"] > 0
    assert [row["what"] for row in growing] == ["no identity"] * 3
    assert all(row["fsdp"] == row["collectives"] for row in growing) and joins["fsdp"] == 0
    assert all(0 < row["networkx_share"] < 1 for row in (*growing, joins))
    assert compatible["rules"] == "compatible" and last["rules"] == "extended"
    if torch_version() >= (2, 12):  # before, torch looked no further than one cast
        assert last["ratio"] > 1


def test_classify_fails_where_it_grows_too_fast() -> None:
    def rows(*seconds: float) -> list[dict[str, Any]]:
        return [{"nodes": 10_000 * 10**i, "classify_s": s} for i, s in enumerate(seconds)]

    assert classify.grows_too_fast(rows(0.1, 1.2, 14.4)) == []
    assert len(classify.grows_too_fast(rows(0.1, 1.3, 13))) == 1
    assert len(classify.grows_too_fast(rows(0.1, 1.3, 17))) == 2
    assert classify.grows_too_fast([{"nodes": 200, "classify_s": 1}, {"nodes": 2000, "classify_s": 99}]) == []


def test_classify_fails_where_a_full_run_is_slower_than_promised() -> None:
    def fails(us_per_node: float, ratio: float, **smaller: int) -> int:
        explicit = {"nodes": 150_000, "us_per_node": us_per_node}
        deep = {"collectives": 5000, "ratio": ratio}
        return len(classify.too_slow({**explicit, **smaller}, {**deep, **smaller}))

    assert (fails(4.9, 101), fails(5.1, 101), fails(5.1, 99)) == (0, 1, 1 + (torch_version() >= (2, 12)))
    assert fails(99, 1, nodes=20_000, collectives=1500) == 0, "small graphs are too quick to tell"


def test_identity(capsys: pytest.CaptureFixture[str]) -> None:
    first, typical, large, last = lines(identity, capsys, "--nodes", "3000", "--layers", "1")
    assert first["benchmark"] == "identity"
    for row in (typical, large):
        assert row["collectives"] > 0 and 0 < row["bytes_per_collective"] < 2000
        assert row["us_per_collective"] > 0
    assert last["ratio"] > 1


def test_the_graphs_are_what_they_say() -> None:
    gm = synthetic.training(2000, explicit=True)
    assert abs(len(gm.graph.nodes) - 2000) <= synthetic.PER_UNIT
    gm.graph.lint()
    report = classify_report(gm)
    assert not report.structure_built and None not in report.identities.values()
    plain = classify_report(synthetic.training(2000, explicit=False))
    assert [i and i.role for i in plain.identities.values()] == [i and i.role for i in report.identities.values()]
    assert len(start_nodes(synthetic.deep_ancestry(7))) == 7
