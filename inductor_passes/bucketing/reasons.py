"""Why was a collective left as it is? The codes of every refusal, in one table."""

from __future__ import annotations

from typing import Final

from collective_identity.codes import Code, by_id

NOT_REQUESTED: Final = Code(
    "BK001", "not_requested", "info",
    "its transport was not asked for, or has no bucketed form",
    "name it in kinds (all_gather, reduce_scatter, all_reduce)",
)
NO_ROLE: Final = Code(
    "BK002", "no_role", "info",
    "it has no identity; unlabelled collectives are never merged",
    "let the producer write a payload (role_scope), or look at absence_of(node) for what was lost",
)
OTHER_ROLE: Final = Code(
    "BK003", "other_role", "info",
    "its role is outside fsdp., and only fsdp.* is bucketed",
    "nothing to do: the role says that it is not FSDP's",
)
OTHER_FORM: Final = Code(
    "BK004", "other_form", "info",
    "it is not the plain functional form (out, coalesced, in-place, wrapped or low-contention)",
    "run bucketing before the pass that rewrites collectives",
)
GROUP_UNKNOWN: Final = Code(
    "BK005", "group_unknown", "warning",
    "its process group, or the size of it, is no constant of the graph",
    "pass the group by name",
)
NO_META: Final = Code(
    "BK006", "no_meta", "warning",
    "the tensor it sends or yields has no meta['val'], so its size is unknown",
    "trace with fake tensors, or run FakeTensorUpdater before the pass",
)
SYMBOLIC_SIZE: Final = Code(
    "BK007", "symbolic_size", "info",
    "its size is symbolic without a hint: it depends on data, and is only known when the graph runs",
    "nothing to do",
)
LAYOUT: Final = Code(
    "BK008", "layout", "info",
    "its tensor is not strided, so it cannot be laid next to another",
    "nothing to do",
)
OTHER_USERS: Final = Code(
    "BK009", "other_users", "warning",
    "something other than a plain wait uses the start node",
    "wait for the collective before it is used",
)
NO_WAIT: Final = Code(
    "BK010", "no_wait", "warning",
    "nothing waits for it",
    "remove the collective, or wait for it",
)
SIZES_DISAGREE: Final = Code(
    "BK011", "sizes_disagree", "warning",
    "what it yields is not what its input and group size make of it",
    "recompute meta['val'], or check the group size given to the operator",
)
MUTATED: Final = Code(
    "BK012", "mutated", "info",
    "a tensor that a member sends is written between it and the others of its key",
    "functionalise the graph first",
)
DEPENDS: Final = Code(
    "BK013", "depends", "info",
    "other bucketable collectives come before it than before the others of its key, and merging across such levels is "
    "not tried: one might wait for itself",
    "nothing to do",
)
PHASE: Final = Code(
    "BK014", "phase", "info",
    "the others of its key run in the other half of the step (forward or backward)",
    "nothing to do",
)
OVER_CAP: Final = Code(
    "BK015", "over_cap", "info",
    "no other member fits beside it under the cap",
    "raise cap_mb",
)
INCOMPATIBLE: Final = Code(
    "BK016", "incompatible", "info",
    "the other collectives of its role differ in something that a bucket must share",
    "nothing to do",
)
ALONE: Final = Code(
    "BK017", "alone", "info",
    "it is the only collective of its role and transport",
    "nothing to do",
)
REDUCE_OP: Final = Code(
    "BK018", "reduce_op", "warning",
    "its reduce operation is no name, so that nobody can say whether another's is the same",
    "pass the operation by name, \"sum\" or \"avg\"",
)
APART: Final = Code(
    "BK019", "apart", "info",
    "other units are needed between it and the others of its unit, so that together one would wait for nothing",
    "nothing to do; without overlap they share a bucket",
)

REASONS: Final = by_id(
    NOT_REQUESTED, NO_ROLE, OTHER_ROLE, OTHER_FORM, GROUP_UNKNOWN, NO_META, SYMBOLIC_SIZE, LAYOUT,
    OTHER_USERS, NO_WAIT, SIZES_DISAGREE, MUTATED, DEPENDS, PHASE, OVER_CAP, INCOMPATIBLE, ALONE, REDUCE_OP,
    APART,
)
"""Every refusal code by id."""
