"""Where in the job does this process stand? Rank, run id, restart count."""

from __future__ import annotations

import os

import torch


def rank_and_ranks() -> tuple[int, int]:
    """This process's rank and the number of ranks: the process group's, else torchrun's, else (0, 1)."""
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return torch.distributed.get_rank(), torch.distributed.get_world_size()
    return _number("RANK", 0), _number("WORLD_SIZE", 1)


def run_and_restart() -> tuple[str, int]:
    """torchrun's run id and restart count; ("", 0) without torchrun."""
    return os.environ.get("TORCHELASTIC_RUN_ID", ""), _number("TORCHELASTIC_RESTART_COUNT", 0)


def store_outlives_restarts() -> bool:
    """Whether torchrun's agent serves the job's store, and keeps it over restarts; else rank 0 serves a new one.

    PyTorch 2.11-2.15 ``distributed/elastic/rendezvous/dynamic_rendezvous.py``, ``static_tcp_rendezvous.py``.
    """
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def _number(variable: str, default: int) -> int:
    try:
        return int(os.environ.get(variable, ""))
    except ValueError:
        return default
