"""The main job under torchrun: trains, resumes, captures what FSDP2 calls for, and fails when it must."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from collective_identity import GRAD_REDUCE_SHARD, GRAD_REPLICATE_REDUCE, PARAM_UNSHARD
from tests.distributed.launch import REPOSITORY, ScriptOutcome, run_script

pytestmark = pytest.mark.timeout(600)
EXAMPLES = REPOSITORY / "examples"
JOB = EXAMPLES / "train_fsdp2.py"
SMALL = ("--layers", "1", "--batch", "2", "--window", "32")
KEYS = {
    "schema", "losses", "max_rel_diff_to_eager", "ranks", "mesh", "collectives", "counts", "tokens_per_s", "seconds",
    "agreement", "ok", "failures",
}  # fmt: skip


def run(ranks: int, *options: str, folder: Path, exit_code: int = 0, timeout: float = 240) -> ScriptOutcome:
    """The job in `folder`, ended with the exit code that is expected."""
    outcome = run_script(JOB, ranks, [*SMALL, *options], cwd=folder, check=False, timeout=timeout)
    assert outcome.exit_code == exit_code, "\n".join((outcome.launcher_log, *outcome.logs))
    return outcome


def result(outcome: ScriptOutcome) -> dict[str, Any]:
    """The only line on rank 0's stdout; the other ranks' log holds what is on stderr, which must be nothing."""
    lines = outcome.stdout.splitlines()
    assert len(lines) == 1, outcome.stdout
    line = json.loads(lines[0])
    assert set(line) == KEYS
    assert (line["schema"], line["ok"], line["failures"]) == (1, not line["failures"], line["failures"])
    return line


def quiet(outcome: ScriptOutcome) -> bool:
    """No rank but the first says anything: no warning, no traceback."""
    return not any(outcome.logs[1:])


def captured_right(line: dict[str, Any]) -> bool:
    """Every collective expected was captured, all explicit, and nothing else is FSDP's."""
    counts, collectives = line["counts"], line["collectives"]
    total = sum(n for phases in collectives["captured"].values() for n in phases.values())
    faults = [counts[kind] for kind in ("inferred", "malformed", "dropped", "not_captured")]
    return collectives["expected"] == collectives["captured"] and counts["explicit"] == total > 0 and not any(faults)


def test_eager_training_learns_and_prints_one_line(tmp_path: Path) -> None:
    outcome = run(2, "--eager", "--steps", "6", folder=tmp_path)
    line = result(outcome)
    assert quiet(outcome)
    assert (line["ranks"], line["mesh"], len(line["losses"])) == (2, "2", 6)
    assert line["losses"][-1] < line["losses"][0] - 0.3
    assert line["tokens_per_s"] > 0 and line["max_rel_diff_to_eager"] is None
    assert list(tmp_path.iterdir()) == [], "a run without capture leaves no run folder"


def test_a_resumed_run_goes_on_exactly_with_or_without_capture(tmp_path: Path) -> None:
    """Checkpoints stay FSDP2's: what one kind of run saves, the other resumes, to the last bit."""
    kinds = {"eager": ("--eager",), "captured": ("--inner", "aot_eager")}
    whole = result(run(2, "--eager", "--steps", "5", folder=tmp_path))
    for saved, resumed in (("eager", "captured"), ("captured", "eager")):
        first = result(run(2, *kinds[saved], "--steps", "3", "--save", saved, folder=tmp_path))
        rest = result(run(2, *kinds[resumed], "--steps", "5", "--resume", saved, folder=tmp_path))
        assert first["losses"] + rest["losses"] == whole["losses"]


def test_fp32_equals_eager_fsdp2_at_every_step(tmp_path: Path) -> None:
    line = result(run(2, "--check-against-eager", folder=tmp_path))
    assert len(line["losses"]) == 20
    assert line["max_rel_diff_to_eager"] <= 1e-5
    assert captured_right(line)
    assert line["agreement"] == "agreed"
    assert sorted(path.name for path in tmp_path.glob("runs/*/*")) == ["rank0.jsonl", "rank1.jsonl", "store.json"]
    # root and one block: two gathers forward, the block's re-gather (the root is kept), two reductions
    assert line["collectives"]["after_bucketing"] == {PARAM_UNSHARD: 3, GRAD_REDUCE_SHARD: 2}
    assert 0 < line["seconds"]["passes"] < line["seconds"]["compile"]


