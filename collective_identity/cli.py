"""The command `collective-identity`: read a run, check it in CI, check passes, look at the installation.

Exit codes: 0 fine; 1 the check found something (`check`, `debugify`, `doctor`); 2 wrong usage, or no readable input.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from importlib import metadata, util
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer

from . import compat
from .reporting.graph_commands import debugify_command, dump_command
from .reporting.jsonl import RunFolderError, read_run
from .reporting.report import FAULTS, Report, build_report
from .reporting.terminal import render
from .reporting.watch_command import watch_command
from .version import __version__

app = typer.Typer(
    name="collective-identity",
    help=__doc__,
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)

_BAD_USAGE = 2

RunFolder = Annotated[
    Path, typer.Argument(metavar="RUN", help="Run folder, with one rank<N>.jsonl per rank.")
]
AsJson = Annotated[bool, typer.Option("--json", help="One JSON object on stdout instead of tables.")]


@app.command("report")
def report_command(run: RunFolder, as_json: AsJson = False) -> None:
    """Show what a run captured, labelled, merged and lost.

    Exit code 0 whatever the report says, 2 when RUN holds no readable run.
    """
    found = _read(run)
    if as_json:
        _print_json(found.to_dict())
    else:
        render(found)


@app.command()
def check(
    run: RunFolder,
    fail_on: Annotated[
        str,
        typer.Option(
            "--fail-on", help=f"Comma-separated kinds of fault that fail the check: {', '.join(FAULTS)}."
        ),
    ] = ",".join(FAULTS),
    as_json: AsJson = False,
) -> None:
    """Fail when a run lost, contradicted, refuted or missed identities, or is not what its producers
    declared.

    Exit code 0 when the run passes, 1 with the reasons when it does not, 2 when RUN holds no readable run.
    """
    found = _read(run)
    kinds = [kind.strip() for kind in fail_on.split(",") if kind.strip()]
    try:
        reasons = [f"failure: {text}" for text in found.failures] + found.faults(kinds)
    except ValueError as error:
        _fail(f"--fail-on: {error}")
    if as_json:
        _print_json({"ok": not reasons, "fail_on": kinds, "reasons": reasons})
    else:
        for reason in reasons:
            typer.echo(reason)
        typer.echo("ok" if not reasons else f"{len(reasons)} reasons to fail")
    if reasons:
        raise typer.Exit(1)


@app.command()
def doctor(as_json: AsJson = False) -> None:
    """Look at this installation: torch version, what we rely on in it, entry points.

    Exit code 0 when everything needed is there, 1 otherwise.
    """
    checks = [{"check": name, "ok": ok, "found": found} for name, ok, found in diagnose()]
    good = all(entry["ok"] for entry in checks)
    if as_json:
        _print_json({"ok": good, "checks": checks})
    else:
        for entry in checks:
            typer.echo(f"{'ok ' if entry['ok'] else 'NOT'}  {entry['check']}: {entry['found']}")
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
        _look("package fsdp_hooks", lambda: util.find_spec("fsdp_hooks") is not None),
        _look("package inductor_passes", lambda: util.find_spec("inductor_passes") is not None),
        _entry_point(),
    ]


def main() -> None:
    """Entry point of the console script."""
    app()


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


def _read(run: Path) -> Report:
    try:
        return build_report(read_run(run))
    except (RunFolderError, OSError) as error:
        _fail(str(error))


def _fail(text: str) -> NoReturn:
    print(f"error: {text}", file=sys.stderr)
    raise typer.Exit(_BAD_USAGE)


def _print_json(value: dict[str, Any]) -> None:
    typer.echo(json.dumps(value))
