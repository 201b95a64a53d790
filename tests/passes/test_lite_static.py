"""Read from source: passes declare their lite behaviour and keep it; torch has opened no new gate in lite mode."""

from __future__ import annotations

import ast
import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.passes.upstream_gates import BASELINE, open_gates

PASSES = Path(__file__).resolve().parents[2] / "inductor_passes"
INDUCTOR = Path(torch.__file__).parent / "_inductor"

WRITES = frozenset(
    "call_function create_node erase_node placeholder inserting_before inserting_after replace_all_uses_with "
    "replace_input_with update_arg insert_arg eliminate_dead_code node_copy graph_copy recompile prepend "
    "normalize apply_normalization stamp clear apply_plan mark_recompute bucket_collectives setattr delattr".split()
)
WRITTEN = frozenset(("target", "args", "kwargs", "graph"))


def pass_classes(source: str) -> Iterator[ast.ClassDef]:
    """Classes with ``__call__(self, gm, context)``, protocols left out."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ClassDef) and "Protocol" not in map(ast.unparse, node.bases):
            calls = [one for one in node.body if isinstance(one, ast.FunctionDef) and one.name == "__call__"]
            if any([arg.arg for arg in one.args.args] == ["self", "gm", "context"] for one in calls):
                yield node


def lite_behaviour(node: ast.ClassDef) -> str | None:
    """``"SKIP"``, ... as the class's ``PassContract(lite=...)`` says; None when it says nothing."""
    for call in ast.walk(node):
        if isinstance(call, ast.Call) and ast.unparse(call.func).endswith("PassContract"):
            for keyword in call.keywords:
                if keyword.arg == "lite":
                    return ast.unparse(keyword.value).rsplit(".", 1)[-1]
    return None


def graph_writes(node: ast.AST) -> Iterator[str]:
    """What writes to a graph below ``node``, except where ``read_only`` was found to be false."""
    if isinstance(node, (ast.IfExp, ast.If)) and ast.unparse(node.test) == "context.read_only":
        branch = node.body if isinstance(node.body, list) else [node.body]
        for one in branch:
            yield from graph_writes(one)
        return
    if isinstance(node, ast.Call):
        name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
        if name in WRITES:
            yield f"line {node.lineno}: {name}()"
    if isinstance(node, (ast.Assign, ast.AugAssign, ast.Delete)):
        targets = [node.target] if isinstance(node, ast.AugAssign) else node.targets
        for target in targets:
            if isinstance(target, ast.Attribute) and target.attr in WRITTEN:
                yield f"line {node.lineno}: .{target.attr} ="
            if isinstance(target, ast.Subscript) and ".meta" in ast.unparse(target):
                yield f"line {node.lineno}: {ast.unparse(target)} ="
    for child in ast.iter_child_nodes(node):
        yield from graph_writes(child)


def test_every_pass_declares_and_keeps_its_lite_behaviour() -> None:
    found = {}
    for file in sorted(PASSES.rglob("*.py")):
        for node in pass_classes(file.read_text()):
            found[node.name] = lite_behaviour(node)
            if found[node.name] == "READ_ONLY":
                assert list(graph_writes(node)) == [], f"{file.name}: {node.name} is declared read-only"
    assert {"Normalize": "READ_ONLY", "Bucket": "SKIP", "Reshard": "CAPTURE"}.items() <= found.items()
    assert None not in found.values(), f"no lite behaviour: {[name for name, lite in found.items() if lite is None]}"


PLANTED = """
class Planted:
    contract = PassContract(name="planted"{lite})
    def __call__(self, gm, context):
        {body}
"""


def test_a_pass_without_behaviour_is_seen() -> None:
    (node,) = pass_classes(PLANTED.format(lite="", body="pass"))
    assert lite_behaviour(node) is None


@pytest.mark.parametrize(
    "body",
    [
        "gm.graph.erase_node(n)", "n.target = f", "n.args = ()", "n.meta['custom'] = {}", "n.meta['custom']['x'] = 1",
        "del n.meta['custom']", "n.replace_all_uses_with(m)", "normalize(gm)", "gm.graph = g",
        "x = 1 if context.read_only else 2; stamp(n, i)",
    ],
)  # fmt: skip
def test_a_write_in_a_read_only_pass_is_seen(body: str) -> None:
    (node,) = pass_classes(PLANTED.format(lite=", lite=LiteBehaviour.READ_ONLY", body=body))
    assert lite_behaviour(node) == "READ_ONLY" and len(list(graph_writes(node))) == 1


def test_a_write_where_writing_is_allowed_is_not() -> None:
    body = "return None if context.read_only else normalize(gm)"
    (node,) = pass_classes(PLANTED.format(lite=", lite=LiteBehaviour.READ_ONLY", body=body))
    assert list(graph_writes(node)) == []


def baseline() -> list[str]:
    return json.loads(BASELINE.read_text())[".".join(torch.__version__.split(".")[:2])]  # type: ignore[no-any-return]


def test_torch_has_opened_no_new_gate() -> None:
    found = open_gates(lambda file: (INDUCTOR / file).read_text())
    assert found == baseline(), "look at each new option: does it optimise anything in lite mode? See upstream_gates.py"
    assert "layout_optimization" in found, "the strict preset turns it off"


def test_a_planted_gate_is_seen() -> None:
    def planted(file: str) -> str:
        text = (INDUCTOR / file).read_text()
        if file == "config.py":
            return text + "\nplanted_by_a_test: bool = True\n"
        if file == "comms.py":
            return text + "\ndef decide_global_ordering_of_comms():\n    if config.planted_by_a_test:\n        pass\n"
        return text

    assert set(open_gates(planted)) - set(baseline()) == {"planted_by_a_test"}


def test_the_baseline_has_what_is_known_of_each_version() -> None:
    versions = json.loads(BASELINE.read_text())
    assert sorted(versions) == ["2.11", "2.12", "2.13", "2.14", "2.15"]
    overlap = "aten_distributed_optimizations.enable_simple_overlap"
    assert [version for version, names in sorted(versions.items()) if overlap in names] == ["2.14", "2.15"]
