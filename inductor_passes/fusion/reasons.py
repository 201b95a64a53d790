"""Why was a collective not fused with a matrix product? The codes of every refusal, in one table."""

from __future__ import annotations

from typing import Final

from collective_identity.codes import Code, by_id

OTHER_TRANSPORT: Final = Code(
    "FU001", "other_transport", "info",
    "no fused operator exists for its transport or form",
    "nothing to do: only plain all-gathers and reduce-scatters fuse",
)
FSDP: Final = Code(
    "FU002", "fsdp", "info",
    "it is FSDP's, by its identity or by the shape of the graph",
    "if it is not, let its producer say so: role_scope('tp.activation_gather', producer=...)",
)
OTHER_ROLE: Final = Code(
    "FU003", "other_role", "info",
    "its role is outside tp.",
    "nothing to do: the role says that it is not tensor parallelism's",
)
LOST_ROLE: Final = Code(
    "FU004", "lost_role", "warning",
    "it had a payload that is malformed or was dropped, so that nobody knows what it is",
    "look at absence_of(node) for what was lost",
)
GROUP_UNKNOWN: Final = Code(
    "FU005", "group_unknown", "warning",
    "its process group, or the size of it, is no constant of the graph",
    "pass the group by name",
)
NOT_ENABLED: Final = Code(
    "FU006", "not_enabled", "info",
    "symmetric memory is not enabled for its group, or the fused operators do not exist here",
    "torch.distributed._symmetric_memory.enable_symm_mem_for_group(group_name) before compiling",
)
NO_META: Final = Code(
    "FU007", "no_meta", "warning",
    "a tensor has no meta['val'], or a symbolic size",
    "trace with fake tensors, or mark the dimension static",
)
NO_MATMUL: Final = Code(
    "FU008", "no_matmul", "info",
    "what it gathers is not the left operand of a matrix product, or what it scatters is not the result of one",
    "nothing to do",
)
OTHER_USERS: Final = Code(
    "FU009", "other_users", "info",
    "something besides the product or the scatter uses what lies between",
    "nothing to do",
)
MUTATED: Final = Code(
    "FU010", "mutated", "info",
    "an operand is written between the place where it is read now and the place of the fused operator",
    "functionalise the graph first",
)
REDUCE_OP: Final = Code(
    "FU011", "reduce_op", "info",
    "the fused operator reduces by sum or avg only",
    "nothing to do",
)

POLICY: Final = Code(
    "FU012", "policy", "info",
    "the operator policy of its device allows no fused form for its role",
    'collectives={"tp.*": ["fused"]} in the policy allows it',
)

REASONS: Final = by_id(
    OTHER_TRANSPORT, FSDP, OTHER_ROLE, LOST_ROLE, GROUP_UNKNOWN, NOT_ENABLED, NO_META, NO_MATMUL, OTHER_USERS,
    MUTATED, REDUCE_OP, POLICY,
)
"""Every refusal code by id."""
