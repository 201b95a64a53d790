"""The direction of imports between the three packages, read from their source files."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("collective_identity", "fsdp_hooks", "inductor_passes")
MAY_IMPORT = {
    "collective_identity": {"collective_identity"},
    "fsdp_hooks": {"fsdp_hooks", "collective_identity"},
    "inductor_passes": {"inductor_passes", "collective_identity"},
}
THIRD_PARTY = {"torch", "functorch", "networkx"}  # functorch comes with torch
TERMINAL = {"rich", "typer", "jinja2"}
"""What the report and the command line may use, and nothing else in the packages."""


def imported(source: str) -> Iterator[tuple[int, str]]:
    """Line and full name of every module that `source` imports absolutely, inside functions too."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            yield node.lineno, node.module
        elif isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Constant):
            called = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            name = node.args[0].value
            if called in ("import_module", "__import__") and isinstance(name, str) and name[:1] != ".":
                yield node.lineno, name


def climbs_out(source: str, depth: int) -> list[int]:
    """Lines with a relative import that leaves the package; `depth` is the file's depth below its root."""
    return [
        node.lineno
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.ImportFrom) and node.level > depth
    ]


def files(package: str) -> list[Path]:
    found = sorted((ROOT / package).rglob("*.py"))
    assert found, f"no source file in {package}/"
    return found


def test_reads_every_form_of_import() -> None:
    source = (
        "import a.b as c, d\nfrom e.f import g\nfrom . import h\n"
        "def later():\n    import i\n"
        "    importlib.import_module('j.k')\n    __import__('l')\n    import_module('.m')\n"
    )
    assert {name for _, name in imported(source)} == {"a.b", "d", "e.f", "i", "j.k", "l"}
    assert climbs_out("from .. import x\nfrom . import y\n", depth=1) == [1]


@pytest.mark.parametrize("package", PACKAGES)
def test_packages_import_each_other_in_one_direction(package: str) -> None:
    wrong = [
        f"{path.relative_to(ROOT)}:{line}: {name}"
        for path in files(package)
        for line, name in imported(path.read_text())
        if name.split(".")[0] in set(PACKAGES) - MAY_IMPORT[package]
    ]
    assert not wrong, f"{package} may import {sorted(MAY_IMPORT[package])} of ours only: {wrong}"


@pytest.mark.parametrize("package", PACKAGES)
def test_no_relative_import_leaves_its_package(package: str) -> None:
    wrong = [
        f"{path.relative_to(ROOT)}:{line}"
        for path in files(package)
        for line in climbs_out(path.read_text(), depth=len(path.relative_to(ROOT).parts) - 1)
    ]
    assert not wrong


@pytest.mark.parametrize("package", PACKAGES)
def test_packages_import_nothing_undeclared(package: str) -> None:
    def allowed(path: Path) -> set[str]:
        terminal = "reporting" in path.parts or path.name == "cli.py"
        kernels = {"triton"} if path.name == "triton_kernels.py" else set()  # loaded on CUDA alone
        pytest_only = {"pytest"} if path.name == "pytest_plugin.py" else set()  # loaded by pytest alone
        own = {*(TERMINAL if terminal else ()), *kernels, *pytest_only}
        return {*sys.stdlib_module_names, *PACKAGES, *THIRD_PARTY, *own}

    wrong = [
        f"{path.relative_to(ROOT)}:{line}: {name}"
        for path in files(package)
        for line, name in imported(path.read_text())
        if name.split(".")[0] not in allowed(path)
    ]
    assert not wrong, f"only the standard library, torch and networkx (rich and typer to report): {wrong}"
