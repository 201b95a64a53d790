"""Which reasons can a report give? One table of codes, read by logs, reports, docs and tests alike."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final, Literal

Severity = Literal["info", "warning", "error"]


@dataclass(frozen=True, slots=True)
class Code:
    """One reason, with a stable id.

    Attributes:
        id: stable id, ``"CI001"``; never reused for another meaning.
        slug: the contract's word for it, ``"missing_field"``; stable.
        severity: ``"info"`` (normal), ``"warning"`` (a payload or identity was lost or doubted) or
            ``"error"`` (the run must not go on).
        text: what happened, one sentence.
        remedy: what the reader can do, one sentence.
    """

    id: str
    slug: str
    severity: Severity
    text: str
    remedy: str

    def __str__(self) -> str:
        return f"{self.id} {self.slug}"


# A payload that counts as absent.
MISSING_FIELD: Final = Code(
    "CI001",
    "missing_field",
    "warning",
    "malformed payload: a required field is missing",
    "write version, role, source and producer; role_scope does",
)
WRONG_TYPE: Final = Code(
    "CI002",
    "wrong_type",
    "warning",
    "malformed payload: a field (or the payload itself) has the wrong type",
    "use primitives only: int version, str role, source, producer, group, param_group, list of str params",
)
UNKNOWN_VERSION: Final = Code(
    "CI003",
    "unknown_version",
    "warning",
    "malformed payload: schema version not known here",
    "write version 1, or install a collective_identity that knows the producer's version",
)
UNKNOWN_SOURCE: Final = Code(
    "CI004",
    "unknown_source",
    "warning",
    "malformed payload: source is neither 'explicit' nor 'inferred'",
    "write 'explicit' in a producer; only structure writes 'inferred'",
)
BAD_ROLE: Final = Code(
    "CI005",
    "bad_role",
    "warning",
    "malformed payload: the role is empty, not namespaced, or unknown in a closed namespace",
    "write a namespaced role such as 'fsdp.param_unshard' or 'user.metric_gather'",
)
ROLE_TRANSPORT: Final = Code(
    "CI006",
    "role_transport",
    "warning",
    "malformed payload: this role cannot be carried by this transport",
    "annotate each hop on its own; the role of a reduction is never that of the gather before it",
)
GROUP_MISMATCH: Final = Code(
    "CI007",
    "group_mismatch",
    "warning",
    "malformed payload: the producer's process group is not the collective's",
    "write the name of the group the collective runs on; same ranks, other communicator is another group",
)
GROUP_UNVERIFIED: Final = Code(
    "CI008",
    "group_unverified",
    "info",
    "the payload names a group, but the node's group does not resolve to a name",
    "nothing to do; the identity is used unchecked",
)
SEQ_NR_COPY: Final = Code(
    "CI009",
    "seq_nr_copy",
    "warning",
    "a backward node holds only a forward payload: AOTAutograd copied it by seq_nr, it proves nothing",
    "open a role_scope inside the backward too; it writes the backward key",
)

BACKWARD_ONLY: Final = Code(
    "CI010",
    "backward_only",
    "warning",
    "a forward node holds only a backward payload",
    "leave backward out of role_scope where the collective runs in forward",
)

# What normalisation did with payloads found off the start node.
MOVED_PAYLOAD: Final = Code(
    "CI011",
    "moved_payload",
    "info",
    "a payload beside a collective was moved to its start node",
    "nothing to do",
)
REMOVED_PAYLOAD: Final = Code(
    "CI012",
    "removed_payload",
    "info",
    "a payload on a node that launches no collective was removed",
    "nothing to do; narrow the annotated region to silence it",
)
AMBIGUOUS_PAYLOAD: Final = Code(
    "CI013",
    "ambiguous_payload",
    "warning",
    "a payload beside several collectives, or several payloads beside one, fits no single start node",
    "annotate each collective on its own",
)

STRUCTURE_MISMATCH: Final = Code(
    "CI020",
    "structure_mismatch",
    "warning",
    "the explicit role and the shape of the graph disagree; the explicit role is used",
    "check the producer if the role looks wrong",
)

# Deliberate losses.
DROPPED_MIXED: Final = Code(
    "CI030",
    "mixed",
    "warning",
    "collectives of different roles, or one without, became one collective without a role",
    "keep the pass from merging across roles, or give every member the same role",
)
DROPPED_OPAQUE: Final = Code(
    "CI031",
    "opaque",
    "info",
    "the collective became part of an operator that is no ordinary collective of its role",
    "nothing to do; the provenance record names the original",
)
DROPPED_DECOMPOSED: Final = Code(
    "CI032",
    "decomposed",
    "info",
    "the collective was split into parts that no longer serve the same communication purpose",
    "nothing to do; the provenance record names the original",
)
DROPPED_UNKNOWN: Final = Code(
    "CI033",
    "unknown",
    "warning",
    "an identity disappeared in a pass that does not say why",
    "teach the pass to preserve, combine or drop identities, or turn it off",
)

# Coverage.
NOT_CAPTURED: Final = Code(
    "CI040",
    "not_captured",
    "warning",
    "an expected collective never entered the graph",
    "torch.compile the whole model with backend='collective_identity'; one that no producer knows: "
    "fsdp_hooks.install(model) first",
)
FROM_CACHE: Final = Code(
    "CI041",
    "from_cache",
    "info",
    "the compiled artifact came from a cache: no pass ran, coverage is what the artifact recorded",
    "nothing to do; clear the compiler cache to see the passes run",
)
LITE_SKIPPED: Final = Code(
    "CI042",
    "lite_skipped",
    "info",
    "lite mode or use_post_grad_passes=False: passes that change the graph did not run",
    "leave that mode if the rewrites are wanted",
)
NOTHING_COMPILED: Final = Code(
    "CI043",
    "nothing_compiled",
    "warning",
    "the session ended without a compiled graph",
    "call fsdp_hooks.install(model) after fully_shard, then torch.compile it with backend='collective_identity'",
)
EAGER_ROLES: Final = Code(
    "CI044",
    "eager_roles",
    "info",
    "eager FSDP2 says its roles wherever something traces it; nothing was to be compiled",
    "nothing to do; to compile, use fsdp_hooks.install instead of use_functional_comms",
)
UNWAITED_INPUT: Final = Code(
    "CI045",
    "unwaited_input",
    "error",
    "a compiled function is given a collective's result that needs a gradient and that nobody has waited for; torch "
    "2.12 to 2.15 gives it zeros",
    "copy it first (x = x.clone()), or compile the collective too; docs/upstream/async-collective-input.md",
)

# Across ranks.
RANKS_DISAGREE: Final = Code(
    "CI050",
    "ranks_disagree",
    "error",
    "ranks of one process group compiled different collectives",
    "compare the listed rows; make every rank run the same model, options and versions",
)
AGREEMENT_TIMEOUT: Final = Code(
    "CI051",
    "agreement_timeout",
    "warning",
    "not every rank published its digest in time",
    "look at the log of the ranks that are missing: one that failed while compiling publishes nothing; "
    "raise agreement_timeout if ranks compile at very different times",
)
EXPECTED_MISMATCH: Final = Code(
    "CI052",
    "expected_mismatch",
    "error",
    "the collectives captured are not the ones the model's parameter groups call for",
    "look at the listed roles and parameter groups for what was lost, and compile the whole model",
)

_TABLE: Final = (
    MISSING_FIELD,
    WRONG_TYPE,
    UNKNOWN_VERSION,
    UNKNOWN_SOURCE,
    BAD_ROLE,
    ROLE_TRANSPORT,
    GROUP_MISMATCH,
    GROUP_UNVERIFIED,
    SEQ_NR_COPY,
    BACKWARD_ONLY,
    MOVED_PAYLOAD,
    REMOVED_PAYLOAD,
    AMBIGUOUS_PAYLOAD,
    STRUCTURE_MISMATCH,
    DROPPED_MIXED,
    DROPPED_OPAQUE,
    DROPPED_DECOMPOSED,
    DROPPED_UNKNOWN,
    NOT_CAPTURED,
    FROM_CACHE,
    LITE_SKIPPED,
    NOTHING_COMPILED,
    EAGER_ROLES,
    UNWAITED_INPUT,
    RANKS_DISAGREE,
    AGREEMENT_TIMEOUT,
    EXPECTED_MISMATCH,
)

def by_id(*codes: Code) -> Mapping[str, Code]:
    """A read-only table of codes."""
    return MappingProxyType({code.id: code for code in codes})


CODES: Final = by_id(*_TABLE)
"""Every code by id, read-only."""
