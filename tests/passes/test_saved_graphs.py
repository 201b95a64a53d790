"""A graph saved by the backend is the graph that was captured; no file that is not ours is unpickled."""

from __future__ import annotations

import dataclasses
import json
import pickle
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import fx, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.fx.experimental.proxy_tensor import make_fx
from typer.testing import CliRunner, Result

import collective_identity as ci
import fsdp_hooks
from collective_identity import GRAD_REDUCE_SHARD, PARAM_UNSHARD, cli, identity_of, saved_graph
from collective_identity.debugify.stamps import stamp_all
from collective_identity.saved_graph import MAGIC, SavedGraphError
from inductor_passes.options import OptionError
from tests.graphs import Builder, aten
from tests.passes.upstream_graphs import GRAPHS

pytestmark = pytest.mark.usefixtures("fake_world")
RUNNER = CliRunner()


def call(*arguments: object) -> Result:
    return RUNNER.invoke(cli.app, [str(a) for a in arguments])


def save(folder: Path, gm: fx.GraphModule, **fields: object) -> Path:
    given = {"rank": 0, "phase": "forward", "name": "0/0", "number": 1} | fields
    return saved_graph.write(folder / saved_graph.FOLDER, gm, **given)  # type: ignore[arg-type]


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return save(tmp_path, GRAPHS["gathers"]())


# ---- the file ----


@pytest.mark.parametrize("graph", sorted(GRAPHS))
def test_round_trip(graph: str, tmp_path: Path) -> None:
    gm = GRAPHS[graph]()
    stamp_all(gm, "inferred")
    header, found = saved_graph.read(save(tmp_path, gm, rank=3, phase="backward", name="1/2"))
    assert (header.rank, header.phase, header.name) == (3, "backward", "1/2")
    assert str(found.graph) == str(gm.graph) and ci.collective_table(found) == ci.collective_table(gm)
    assert list(map(identity_of, ci.start_nodes(found))) == list(map(identity_of, ci.start_nodes(gm)))
    found.graph.lint()


def test_parameters_sub_graphs_sizes_and_odd_metadata(tmp_path: Path) -> None:
    """No value of a tensor is written, a symbolic size stays one, and what cannot be pickled is left out."""
    inner = Builder()
    inner.output(inner.all_gather(inner.placeholder("p"), role=PARAM_UNSHARD).wait)
    b = Builder(nn.Module())
    b.root.body = inner.module()
    body = b.graph.get_attr("body")
    secret = b.parameter("secret")
    with torch.no_grad():
        b.root.secret.fill_(1.2345678)
    secret.meta["custom"] = {"theirs": lambda: None, "kept": [1, "a", None]}
    b.output(b.call(aten.relu.default, secret), body)
    path = save(tmp_path, b.module())
    _, found = saved_graph.read(path)
    assert torch.tensor(1.2345678).numpy().tobytes() * 2 not in path.read_bytes()
    assert [identity_of(node).role for node in ci.start_nodes(found.body)] == [PARAM_UNSHARD]  # type: ignore[union-attr]
    (node,) = (node for node in found.graph.nodes if node.target == "secret")
    assert node.meta["custom"] == {"kept": [1, "a", None]}

    symbolic = make_fx(lambda x: torch.relu(x.t().reshape(-1)), tracing_mode="symbolic")(torch.ones(3, 5))
    _, found = saved_graph.read(save(tmp_path, symbolic, number=2))
    sizes = [tuple(node.meta["val"].shape) for node in found.graph.nodes if node.op == "placeholder"]
    assert [type(size) for size in sizes[0]] == [torch.SymInt, torch.SymInt]


@pytest.mark.parametrize("keep", [0, 5, len(MAGIC), len(MAGIC) + 9, -1, -4000])
def test_a_cut_file_is_refused(file: Path, keep: int) -> None:
    file.write_bytes(file.read_bytes()[:keep])
    found = call("debugify", file)
    assert found.exit_code == 2 and found.output.startswith(f"error: {file}: ") and found.output.count("\n") == 1


def changed(file: Path, **fields: object) -> None:
    magic, header, data = file.read_bytes().split(b"\n", 2)
    file.write_bytes(magic + b"\n" + json.dumps({**json.loads(header), **fields}).encode() + b"\n" + data)


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"torch": "2.10.0"}, "written by torch 2.10.0, found torch"),
        ({"format": 2}, "expected format 1, found 2"),
        ({"rank": "0"}, "rank missing or of another type"),
        ({"sha256": "0"}, "damaged or cut off"),
        ({"nbytes": 1}, "damaged or cut off"),
    ],
    ids=["torch", "format", "rank", "checksum", "length"],
)
def test_another_version_or_a_damaged_header_is_refused(file: Path, fields: dict[str, object], said: str) -> None:
    changed(file, **fields)
    found = call("debugify", file)
    assert found.exit_code == 2 and said in found.output and found.output.count("\n") == 1


def test_another_build_of_the_same_torch_is_read(file: Path) -> None:
    changed(file, torch=str(torch.__version__).split("+")[0] + "+elsewhere")
    assert call("debugify", file).exit_code == 0


class Trap:
    """Leaves a file behind when unpickled."""

    def __init__(self, place: Path) -> None:
        self.place = place

    def __reduce__(self) -> object:
        return Path.touch, (self.place,)


def test_nothing_without_our_header_is_unpickled(tmp_path: Path, file: Path) -> None:
    trap = pickle.dumps(Trap(tmp_path / "ran"))
    start = file.read_bytes()
    head = start[: start.index(b"\n", len(MAGIC)) + 1]
    for content in (trap, MAGIC + trap, head + trap):
        file.write_bytes(content)
        with pytest.raises(SavedGraphError):
            saved_graph.read(file)
        assert not (tmp_path / "ran").exists()


