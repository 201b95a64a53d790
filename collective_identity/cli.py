"""The command `collective-identity`: read a run, check it in CI, check passes, look at the installation.

Exit codes: 0 fine; 1 something was found (`check`, `diff`, `debugify`, `doctor`); 2 wrong usage, or no readable input.
"""

from __future__ import annotations

import io
import json
import os
import shutil
import sys
from collections.abc import Callable
from importlib import metadata, util
from pathlib import Path
from typing import Annotated, Any

try:
    import rich  # noqa: F401  (of the same extra)
    import typer
except ModuleNotFoundError as error:
    sys.exit(f"error: the command needs {error.name}, not installed here: pip install 'collective-identity[report]'")

from . import compat
from .reporting.graph_commands import debugify_command, dump_command
from .reporting.run_commands import check_command, diff_command, explain_command, report_command
from .reporting.watch_command import watch_command
from .version import __version__

app = typer.Typer(
    name="collective-identity",
    help=__doc__,
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)

AsJson = Annotated[bool, typer.Option("--json", help="One JSON object on stdout instead of tables.")]

app.command("report")(report_command)
app.command("check")(check_command)
app.command("diff")(diff_command)
app.command("explain")(explain_command)


@app.command()
def doctor(as_json: AsJson = False) -> None:
    """Look at this installation: torch version, what we rely on in it, entry points, what does not work here.

    Exit code 0 when everything needed is there, 1 otherwise.
    """
    checks = [{"check": name, "ok": ok, "found": found} for name, ok, found in diagnose()]
    good = all(entry["ok"] for entry in checks)
    limits = unsupported()
    if as_json:
        _print_json({"ok": good, "checks": checks, "unsupported": limits})
    else:
        for entry in checks:
            typer.echo(f"{'ok ' if entry['ok'] else 'NOT'}  {entry['check']}: {entry['found']}")
        for text in limits:
            typer.echo(f"--   unsupported here: {text}")
    if not good:
        raise typer.Exit(1)


app.command("dump")(dump_command)
app.command("watch")(watch_command)
app.command("debugify")(debugify_command)


def diagnose() -> list[tuple[str, bool, str]]:
    """(what was looked at, whether it is fine, what was found), one after the other."""
    (low, high), version = compat.SUPPORTED, compat.torch_version()
    wanted = f"{low[0]}.{low[1]} <= version < {high[0]}.{high[1]}"
    import torch

    return [
        ("package", True, f"collective-identity {__version__} in {Path(__file__).parent}"),
        ("torch version", low <= version < high, f"{torch.__version__}, expected {wanted}"),
        _look("torch.distributed", lambda: torch.distributed.is_available()),
        _look("annotate", lambda: bool(_attribute("torch.fx.traceback", "annotate"))),
        _look("preserve_node_meta", lambda: bool(_attribute("torch.fx.traceback", "preserve_node_meta"))),
        _look("FSDP2 fully_shard", lambda: bool(_attribute("torch.distributed.fsdp", "fully_shard"))),
        _look("FSDP2 state with forward hook handles", _fsdp_hook_handles),
        _look("Inductor pass slots", _pass_slots),
        _wrapped(),
        _look("package fsdp_hooks", lambda: util.find_spec("fsdp_hooks") is not None),
        _look("package inductor_passes", lambda: util.find_spec("inductor_passes") is not None),
        _entry_point(),
    ]


def unsupported() -> list[str]:
    """What this project cannot do with this installation and configuration, one sentence each."""
    import torch
    from torch._inductor import config

    distributed = torch.distributed.is_available()
    found = {
        "collectives of any kind: this torch was built without torch.distributed": not distributed,
        "process groups on GPUs: no NCCL in this torch": distributed and not torch.distributed.is_nccl_available(),
        "process groups on CPUs: no gloo in this torch": distributed and not torch.distributed.is_gloo_available(),
        "explicit roles in backward: compiled autograd is on, structure decides there": bool(
            getattr(torch._dynamo.config, "compiled_autograd", False)
        ),
        "roles in profiles of Inductor's code: cpp_wrapper is on": config.cpp_wrapper,
        "Inductor on a CPU: no C++ compiler on the path (options={'inner': 'aot_eager'} needs none)": not any(
            map(shutil.which, filter(None, (os.environ.get("CXX"), "g++", "clang++", "c++")))
        ),
    }
    return [text for text, here in found.items() if here]


def main() -> None:
    """Entry point of the console script. What the terminal's encoding has no sign for is shown escaped."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        app()
    except SystemExit as end:
        if sys.argv[1:2] != ["watch"] or not isinstance(end.code, int):
            raise
        sys.stdout.flush()
        sys.stderr.flush()
        # A thread may be left inside a store that does not answer, and taking torch down costs a third of its start.
        os._exit(end.code)


def _look(name: str, test: Callable[[], bool]) -> tuple[str, bool, str]:
    try:
        found = test()
    except Exception as error:  # whatever is amiss in an installation is the finding
        return name, False, f"{type(error).__name__}: {error}"
    return name, found, "available" if found else "missing"


def _attribute(module: str, name: str) -> Any:
    import importlib

    return getattr(importlib.import_module(module), name, None)


def _fsdp_hook_handles() -> bool:
    import inspect

    state = _attribute("torch.distributed.fsdp._fully_shard._fsdp_state", "FSDPState")
    source = inspect.getsource(state)
    return all(name in source for name in ("_pre_forward_hook_handle", "_post_forward_hook_handle"))


def _pass_slots() -> bool:
    from torch._inductor import config

    return all(hasattr(config, name) for name in ("post_grad_custom_pre_pass", "post_grad_custom_post_pass"))


def _wrapped() -> tuple[str, bool, str]:
    """Functions of torch that another package has replaced in this process. To be told; ours are undone when closed."""
    found = compat.replaced_functions()
    return "attributes of torch that were wrapped", True, ", ".join(found) if found else "none"


def _entry_point() -> tuple[str, bool, str]:
    name = "backend entry point"
    found = [
        e for e in metadata.entry_points(group="torch_dynamo_backends") if e.name == "collective_identity"
    ]
    if found:
        return name, True, f"{found[0].value}"
    return (
        name,
        False,
        "not installed: torch.compile(backend='collective_identity') needs the package installed, or "
        "backend=inductor_passes.backend.collective_identity from a checkout",
    )


def _print_json(value: dict[str, Any]) -> None:
    typer.echo(json.dumps(value))