@pytest.mark.parametrize("bucketing", [(), ("--no-bucketing",)], ids=["bucketed", "apart"])
def test_run_eagerly_the_captured_graphs_equal_fsdp2_bit_for_bit(bucketing: tuple[str, ...], tmp_path: Path) -> None:
    """With clipping and micro-batches, a tied head, and the root resharded as well; passes on and off."""
    options = ("--accumulate", "2", "--clip", "0.5", "--tied", "--reshard", "--steps", "5", *bucketing)
    line = result(
        run(2, "--check-against-eager", "--inner", "aot_eager", "--tolerance", "0", *options, folder=tmp_path)
    )
    assert line["max_rel_diff_to_eager"] == 0
    assert captured_right(line)
    merged = line["collectives"]["after_bucketing"] != line["collectives"]["before_bucketing"]
    assert merged == (not bucketing)


def test_frozen_layers_are_neither_reduced_nor_gathered_again(tmp_path: Path) -> None:
    options = ("--layers", "2", "--freeze", "embed.*", "--freeze", "layers.0.*", "--reshard", "--steps", "3")
    line = result(run(2, "--check-against-eager", "--inner", "aot_eager", *options, folder=tmp_path))
    assert captured_right(line)
    # of block 0 nothing is trained, so backward never reaches it; of the embedding neither
    assert line["collectives"]["captured"][GRAD_REDUCE_SHARD]["backward"] == 9 + 2
    assert line["collectives"]["after_bucketing"] == {PARAM_UNSHARD: 3 + 2, GRAD_REDUCE_SHARD: 2}


def test_observing_changes_nothing_and_still_reports(tmp_path: Path) -> None:
    options = ("--check-against-eager", "--inner", "aot_eager", "--mode", "observe", "--steps", "3")
    line = result(run(2, *options, folder=tmp_path))
    assert line["max_rel_diff_to_eager"] == 0
    assert line["collectives"]["after_bucketing"] == line["collectives"]["before_bucketing"]
    assert captured_right(line)


def test_hybrid_sharding_on_four_ranks(tmp_path: Path) -> None:
    options = ("--check-against-eager", "--inner", "aot_eager", "--mesh", "2x2", "--steps", "5")
    line = result(run(4, *options, folder=tmp_path))
    assert line["max_rel_diff_to_eager"] <= 1e-5
    assert captured_right(line)
    after = line["collectives"]["after_bucketing"]
    assert after == {PARAM_UNSHARD: 3, GRAD_REDUCE_SHARD: 2, GRAD_REPLICATE_REDUCE: 2}
    assert line["mesh"] == "2x2"


@pytest.mark.parametrize("sequence", [(), ("--sequence-parallel", "--clip", "0.5")], ids=["plain", "sequence"])
def test_tensor_parallelism_under_fsdp2_is_not_touched(sequence: tuple[str, ...], tmp_path: Path) -> None:
    options = ("--check-against-eager", "--inner", "aot_eager", "--tp", "--steps", "5", *sequence)
    line = result(run(4, *options, folder=tmp_path))
    assert line["max_rel_diff_to_eager"] <= 1e-5
    assert captured_right(line)
    assert line["counts"]["other"] > 0, "tensor parallelism's own collectives are in the graphs"
    assert line["collectives"]["after_bucketing"] == {PARAM_UNSHARD: 3, GRAD_REDUCE_SHARD: 2}


@pytest.mark.long
def test_bf16_differs_no_more_than_twice_what_compiling_by_block_does(tmp_path: Path) -> None:
    """The job measures its own tolerance and fails above it."""
    options = ("--check-against-eager", "--precision", "bf16", "--steps", "5")
    line = result(run(2, *options, folder=tmp_path, timeout=500))
    assert captured_right(line)
    assert line["max_rel_diff_to_eager"] < 0.01


@pytest.mark.parametrize("fault", ["remove", "mislabel"])
def test_a_planted_fault_fails_the_run(fault: str, tmp_path: Path) -> None:
    line = result(run(2, "--inner", "aot_eager", "--steps", "2", "--plant", fault, folder=tmp_path, exit_code=1))
    assert not line["ok"]
    for rank in (0, 1):
        assert any(text.startswith(f"rank {rank}: ") and PARAM_UNSHARD in text for text in line["failures"])
    assert line["counts"]["inferred" if fault == "remove" else "other"] == 1


