"""Why did a reduce-scatter stay as it is? The codes of every refusal of dedup, in one table."""

from __future__ import annotations

from typing import Final

from collective_identity.codes import Code, by_id

OTHER_FORM: Final = Code(
    "DD001", "other_form", "info",
    "it is not the plain functional form (out, coalesced, wrapped or low-contention)",
    "run dedup before the pass that rewrites collectives",
)
GROUP_UNKNOWN: Final = Code(
    "DD002", "group_unknown", "warning",
    "its process group, or the size of it, is no constant of the graph",
    "pass the group by name",
)
NO_META: Final = Code(
    "DD003", "no_meta", "warning",
    "a tensor of the sum has no meta['val'], so that nothing is proved",
    "trace with fake tensors, or run FakeTensorUpdater before the pass",
)
NOT_LINEAR: Final = Code(
    "DD004", "not_linear", "info",
    "its reduce operation does not distribute over addition in its element type",
    "nothing to do: only sum, and avg of floating-point numbers, do",
)
OTHER_USERS: Final = Code(
    "DD005", "other_users", "info",
    "its result is used by something besides one addition",
    "nothing to do",
)
NOT_ADDED: Final = Code(
    "DD006", "not_added", "info",
    "its result is not an addend of a sum",
    "nothing to do",
)
SCALED: Final = Code(
    "DD007", "scaled", "info",
    "the addition multiplies one addend (alpha)",
    "nothing to do",
)
IN_PLACE: Final = Code(
    "DD008", "in_place", "info",
    "the addition writes into one of its addends",
    "functionalise the graph first",
)
UNEQUAL: Final = Code(
    "DD009", "unequal", "info",
    "the addends differ in shape, element type or device: the addition broadcasts or promotes",
    "nothing to do",
)
ALONE: Final = Code(
    "DD010", "alone", "info",
    "no other addend of its sum is a reduce-scatter that could be merged",
    "nothing to do",
)
INCOMPATIBLE: Final = Code(
    "DD011", "incompatible", "info",
    "the other reduce-scatters of its sum differ in group, reduce operation or half of the step",
    "nothing to do",
)
OTHER_ROLE: Final = Code(
    "DD012", "other_role", "info",
    "the other reduce-scatters of its sum have another role, or none, and mixed='refuse'",
    "use mixed='drop' if the merged collective may lose its role",
)
MUTATED: Final = Code(
    "DD013", "mutated", "info",
    "a tensor that the sum reads is written between its first reduce-scatter and the sum",
    "functionalise the graph first",
)

REASONS: Final = by_id(
    OTHER_FORM, GROUP_UNKNOWN, NO_META, NOT_LINEAR, OTHER_USERS, NOT_ADDED, SCALED, IN_PLACE, UNEQUAL,
    ALONE, INCOMPATIBLE, OTHER_ROLE, MUTATED,
)
"""Every refusal code by id."""
