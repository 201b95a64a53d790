"""What is in the keys of torch's compile caches, and when are they not used?"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch._functorch.config as functorch_config
import torch.compiler.config as compiler_config
from torch._inductor.custom_graph_pass import get_hash_for_files


@contextmanager
def cache_key(tag: str, user: str) -> Iterator[None]:
    """Append ``tag`` to the user's ``cache_key_tag``, which is in the keys of both compile caches.

    Nesting is harmless: a tag that is there already is not appended again.
    """
    if user.endswith(tag):
        yield
        return
    with compiler_config.patch(cache_key_tag=f"{user}+{tag}" if user else tag):  # type: ignore[attr-defined]
        yield


@contextmanager
def caches_disabled(yes: bool) -> Iterator[None]:
    """Compile without reading or writing any cache."""
    if not yes:
        yield
        return
    with compiler_config.patch(force_disable_caches=True):  # type: ignore[attr-defined]
        yield


@contextmanager
def autograd_cache_disabled(yes: bool) -> Iterator[None]:
    """Compile without reading or writing AOTAutogradCache, local or remote; FxGraphCache stays as it is."""
    if not yes:
        yield
        return
    with functorch_config.patch(  # type: ignore[attr-defined]
        enable_autograd_cache=False, enable_remote_autograd_cache=False
    ):
        yield


def autograd_cache_bypassed(reasons: Sequence[str]) -> None:
    """Count it under ``torch._dynamo.utils.counters["collective_identity"]``, by reason and in all."""
    from torch._dynamo.utils import counters

    counters["collective_identity"]["autograd_cache_bypass"] += 1
    for reason in reasons:
        counters["collective_identity"][f"autograd_cache_bypass: {reason}"] += 1


def autograd_cache_is_on() -> bool:
    """Whether this thread's configuration would use AOTAutogradCache."""
    on = functorch_config.enable_autograd_cache or functorch_config.enable_remote_autograd_cache
    return bool(on) and not compiler_config.force_disable_caches


def cache_dir() -> Path:
    """Inductor's cache folder."""
    from torch._inductor.runtime.cache_dir_utils import cache_dir as inductor_cache_dir

    return Path(inductor_cache_dir())


@functools.cache
def source_hash(*packages: Path) -> str:
    """Hash of the Python sources of packages: any edit is another pass."""
    files = tuple(str(path) for package in packages for path in sorted(package.rglob("*.py")))
    return get_hash_for_files(files).hex()
