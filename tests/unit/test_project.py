"""The project's own files: what is declared is there, versions agree, no file names a machine."""

from __future__ import annotations

import importlib
import os
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest

try:
    import tomllib
except ModuleNotFoundError:  # Python 3.10: pytest brings it
    import tomli as tomllib

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("collective_identity", "fsdp_hooks", "inductor_passes")
MACHINE = {
    # No pattern matches itself.
    "a folder of one machine": r"(?<![\w.:~/\-])/(?:work|opt|root|home|Users|mnt)/[\w.]",
    "a package registry's host": r"\b(?:pypi|pythonhosted|npmjs|download\.pytorch)\.(?:org|com)\b",
    "a package index option": r"--(?:extra-)?index[-]url|--find[-]links",
    "an address": r"(?<![\d.])(?:10|172\.(?:1[6-9]|2\d|3[01])|192\.168)(?:\.\d{1,3}){2,3}\b",
}


@pytest.fixture(scope="module")
def project() -> dict[str, Any]:
    return tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def own_files() -> list[Path]:
    """What git tracks or would; in a copy without git, every file outside hidden and cache folders."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    try:
        listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
        files = [ROOT / name for name in listed.split("\0") if name]
    except (OSError, subprocess.CalledProcessError):
        files = []
        for folder, folders, names in os.walk(ROOT):
            here = Path(folder)
            folders[:] = [name for name in folders if name[:1] != "." and name not in ("__pycache__", "runs")]
            files += [here / name for name in names]
    return [path for path in files if path.is_file() and ROOT / "shared" not in path.parents]


def machine_names(text: str) -> list[str]:
    """What in `text` is true on one machine only, each with its line number and kind."""
    return [
        f"{number}: {kind}: {found.group()}"
        for number, line in enumerate(text.splitlines(), 1)
        for kind, pattern in MACHINE.items()
        for found in re.finditer(pattern, line)
    ]


@pytest.mark.parametrize(
    "planted",
    [
        "cd /{}/x".format("root"),
        "'/{}/me'".format("home"),
        "https://pypi.{}/simple".format("org"),
        "--extra-index-{} x".format("url"),
        "10.0.{}.7".format("0"),
    ],
)
def test_a_planted_machine_name_is_found(planted: str) -> None:
    assert len(machine_names(f"first line\n{planted}")) == 1


@pytest.mark.parametrize("harmless", ["see network/work/x", "127.0.0.1:0", "torch 2.10.0.1", "the root / of"])
def test_harmless_text_is_not_a_machine_name(harmless: str) -> None:
    assert machine_names(harmless) == []


def test_no_file_names_a_machine() -> None:
    files = own_files()
    assert ROOT / "pyproject.toml" in files
    wrong = []
    for path in files:
        try:
            text = path.read_text()
        except UnicodeDecodeError:
            continue
        wrong += [f"{path.relative_to(ROOT)}:{found}" for found in machine_names(text)]
    assert not wrong


def test_one_version_everywhere(project: dict[str, Any]) -> None:
    newest = re.search(r"^## (\S+)", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert newest is not None
    package = importlib.import_module("collective_identity")
    assert {project["version"], newest.group(1), package.__version__} == {project["version"]}


def test_supported_torch_and_the_pinned_one(project: dict[str, Any]) -> None:
    assert "torch>=2.11,<2.16" in project["dependencies"]
    assert project["requires-python"] == ">=3.10"
    pinned = [need for need in project["optional-dependencies"]["dev"] if need.startswith("torch==")]
    assert pinned == ["torch==2.13.0"]
    assert {"gpu", "report", "test", "docs"} <= set(project["optional-dependencies"])


def test_entry_points_lead_somewhere(project: dict[str, Any]) -> None:
    targets = [*project["scripts"].values(), *project["entry-points"]["torch_dynamo_backends"].values()]
    for target in targets:
        module, name = target.split(":")
        assert callable(getattr(importlib.import_module(module), name)), target


def test_installed_entry_point_gives_dynamo_the_backend() -> None:
    from torch._dynamo.backends.registry import list_backends

    assert "collective_identity" in list_backends(), "installed? `./dev test` and `./dev here test` see to it"


@pytest.mark.parametrize("package", PACKAGES)
def test_packages_are_typed(package: str) -> None:
    assert (ROOT / package / "py.typed").exists()


def test_continuous_integration_runs_the_readme_command() -> None:
    commands = re.findall(r"^ +(\./dev .*?)(?: +#.*)?$", (ROOT / "README.md").read_text(), re.MULTILINE)
    assert commands[:2] == ["./dev demo", "./dev test"]
    script = (ROOT / ".ci" / "run").read_text()
    assert "\nexec ./dev test " in script
    for path in ("dev", ".ci/run"):
        assert os.access(ROOT / path, os.X_OK), f"{path} is not executable"
