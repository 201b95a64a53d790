"""What the train benchmark calls a failure, what it refuses, and what its mixture of experts computes."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from benchmarks import train, train_checks
from benchmarks.models import SHAPES, Dense, Mixture, Routed, Shape
from benchmarks.train_measure import Figures
from benchmarks.train_variants import VARIANTS
from collective_identity import PARAM_UNSHARD


def found(variant: str = "bucketed", **values: Any) -> Figures:
    return Figures(variant, **{"losses": (2.0, 1.0), "explicit_share": 1.0, **values})


EAGER = Figures("eager", losses=(2.0, 1.0))
WRONG = {
    "losses": (found(losses=(2.0, 1.1)), "losses differ from eager's by 1.00e-01 > 0.002"),
    "not a number": (found(losses=(float("nan"), 1.0)), "losses differ from eager's by inf > 0.002"),
    "error": (found(losses=(), error="RuntimeError: no"), "RuntimeError: no"),
    "report": (found(report_ok=False, report_failures=("a: 1 expected, 0 captured",)), "a: 1 expected, 0 captured"),
    "not explicit": (found(explicit_share=0.5), "50.0% of FSDP's collectives are explicit, expected all"),
    "merged": (found(merged_with_others=3), "3 collectives that are not FSDP's were merged with FSDP's"),
    "fused": (found(fused_roles={"fsdp.param_unshard": 1, "tp.all_gather": 2}), "fused for fsdp.param_unshard,"),
    "fused, unnamed": (found(fused_roles={"None": 1}), "fused for None, expected tp.* only"),
}


def test_nothing_is_wrong() -> None:
    right = found(report_ok=True, merged_with_others=0, fused_roles={"tp.all_gather": 2}, losses=(2.001, 1.0))
    bound = Figures("bound", losses=(9.0, 9.0))
    assert train_checks.faults([[EAGER, right, bound]] * 2, 2e-3) == ([], [])


@pytest.mark.parametrize("kind", list(WRONG))
def test_every_fault_is_told_of_every_rank(kind: str) -> None:
    wrong, text = WRONG[kind]
    (ours,), upstreams = train_checks.faults([[EAGER, found()], [EAGER, wrong]], 2e-3)
    assert ours.startswith("bucketed, rank 1: ") and text in ours and upstreams == []


def test_torchs_own_passes_are_told_apart() -> None:
    ours, (told,) = train_checks.faults([[EAGER, found("upstream_both", losses=(float("nan"), 1.0)), found()]], 2e-3)
    assert ours == [] and told.startswith("upstream_both, rank 0: losses differ")


TIMES = {"step_ms": 10.0, "step_ms_min": 9.0, "step_ms_max": 11.0, "tokens_per_s_per_rank": 1000, "first_step_s": 1.0}


def test_a_line_says_what_each_number_is() -> None:
    given = {"cache_hits": {"first": (0, 0), "warm": (1, 2)}, "warm_step_s": 0.5, "report_ok": True, "gathers": 5}
    line = train._line(found(**TIMES, **given, reductions=3, peak_gib=2.0, reserved_gib=3.0))
    for text in (
        "peak 2.00 GiB, 3.00 reserved", "cache hits 0 AOTAutograd and 0 FxGraph (first build), 1 AOT", "warm 0.5 s",
        "gathers 5", "shard reductions 3", "explicit 1.0",
    ):  # fmt: skip
        assert text in line
    assert "None" not in line and "replica" not in line


def test_a_line_leaves_out_what_is_not_there() -> None:
    line = train._line(Figures("eager", losses=(2.0, 1.0), **TIMES))
    assert "None" not in line and "GiB" not in line and line.endswith("loss 2.00000 -> 1.00000")


def rows(**roles: str | None) -> list[SimpleNamespace]:
    return [SimpleNamespace(node=name, role=role, members=None) for name, role in roles.items()]


def test_what_is_merged_with_fsdps_is_counted() -> None:
    before = rows(a=PARAM_UNSHARD, b=PARAM_UNSHARD, c="tp.all_gather", d=None)

    def merged(role: str | None, *members: str) -> int:
        return train_checks._merged_with_others(before, [SimpleNamespace(node="m", role=role, members=members)])

    assert merged(PARAM_UNSHARD, "a", "b") == 0
    assert merged(PARAM_UNSHARD, "a", "c") == 1 and merged(None, "a", "c", "d") == 2
    assert merged("tp.all_gather", "c", "d") == 0 and merged(PARAM_UNSHARD, "c", "d") == 2


def test_what_was_fused_is_read_from_the_plans() -> None:
    summary = {
        "fusions": [{"role": "tp.all_gather"}, {"role": None}],
        "refusals": [{"node": "a", "slug": "fsdp"}, {"node": "c", "slug": "not_enabled"}],
    }
    graph = SimpleNamespace(
        before=rows(a=PARAM_UNSHARD, c="tp.all_gather"), passes=[SimpleNamespace(name="fusion", summary=summary)]
    )
    assert train_checks._fusions([graph, SimpleNamespace(before=(), passes=[])]) == {
        "fused": 2, "fused_roles": {"tp.all_gather": 1, "None": 1}, "not_fused": {"not_enabled": 1},
    }  # fmt: skip
    assert train_checks._fusions([SimpleNamespace(before=(), passes=[])]) == {}, "from a compile cache: not known"


REFUSED = {
    "experts and tensor parallel": ("--model moe --layout fsdp_tp", "expects a dense model"),
    "a window that does not divide": ("--layout fsdp_tp --window 63", "--window to be a multiple of --tp"),
    "tokens without a group": ("--model moe --window 9", "a multiple of 16"),
    "the bound in another layout": ("--layout hsdp --variants eager bound", "variant bound expects --layout fsdp"),
    "fusion without tensor parallelism": ("--variants fused", "variant fused expects --layout fsdp_tp"),
    "torch's passes without Inductor": ("--inner aot_eager --variants upstream_both", "--inner inductor"),
}


def arguments(text: str, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(sys, "argv", ["train", *text.split()])
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "as under torchrun")
    return train.arguments()


@pytest.mark.parametrize("what", list(REFUSED))
def test_refused_by_name(what: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    text, said = REFUSED[what]
    with pytest.raises(SystemExit):
        arguments(text, monkeypatch)
    assert said in " ".join(capsys.readouterr().err.split())


def test_all_variants_of_a_layout_run_by_default(monkeypatch: pytest.MonkeyPatch) -> None:
    fsdp = arguments("", monkeypatch).variants
    assert set(VARIANTS) - set(fsdp) == {"fused"} and fsdp[0] == "eager"
    assert set(fsdp) - set(arguments("--layout fsdp_tp", monkeypatch).variants) == {"bound"}
    eager = arguments("--inner aot_eager", monkeypatch).variants
    assert {name for name in fsdp if name not in eager} == {n for n, one in VARIANTS.items() if one.upstream}


def test_the_mixture_is_what_it_says() -> None:
    """Token by token in a loop: first choices in order of the tokens, then second ones, while there are places."""
    torch.manual_seed(0)
    mixture = Mixture(experts=4, chosen=2, hidden=8, group=8, factor=0.75)
    routed = Routed(Shape(vocabulary=1, width=8, heads=1, layers=1, mixture=mixture)).double()
    x = torch.randn(2, 8, 8, dtype=torch.float64)
    expected = torch.zeros_like(x)
    likes = F.linear(x.float(), routed.router.weight.float()).softmax(-1)
    weight, choice = likes.topk(2, -1)
    passed_by = 0
    for group in range(2):
        taken = [0] * 4
        for rank in range(2):
            for token in range(8):
                expert = int(choice[group, token, rank])
                taken[expert] += 1
                if taken[expert] > mixture.places:
                    passed_by += 1
                    continue
                given, of = x[group, token], routed.experts
                out = (F.silu(given @ of.gate[expert]) * (given @ of.up[expert])) @ of.down[expert]
                expected[group, token] += out * (weight[group, token, rank] / weight[group, token].sum())
    assert mixture.places == 3 and 0 < passed_by < 16
    torch.testing.assert_close(routed(x), expected)


@pytest.mark.parametrize("name", ["1b", "moe_1b"])
def test_the_sizes_are_what_the_names_say(name: str) -> None:
    with torch.device("meta"):
        count = sum(parameter.numel() for parameter in Dense(SHAPES[name]).parameters())
    assert 0.8e9 < count < 1.2e9
