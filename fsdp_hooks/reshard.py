"""How the producer says that a gathered parameter must not outlive the forward.

A mark of its own beside the identity payload: whether to free is FSDP2's option, not part of *why* a gather was
issued. The recompute pass of ``inductor_passes`` reads it; any other consumer may ignore it.
"""

from __future__ import annotations

RESHARD_KEY = "distributed.fsdp.reshard_after_forward"


def reshard_mark(reshard_after_forward: bool) -> dict[str, object]:
    """The annotation for ``torch.fx.traceback.annotate``; empty when the parameter stays until backward."""
    return {RESHARD_KEY: True} if reshard_after_forward else {}
