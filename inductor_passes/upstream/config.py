"""How is torch configured? Inductor's options and modes, and what the caller has set."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
import torch._inductor.config as inductor_config
import torch.compiler.config as compiler_config
from torch import fx


def inductor_flag(name: str) -> Any:
    """The value that an Inductor option has now, in this thread; dotted names reach nested options."""
    return functools.reduce(getattr, name.split("."), inductor_config)


def inductor_option_exists(name: str) -> bool:
    """True when ``name`` is an option of Inductor's configuration."""
    return name in inductor_config._config  # type: ignore[attr-defined]


def mode_options() -> Mapping[str, Mapping[str, Any]]:
    """Inductor's options of every ``torch.compile`` mode."""
    return torch._inductor.list_mode_options()


@dataclass(frozen=True, slots=True)
class CallersConfig:
    """What the caller has configured where we add to it, read when the backend is called.

    A backward that compiles later, in another thread, does not see the caller's ``config.patch`` (torch 2.13).
    """

    cache_key_tag: str
    post_grad_passes: tuple[Any, ...]


def callers_config(options: Mapping[str, Any]) -> CallersConfig:
    """The configuration of this thread, with the Inductor ``options`` of this ``torch.compile`` in force."""
    user = options.get("post_grad_custom_pre_pass", inductor_config.post_grad_custom_pre_pass)
    passes = tuple(user) if isinstance(user, (list, tuple)) else () if user is None else (user,)
    return CallersConfig(compiler_config.cache_key_tag, passes)


LITE_SWITCH = "fallback_by_default"
"""What makes a compile lite (lite_mode/state.py)."""


def is_lite(options: Mapping[str, Any]) -> bool:
    """Whether a compile with these Inductor options is in lite mode, in this thread now."""
    return bool(options.get(LITE_SWITCH, getattr(inductor_config, LITE_SWITCH)))


def region_patches(gm: fx.GraphModule) -> Mapping[str, Any]:
    """Inductor's options of a nested compile region (torch 2.14 and later; empty elsewhere)."""
    config = gm.meta.get("nested_region_config")
    return getattr(config, "inductor_config_patches", None) or {}


def inductor_flags(values: Mapping[str, Any]) -> AbstractContextManager[Any]:
    """Inductor's options set to these values in this thread, while entered."""
    return inductor_config.patch(dict(values))  # type: ignore[attr-defined, no-any-return]
