"""Do the ranks that share a process group run the same collectives? Asked before a graph's first run.

Ranks that disagree hang or compute garbage; here they stop within a bound and each says why. The exchange
goes through the job's store and nothing else (keys: `board`): no collective, no blocking call, only `set` and
`check` until a key is there. Every rank publishes one record per graph when its compile ends, and compares it,
pair by pair, with the records of the ranks that are members of a group its rows run on. A pair compares only
what runs on groups the two share, in program order: pipeline stages with different graphs agree, two groups in
swapped order do not. A difference that two ranks found stops every other rank of the job at its next check.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from .board import BoardState as AgreementState
from .comparison import RanksDisagree
from .digest import CollectiveRow
from .exchange import AgreementResult, Exchange

__all__ = ["AgreementResult", "AgreementState", "RanksDisagree", "agree", "no_real_group"]


def agree(
    rows: Sequence[CollectiveRow],
    *,
    kind: str,
    cached: bool,
    tag: str,
    timeout: float,
    run: str | None = None,
    groups: Sequence[str] | None = None,
    state: AgreementState | None = None,
    name: str = "",
) -> AgreementResult:
    """Compare this graph with the same graph of every rank that shares one of its process groups.

    Args:
        rows: the collectives of the graph (`collective_table`), in graph order; none for a cached graph.
        kind: "forward", "backward", "joint", "inference" or "step".
        cached: the graph came from a compile cache. Its rows are not compared, its tag is.
        tag: digest of the captured graph and every option that can change it. Always compared.
        timeout: seconds to wait for peers; 0 turns the check off.
        run: a name for the run in the store's keys; torchrun's run id and restart count by default.
        groups: process-group names the graph runs on, where they are known without rows.
        state: counters of the session; the current session's by default.
        name: of the graph, for messages.

    Raises:
        RanksDisagree: on every rank that shares a group on which a difference was found.
    """
    if timeout <= 0:
        return AgreementResult("off", "agreement_timeout is 0")
    reason = no_real_group()
    if reason is not None:
        return AgreementResult("skipped", reason)
    if state is None:
        from .session import ensure

        state = ensure().ledger.agreement_state
    return Exchange(rows, kind=kind, cached=cached, tag=tag, run=run, groups=groups, state=state, name=name).agree(
        timeout
    )


def no_real_group() -> str | None:
    """Why there is nobody to compare with, None when there is."""
    distributed = torch.distributed
    if not distributed.is_available() or not distributed.is_initialized():
        return "no process group"
    if distributed.get_world_size() == 1:
        return "one rank"
    if distributed.get_backend() == "fake":
        return "a fake process group"
    return None