def test_a_loss_above_the_tolerance_fails_the_run(tmp_path: Path) -> None:
    options = ("--check-against-eager", "--inner", "aot_eager", "--tolerance", "-1", "--steps", "1")
    line = result(run(2, *options, folder=tmp_path, exit_code=1))
    assert ["losses differ" in text for text in line["failures"]] == [True]


def test_too_few_processes_are_refused_with_the_command_to_run(tmp_path: Path) -> None:
    outcome = run(2, "--mesh", "2x2", folder=tmp_path, exit_code=1)
    assert outcome.stdout == "" and quiet(outcome)
    assert outcome.logs[0].splitlines() == [
        "train_fsdp2.py: error: --mesh 2x2 needs 4 processes, this run has 2; "
        "run: torchrun --standalone --nproc-per-node 4 examples/train_fsdp2.py --mesh 2x2"
    ]


# ---- without processes ----


@pytest.fixture
def examples(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The example's files importable by the names they use among themselves."""
    monkeypatch.syspath_prepend(str(EXAMPLES))
    yield
    for name in [name for name in sys.modules if name.startswith("_") and (EXAMPLES / f"{name}.py").exists()]:
        del sys.modules[name]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--tp"], "--tp with mesh 2x2 needs 4 processes"),
        (["--tp", "--mesh", "2"], "mesh of data x tensor"),
        (["--mesh", "2x2x2"], "expected N or OUTERxINNER"),
        (["--sequence-parallel"], "--sequence-parallel needs --tp"),
        (["--eager", "--plant", "remove"], "--plant do not go with it"),
        (["--width", "61"], "must be a multiple of"),
        (["--steps", "0"], "at least 1"),
        (["--resume", "nowhere"], "no checkpoint there"),
        (["--precision", "fp8"], "invalid choice"),
    ],
    ids=lambda value: "-".join(value).strip("-") if isinstance(value, list) else None,
)
def test_options_that_make_no_sense_are_refused_by_name(
    arguments: list[str], said: str, examples: None, capsys: pytest.CaptureFixture[str]
) -> None:
    from _options import parse

    with pytest.raises(SystemExit) as left:
        parse(arguments, world=2)
    assert left.value.code == 2
    assert said in capsys.readouterr().err


def test_without_torchrun_the_command_is_named(examples: None, capsys: pytest.CaptureFixture[str]) -> None:
    from _options import parse

    with pytest.raises(SystemExit):
        parse([], world=None)
    assert "torchrun --standalone --nproc-per-node 2 examples/train_fsdp2.py" in capsys.readouterr().err


@pytest.mark.parametrize("tied", [False, True])
def test_the_probe_finds_what_backward_needs(tied: bool, examples: None) -> None:
    from _model import Shape, Transformer
    from _probe import parameters_saved_for_backward

    model = Transformer(Shape(vocabulary=17, width=12, hidden=7, heads=2, layers=2, window=5, tied=tied))
    tokens = torch.zeros(1, 5, dtype=torch.long)
    names = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    embedding = set() if tied else {"embed.weight"}
    assert parameters_saved_for_backward(model, tokens) == names - embedding, "looking up needs the tokens only"

    model.embed.requires_grad_(False)
    model.layers[0].requires_grad_(False)
    needed = parameters_saved_for_backward(model, tokens)
    assert not any(name.startswith("layers.0.") for name in needed), "no gradient flows back to a frozen start"
    assert "layers.1.attention_norm.weight" not in needed, "a norm's input has no gradient here"
    assert {"layers.1.attention.out.weight", "norm.weight"} <= needed

    model.requires_grad_(False)
    assert parameters_saved_for_backward(model, tokens) == frozenset()
    assert all(parameter.device.type == "cpu" for parameter in model.parameters())


def test_batches_follow_the_text_without_gap_or_overlap(examples: None) -> None:
    from _data import START, Text, read_text

    text = Text.load(8)
    read = []
    for number in range(2):
        for part in range(2):
            inputs, targets = text.batch(number, 3, part=part, parts=2)
            assert inputs.shape == targets.shape == (3, 8)
            assert inputs[:, 0].eq(START).all() and inputs[:, 1:].equal(targets[:, :-1])
            read.append(targets.flatten())
    assert bytes(torch.cat(read).tolist()) == read_text(2 * 2 * 3 * 8)
