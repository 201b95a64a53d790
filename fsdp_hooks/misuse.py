"""What is said where a forward, or whoever changes a captured module, meets a parameter that is not as it expects."""

from __future__ import annotations

from .errors import InstallError

_MIXED = "got mixed torch.Tensor and DTensor"  # torch/distributed/tensor/_dispatch.py, read in 2.11.0 to 2.15.0


def replaced(fqn: str, found: str) -> str:
    """A parameter was taken away, or something else put in its place, after capture."""
    return (
        f"parameter {fqn!r}: expected the one that was sharded, found {found} in its place: prune, weight_norm and "
        "whatever else takes parameters away come before fully_shard or data_parallel"
    )


def copied(kind: str) -> str:
    """A part of an installed model was to be copied."""
    return (
        f"{kind}: expected no copy of a part of an installed model, as FSDP2 has none of the whole: use its "
        "state_dict(), or call fsdp_hooks.uninstall first"
    )


def explained(error: BaseException, unit: str) -> InstallError | None:
    """The error for a forward that computed with a shard; None for any other, and for one explained before."""
    if not isinstance(error, RuntimeError) or isinstance(error, InstallError) or _MIXED not in str(error):
        return None
    where = f"module {unit!r}" if unit else "the root module"
    return InstallError(
        f"{where}: expected its forward to read full parameters, found a sharded one among plain tensors ({error}): "
        "a parameter is full as an attribute of its module while the fully_shard module around that runs; do not reach "
        "it by parameters() or named_parameters(), nor after that module returned (put both under one fully_shard)"
    )