def test_what_is_no_file_is_refused(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "none"):
        found = call("debugify", path)
        assert found.exit_code == 2 and "cannot be read" in found.output and found.output.count("\n") == 1


def test_what_cannot_be_pickled_is_refused(tmp_path: Path) -> None:
    b = Builder()
    b.call(lambda x: x, b.placeholder("x"))
    b.output()
    with pytest.raises(SavedGraphError, match="can be pickled"):
        save(tmp_path, b.module())
    assert list(tmp_path.rglob("*.graph")) == []


# ---- the commands ----


@pytest.fixture
def passes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    text = (
        "from collective_identity import start_nodes\n"
        "def forget(gm):\n    [node.meta.pop('custom', None) for node in start_nodes(gm)]\n"
        "def nothing(gm):\n    pass\n"
        "def broken(gm):\n    raise RuntimeError('two\\nlines')\n"
        "value = 3\n"
    )
    (tmp_path / "saved_graph_passes.py").write_text(text)


@pytest.mark.usefixtures("passes")
def test_debugify_runs_the_passes_given(file: Path) -> None:
    kept = call("debugify", file, "--pass", "saved_graph_passes:nothing", "--stamps", "same", "--json")
    (one,) = json.loads(kept.output)["passes"]
    assert kept.exit_code == 0 and one["counts"] == {"unchanged": 4} and one["stamp"] == "same"
    lost = call("debugify", file, "--pass", "saved_graph_passes:nothing", "--pass", "saved_graph_passes:forget")
    assert lost.exit_code == 1 and "forget [same]: drop" in lost.output and "saved_graph_passes.py:3 " in lost.output
    data = json.loads(call("debugify", file, "--pass", "saved_graph_passes:forget", "--json").output)
    assert not data["ok"] and {one["stamp"] for one in data["passes"]} == {"same", "different", "missing", "inferred"}


@pytest.mark.usefixtures("passes")
@pytest.mark.parametrize(
    "wrong",
    ["no_such_module:f", "saved_graph_passes:none", "saved_graph_passes:value", "saved_graph_passes:broken", "", ":"],
)
def test_a_pass_that_cannot_be_used(file: Path, wrong: str) -> None:
    found = call("debugify", file, "--pass", wrong)
    assert found.exit_code == 2 and found.output.startswith("error: ") and found.output.count("\n") == 1


def test_our_own_passes_are_the_default(file: Path) -> None:
    found = call("debugify", file)
    assert found.exit_code == 0 and found.output.endswith("ok\n") and "changed" in found.output
    assert call("debugify", file, "--stamps", "none").exit_code == 2


def test_dump_lists_selects_and_exports(tmp_path: Path) -> None:
    for rank in range(2):
        for number, phase in enumerate(("forward", "backward")):
            save(tmp_path, GRAPHS["gathers"](), rank=rank, phase=phase, number=number)
    assert call("dump", tmp_path).output.count("graph 0/0") == 4
    found = call("dump", tmp_path, "--rank", 1, "--phase", "backward", "--out", tmp_path / "out", "--json")
    (one,) = json.loads(found.output)["graphs"]
    assert (one["rank"], one["phase"], one["torch"]) == (1, "backward", str(torch.__version__))
    assert [str(path) for path in (tmp_path / "out").iterdir()] == [one["path"]]
    assert call("debugify", one["path"]).exit_code == 0
    for arguments in ((tmp_path / "none",), (tmp_path, "--rank", 7), (tmp_path, "--out", __file__)):
        found = call("dump", *arguments)
        assert found.exit_code == 2 and found.output.startswith("error: ") and found.output.count("\n") == 1
    save(tmp_path, GRAPHS["gathers"]()).write_bytes(b"?")
    assert call("dump", tmp_path).exit_code == 2


# ---- the backend ----


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Path]:
    torch._dynamo.reset()
    with ci.enable(agreement_timeout=0, run_dir=tmp_path / "run"):
        yield tmp_path / "run"


def train(**options: object) -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    for layer in model:
        fully_shard(layer, mesh=init_device_mesh("cpu", (4,)))
    fully_shard(model, mesh=init_device_mesh("cpu", (4,)))
    call = torch.compile(
        fsdp_hooks.install(model),
        backend="collective_identity",
        fullgraph=True,
        options={"inner": "aot_eager", **options},
    )
    call(torch.ones(3, 8)).sum().backward()


def test_the_backend_saves_what_it_captured(run: Path) -> None:
    train(dump=True)
    paths = sorted((run / "graphs").iterdir())
    found = {header.phase: gm for header, gm in map(saved_graph.read, paths)}
    captured = {graph["phase"]: graph["captured"] for graph in ci.report().to_dict()["graphs"]}
    assert set(found) == {"forward", "backward"}
    for phase, gm in found.items():
        table = ci.collective_table(gm)
        counts = {role: sum(row.role == role for row in table) for role in (PARAM_UNSHARD, GRAD_REDUCE_SHARD)}
        assert {role: n for role, n in counts.items() if n} == captured[phase]
    assert [call("debugify", path).exit_code for path in paths] == [0, 0]


def test_no_option_no_file_and_no_folder_no_dump(run: Path) -> None:
    train()
    assert not (run / "graphs").exists()


def test_dump_needs_a_run_folder() -> None:
    torch._dynamo.reset()
    with ci.enable(agreement_timeout=0), pytest.raises(Exception, match="option 'dump' expects a run folder") as error:
        train(dump=True)
    assert isinstance(error.value.__cause__ or error.value, OptionError) or "OptionError" in str(error.value)


def test_headers_are_plain_values(file: Path) -> None:
    header = saved_graph.header_of(file)
    assert json.loads(json.dumps(dataclasses.asdict(header))) == dataclasses.asdict(header)
