"""What is each collective for? Roles, payloads, and what transformations do to them."""

from __future__ import annotations

from .classify import Classification, Mismatch, classify, classify_report
from .codes import CODES, Code
from .digest import CollectiveRow, collective_table, digest, payload_digest, payload_groups
from .identity import Identity, Source, Verdict, parse
from .merge import combine
from .normalize import NormalizationPlan, apply_normalization, normalize, plan_normalization
from .reporting import Report
from .roles import DEFAULT_ROLES, GRAD_REDUCE_SHARD, GRAD_REPLICATE_REDUCE, PARAM_UNSHARD, RoleTable
from .scope import role_scope
from .session import Handle, Session, enable, report
from .store import Absence, BucketRecord, Member, absence_of, clear, identity_of, members_of, stamp
from .transports import Launch, Transport, launch_of, start_nodes
from .version import __version__

__all__ = [
    "CODES",
    "DEFAULT_ROLES",
    "GRAD_REDUCE_SHARD",
    "GRAD_REPLICATE_REDUCE",
    "PARAM_UNSHARD",
    "Absence",
    "BucketRecord",
    "Classification",
    "Code",
    "CollectiveRow",
    "Handle",
    "Identity",
    "Launch",
    "Member",
    "Mismatch",
    "NormalizationPlan",
    "Report",
    "RoleTable",
    "Session",
    "Source",
    "Transport",
    "Verdict",
    "__version__",
    "absence_of",
    "apply_normalization",
    "classify",
    "classify_report",
    "clear",
    "collective_table",
    "combine",
    "digest",
    "enable",
    "identity_of",
    "launch_of",
    "members_of",
    "normalize",
    "parse",
    "payload_digest",
    "payload_groups",
    "plan_normalization",
    "report",
    "role_scope",
    "stamp",
    "start_nodes",
]
