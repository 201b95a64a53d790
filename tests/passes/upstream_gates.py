"""Which of Inductor's switches stay on in lite mode: read from torch's source, for one version at a time.

``python -m tests.passes.upstream_gates FOLDER`` prints the list for the torch below FOLDER, to be put into
``upstream_gates.json`` once each new entry was looked at: does it optimise anything in lite mode? Those there now act
on generated kernels (marked regions), on caches and measuring, or are in docs/lite-mode.md.
"""

from __future__ import annotations

import ast
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

BASELINE = Path(__file__).with_suffix(".json")
FILES = ("compile_fx.py", "graph.py", "scheduler.py", "comms.py")
"""Where Inductor decides, after the passes that lite mode switches off, what to do with a graph."""
CONFIGS = ("config", "inductor_config")
"""What these files call Inductor's configuration; ``torch._inductor.config`` as well."""

FALSE = {"False", "None", "'none'", "0", "''", "[]", "{}"}
Read = Callable[[str], str]


def open_gates(read: Read) -> list[str]:
    """Options that are read in ``FILES``, in whatever form, are not false by default and not set by lite mode;
    ``read(file)`` returns the text of a file of torch/_inductor."""
    defaults, lite = dict(_defaults(ast.parse(read("config.py")).body, "")), _lite_switches(read("__init__.py"))
    asked = {name for file in FILES for node in ast.walk(ast.parse(read(file))) if (name := _option(node))}
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
        elif isinstance(node, ast.If):
            yield from _defaults([*node.body, *node.orelse], prefix)
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and node.value is not None:
            yield prefix + node.target.id, ast.unparse(node.value)
        elif isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            yield prefix + node.targets[0].id, ast.unparse(node.value)


def _option(node: ast.AST) -> str:
    """``"a.b"`` for ``config.a.b`` and ``getattr(config.a, "b")``, where it is read; empty for all else."""
    parts: list[str] = []
    while not isinstance(node, ast.Name):
        if isinstance(node, ast.Attribute) and not isinstance(node.ctx, ast.Store):
            parts.append(node.attr)
            node = node.value
        elif isinstance(node, ast.Call) and ast.unparse(node.func) == "getattr" and len(node.args) > 1:
            name = node.args[1]
            parts.append(name.value if isinstance(name, ast.Constant) else "?")
            node = node.args[0]
        else:
            return ""
    if node.id == "torch" and parts[-2:] == ["config", "_inductor"]:
        return ".".join(reversed(parts[:-2]))
    return ".".join(reversed(parts)) if node.id in CONFIGS else ""


def main() -> None:
    """Print the list of one torch."""
    folder = Path(sys.argv[1]) / "torch" / "_inductor"
    print(json.dumps(open_gates(lambda file: (folder / file).read_text()), indent=2))


if __name__ == "__main__":
    main()
