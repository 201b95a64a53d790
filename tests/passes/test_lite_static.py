"""Read from source: passes declare their lite behaviour and keep it; torch has opened no new gate in lite mode."""

from __future__ import annotations

import ast
import json
from collections.abc import Iterator
from pathlib import Path

import torch

from tests.passes.upstream_gates import BASELINE, open_gates

PASSES = Path(__file__).resolve().parents[2] / "inductor_passes"
INDUCTOR = Path(torch.__file__).parent / "_inductor"

READERS = frozenset("PassContract frozenset plan_normalization summary PassOutcome".split())
"""All that a read-only pass may call, by name, outside the branch that writes. What those do, the guard sees."""


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


def may_write(node: ast.AST) -> Iterator[str]:
    """What may write to a graph below ``node``, except where ``context.read_only`` was found to be false."""
    if isinstance(node, (ast.IfExp, ast.If)) and ast.unparse(node.test) == "context.read_only":
        branch = node.body if isinstance(node.body, list) else [node.body]
        for one in branch:
            yield from may_write(one)
        return
    if isinstance(node, ast.Call):
        name = node.func.attr if isinstance(node.func, ast.Attribute) else ast.unparse(node.func)
        if name not in READERS:
            yield f"line {node.lineno}: {name}()"
    if isinstance(node, (ast.Attribute, ast.Subscript)) and not isinstance(node.ctx, ast.Load):
        yield f"line {node.lineno}: {ast.unparse(node)} ="
    if isinstance(node, ast.AugAssign):
        yield f"line {node.lineno}: {ast.unparse(node)}"
    for child in ast.iter_child_nodes(node):
        yield from may_write(child)


def test_every_pass_declares_and_keeps_its_lite_behaviour() -> None:
    found = {}
    for file in sorted(PASSES.rglob("*.py")):
        for node in pass_classes(file.read_text()):
            found[node.name] = lite_behaviour(node)
            if found[node.name] == "READ_ONLY":
                assert list(may_write(node)) == [], f"{file.name}: {node.name} is declared read-only"
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


WRITES = """
gm.graph.erase_node(n)
n.target = f
n.target: object = f
n.args, n.kwargs = (), {}
for n.target in [f]: pass
n.op = 'call_method'
n.meta = {}
n.meta |= {'a': 1}
n.meta['custom'] = {}
n.meta['custom']['x'] = 1
del n.meta['custom']
n.meta.update(custom={})
n.meta.pop('custom')
n.meta.clear()
n.meta.setdefault('custom', {})
c = n.meta; c['custom'] = {}
c = n.meta; c |= {'custom': {}}
n.append(m)
n.prepend(m)
n.replace_all_uses_with(m)
gm.graph.call_function(f, ())
gm.graph.call_method('x', ())
gm.graph.call_module('x')
gm.graph.get_attr('x')
gm.graph.output(n)
gm.graph.placeholder('x')
gm.graph.set_codegen(c)
gm.graph = g
gm.forward = f
gm.constant = t
gm.add_submodule('a', m)
gm.register_buffer('a', t)
gm.constant.add_(1)
fx.replace_pattern(gm, a, b)
pattern.apply(gm.graph)
normalize(gm)
list(map(stamp, gm.graph.nodes))
object.__setattr__(n, 'target', f)
self._write(gm)
x = 1 if context.read_only else 2; stamp(n, i)
(context.read_only and stamp(n, i))
if not context.read_only: stamp(n, i)
""".strip().split("\n")


def test_a_write_in_a_read_only_pass_is_seen() -> None:
    unseen = []
    for body in WRITES:
        (node,) = pass_classes(PLANTED.format(lite=", lite=LiteBehaviour.READ_ONLY", body=body))
        assert lite_behaviour(node) == "READ_ONLY"
        unseen += [] if list(may_write(node)) else [body]
    assert unseen == []


def test_a_write_where_writing_is_allowed_is_not() -> None:
    body = "return None if context.read_only else normalize(gm)"
    (node,) = pass_classes(PLANTED.format(lite=", lite=LiteBehaviour.READ_ONLY", body=body))
    assert list(may_write(node)) == []


def baseline() -> list[str]:
    return json.loads(BASELINE.read_text())[".".join(torch.__version__.split(".")[:2])]  # type: ignore[no-any-return]


def test_torch_has_opened_no_new_gate() -> None:
    found = open_gates(lambda file: (INDUCTOR / file).read_text())
    assert found == baseline(), "look at each new option: does it optimise anything in lite mode? See upstream_gates.py"
    assert "layout_optimization" in found, "the strict preset turns it off"


READS = """
def decide_by_a_test(self, x):
    if config.in_if: pass
    later = config.in_assignment
    value = (1 if config.in_choice else 2), self.x and config.in_and, [n for n in x if config.in_list]
    while config.in_while: pass
    for p in config.in_for: p(enable=config.in_argument)
    match config.in_match.get("x"):
        case True: pass
    f(getattr(config, "by_name"), getattr(inductor_config, "by_name_or", None), torch._inductor.config.in_full)
    f(config.at.direct, getattr(config.at, "by_name"), getattr(config, "at").after_name)
    config.written = other.not_config; config.off; config.fallback_by_default; config.unknown
"""


def test_a_planted_gate_is_seen() -> None:
    """In any function of the files that are read, in any form of use, if it is on and lite mode does not set it."""
    read = "if assignment choice and list while for argument match full".split()
    seen = {*(f"in_{form}" for form in read), "by_name", "by_name_or", "at.direct", "at.by_name", "at.after_name"}

    def planted(file: str) -> str:
        text = (INDUCTOR / file).read_text()
        if file == "config.py":
            options = [f"{name}: bool = True" for name in sorted({*seen, "written", "not_config"}) if "." not in name]
            nested = [f"    {name[3:]} = True" for name in sorted(seen) if "." in name]
            return "\n".join([text, *options, "off: bool = False", "class at:", *nested, ""])
        return text + READS if file == "comms.py" else text

    assert set(open_gates(planted)) - set(baseline()) == seen


def test_the_baseline_has_what_is_known_of_each_version() -> None:
    versions = json.loads(BASELINE.read_text())
    assert sorted(versions) == ["2.11", "2.12", "2.13", "2.14", "2.15"]
    overlap = "aten_distributed_optimizations.enable_simple_overlap"
    assert [version for version, names in sorted(versions.items()) if overlap in names] == ["2.14", "2.15"]
