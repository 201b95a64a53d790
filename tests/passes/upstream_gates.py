"""Which of Inductor's switches stay on in lite mode: read from torch's source, for one version at a time.

``python -m tests.passes.upstream_gates FOLDER`` prints the list for the torch below FOLDER, to be put into
``upstream_gates.json`` once each new entry was looked at: does it optimise anything in lite mode?
"""

from __future__ import annotations

import ast
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

BASELINE = Path(__file__).with_suffix(".json")
FUNCTIONS = {
    "scheduler.py": {"_init", "__init__", "dead_node_elimination", "fuse_nodes"},
    "compile_fx.py": {
        "codegen_and_compile", "compile_fx_forward", "compile_fx_backward", "partition_fn", "fw_compiler_freezing",
        "_compile_fx_main", "compile_fx",
    },
    "graph.py": {"run_node", "run", "decide_layout_opt", "call_function", "placeholder", "output", "finalize"},
    "comms.py": {"decide_global_ordering_of_comms"},
}  # fmt: skip
"""Where Inductor decides, after the passes that lite mode switches off, what to do with a graph."""

FALSE = {"False", "None", "'none'", "0", "''", "[]", "{}"}
Read = Callable[[str], str]


def open_gates(read: Read) -> list[str]:
    """Options that decide in ``FUNCTIONS``, are not false by default and not set by lite mode; ``read(file)``
    returns the text of a file of torch/_inductor."""
    defaults, lite = dict(_defaults(ast.parse(read("config.py")).body, "")), _lite_switches(read("__init__.py"))
    asked = {name for file, functions in FUNCTIONS.items() for name in _asked(ast.parse(read(file)), functions)}
    return sorted(name for name in asked if name in defaults and defaults[name] not in FALSE and name not in lite)


def _lite_switches(source: str) -> set[str]:
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "") == "lite_mode_options":
            return set(ast.literal_eval(node.value))
    raise AssertionError("expected lite_mode_options in torch/_inductor/__init__.py, found none")


def _defaults(body: list[ast.stmt], prefix: str) -> Iterator[tuple[str, str]]:
    for node in body:
        if isinstance(node, ast.ClassDef):
            yield from _defaults(node.body, f"{prefix}{node.name}.")
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and node.value is not None:
            yield prefix + node.target.id, ast.unparse(node.value)
        elif isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            yield prefix + node.targets[0].id, ast.unparse(node.value)


def _asked(tree: ast.Module, functions: set[str]) -> Iterator[str]:
    for function in ast.walk(tree):
        if isinstance(function, ast.FunctionDef) and function.name in functions:
            for test in (node.test for node in ast.walk(function) if isinstance(node, ast.If)):
                yield from (name for node in ast.walk(test) if (name := _option(node)))


def _option(node: ast.AST) -> str:
    parts: list[str] = []
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    if isinstance(node, ast.Name) and node.id in ("config", "inductor_config"):
        return ".".join(reversed(parts))
    if isinstance(node, ast.Name) and node.id == "torch" and parts[-2:] == ["config", "_inductor"]:
        return ".".join(reversed(parts[:-2]))
    return ""


def main() -> None:
    """Print the list of one torch."""
    folder = Path(sys.argv[1]) / "torch" / "_inductor"
    print(json.dumps(open_gates(lambda file: (folder / file).read_text()), indent=2))


if __name__ == "__main__":
    main()
