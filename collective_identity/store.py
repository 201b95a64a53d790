"""Where does an identity live on a node? The only file that reads or writes ``node.meta``'s payload.

Dicts under ``node.meta["custom"]`` are shared: copies of a node alias them (deepcopy, graph_copy, node_copy,
the partitioner and CSE all do), so every write replaces ``custom`` by a fresh dict.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final, Literal

from torch import fx

from . import codes
from .canonical import fields, is_dict
from .codes import Code
from .identity import Identity, Verdict, parse, unreadable
from .roles import DEFAULT_ROLES, RoleTable
from .transports import Launch, launch_of

KEY: Final = "distributed.comm_semantics"
"""Payload key under ``node.meta["custom"]``, the only container that AOTAutograd carries along. RFC-0057."""
BACKWARD_KEY: Final = "distributed.comm_semantics.backward"
"""Payload key written by code that runs in backward: AOTAutograd's copy of forward metadata cannot hide it.
"""

_CUSTOM: Final = "custom"
_DROPPED: Final = MappingProxyType({KEY: f"{KEY}.dropped", BACKWARD_KEY: f"{BACKWARD_KEY}.dropped"})  # by payload key
_MEMBERS: Final = "collective_identity.members"
_PAYLOADS: Final = (KEY, BACKWARD_KEY)
_RECORDS: Final = tuple(_DROPPED.values())
_NO_PAYLOAD: Final = Verdict(None)
_NOT_A_START: Final = "not a start node: it launches no collective"

AbsenceKind = Literal["never_had", "malformed", "dropped", "not_captured"]


@dataclass(frozen=True, slots=True)
class Unreadable:
    """Stands for a payload that cannot be looked up: a key beside it raises when it is compared."""

    detail: str


@dataclass(frozen=True, slots=True)
class Absence:
    """Why a collective has no identity.

    Attributes:
        kind: ``"never_had"``, ``"malformed"`` (a payload is there and counts as absent), ``"dropped"`` (a
            transformation lost it on purpose) or ``"not_captured"`` (it never entered the graph).
        code: the reason; None for ``"never_had"``.
        pass_name: the pass that dropped it; None for other kinds.
        detail: expected and found, in words.
    """

    kind: AbsenceKind
    code: Code | None = None
    pass_name: str | None = None
    detail: str = ""


NEVER_HAD: Final = Absence("never_had")


@dataclass(frozen=True, slots=True)
class Member:
    """One collective that became part of a merged one: its node name and the identity it had."""

    name: str
    identity: Identity | None


@dataclass(frozen=True, slots=True)
class BucketRecord:
    """Provenance of a merged node: the pass and its members in bucket order. Shared, never copied."""

    pass_name: str
    members: tuple[Member, ...]


def runs_in_backward(node: fx.Node) -> bool:
    """Whether the node was emitted by backward code, and is no recomputed copy of a forward one.

    Proof of recompute is the partitioner's ``is_forward`` mark, which a copy keeps in the backward graph
    (PyTorch 2.13 ``_functorch/partitioners.py`` marks every node there ``autograd_backward``, copies too), or
    the name and checkpoint policy that ``remat_using_tags_for_fwd_loss_bwd_graph_pass.py`` gives its copies.
    """
    meta = node.meta
    place = meta.get("partitioner_tag")
    if place == "is_backward":
        return True
    if place == "is_forward" or meta.get("autograd_backward") is not True:
        return False
    return not (node.name.endswith("_recomputed") and meta.get("recompute") is not None)


def key_of(node: fx.Node) -> str:
    """The key that counts for this node: on a backward node only `BACKWARD_KEY` is read, elsewhere only `KEY`."""
    return BACKWARD_KEY if runs_in_backward(node) else KEY


def raw_payloads(node: fx.Node) -> dict[str, object]:
    """Every payload on the node by key, unvalidated, in a fresh dict; empty when there is none."""
    return _held(node, _PAYLOADS)


def raw_records(node: fx.Node) -> dict[str, object]:
    """Every payload and every recorded loss on the node by key, unvalidated, in a fresh dict."""
    return _held(node, _PAYLOADS + _RECORDS)


def has_payload(node: fx.Node) -> bool:
    """Whether any payload is on the node, valid or not, under either key."""
    return bool(_held(node, _PAYLOADS))


def payload_nodes(graph: fx.Graph) -> list[fx.Node]:
    """Every node of the graph with a payload, valid or not, in graph order."""
    return [node for node in graph.nodes if node.meta.get(_CUSTOM) is not None and has_payload(node)]


def verdict_of(node: fx.Node, *, roles: RoleTable = DEFAULT_ROLES) -> Verdict:
    """Validate the node's payload against its transport and group. Reads only."""
    launch = launch_of(node)
    if launch is None:
        return Verdict(None, None, _NOT_A_START)
    return verdict_for(node, launch, raw_payloads(node), roles=roles)


def verdict_for(
    node: fx.Node, launch: Launch, payloads: Mapping[str, object], *, roles: RoleTable = DEFAULT_ROLES
) -> Verdict:
    """Validate payloads as if they lay on start node ``node``: what normalisation will find there."""
    if not payloads:
        return _NO_PAYLOAD
    key = key_of(node)
    if key in payloads:
        raw = payloads[key]
        if type(raw) is Unreadable:
            return Verdict(None, codes.WRONG_TYPE, raw.detail)
        return parse(raw, transport=launch.transport, node_group=launch.group, roles=roles)
    if key == BACKWARD_KEY and KEY in payloads:
        return Verdict(None, codes.SEQ_NR_COPY, f"{node.name} runs in backward and has no {BACKWARD_KEY!r}")
    if key == KEY and BACKWARD_KEY in payloads:
        return Verdict(None, codes.BACKWARD_ONLY, f"{node.name} runs in forward and has no {KEY!r}")
    return _NO_PAYLOAD


def identity_of(node: fx.Node, *, roles: RoleTable = DEFAULT_ROLES) -> Identity | None:
    """The valid identity of a start node, else None: also for other nodes, which never carry one."""
    return verdict_of(node, roles=roles).identity


def absence_of(node: fx.Node, *, roles: RoleTable = DEFAULT_ROLES) -> Absence | None:
    """Why the node has no identity; None when it has one, or is no collective and never was.

    An operator that swallowed a collective (fusion) is no start node but keeps its ``dropped`` absence.
    """
    launch = launch_of(node)
    dropped = dropped_of(node)
    if launch is None:
        return dropped
    return absence_from(verdict_for(node, launch, raw_payloads(node), roles=roles), dropped)


def absence_from(verdict: Verdict, dropped: Absence | None) -> Absence | None:
    """The absence a verdict amounts to, given what was dropped on the node before."""
    if verdict.identity is not None:
        return None
    if dropped is not None:
        return dropped
    if verdict.code is not None:
        return Absence("malformed", verdict.code, None, verdict.detail)
    return NEVER_HAD


def dropped_of(node: fx.Node) -> Absence | None:
    """The loss recorded by `drop`, or None.

    It lies beside the payload and goes where that would go: through copies, retraces and caches, and not from a
    forward node to the backward node that AOTAutograd copies metadata to.
    """
    if node.meta.get(_CUSTOM) is None:
        return None
    record = _held(node, (_DROPPED[key_of(node)],))
    return _parse_record(next(iter(record.values()))) if record else None


def _parse_record(raw: object) -> Absence | None:
    if type(raw) is not dict:
        return None
    try:
        code, pass_name, detail = (raw.get(name) for name in ("code", "pass", "detail"))
    except Exception:  # as a payload, it may hold anything
        return None
    if type(code) is not str or code not in codes.CODES or type(pass_name) is not str or type(detail) is not str:
        return None
    return Absence("dropped", codes.CODES[code], pass_name, detail)


def stamp(node: fx.Node, identity: Identity) -> None:
    """Write an identity on a node, replacing any payload and any recorded loss.

    Its place is a start node; elsewhere it counts for nothing until `normalize` moves it to one. Whether
    role, transport and group agree is judged when it is read, as always. A backward node gets both keys, so
    that a further copy of forward metadata cannot hide it.

    Raises:
        TypeError: ``identity`` is no `Identity`.
    """
    if not isinstance(identity, Identity):
        raise TypeError(
            f"expected an Identity for node {node.name!r}, found {type(identity).__name__}; "
            "use clear or drop to remove one"
        )
    _write(node, _PAYLOADS + _RECORDS, {key: identity.to_payload() for key in _keys_for(node)})


def put(node: fx.Node, payloads: Mapping[str, object]) -> None:
    """Replace the node's payloads by these raw ones (none: remove them); other custom keys stay.

    Save one that refuses to be hashed or compared, which no fresh dict can hold.
    """
    _write(node, _PAYLOADS, {k: _fresh(v) for k, v in payloads.items()})


def clear(node: fx.Node) -> None:
    """Remove every payload and recorded loss from the node; it then never had one. Provenance stays."""
    if raw_records(node):
        _write(node, _PAYLOADS + _RECORDS, {})


def drop(node: fx.Node, code: Code, pass_name: str, detail: str = "") -> None:
    """Remove the node's identity on purpose and record why; provenance stays.

    Args:
        node: the node that is left, a collective or an operator that swallowed one.
        code: one of the ``DROPPED_*`` codes; from normalisation, what made the payload count as absent.
        pass_name: the pass that answers for it.
        detail: what was lost, in words.
    """
    record = {"code": code.id, "pass": pass_name, "detail": detail}
    _write(node, _PAYLOADS + _RECORDS, {_DROPPED[key]: dict(record) for key in _keys_for(node)})


def set_members(node: fx.Node, record: BucketRecord) -> None:
    """Record what a merged node was made of. The record is shared between the nodes that refer to it."""
    node.meta[_MEMBERS] = record


def members_of(node: fx.Node) -> BucketRecord | None:
    """What a merged node was made of, or None for an original collective."""
    record = node.meta.get(_MEMBERS)
    return record if isinstance(record, BucketRecord) else None


def forget_members(node: fx.Node) -> None:
    """Remove the record of what a merged node was made of."""
    node.meta.pop(_MEMBERS, None)


def _keys_for(node: fx.Node) -> tuple[str, ...]:
    """The keys to write on a node: on a backward one both, since a copy of forward metadata writes the first."""
    return _PAYLOADS if runs_in_backward(node) else (KEY,)


def _held(node: fx.Node, keys: Iterable[str]) -> dict[str, object]:
    """What ``custom`` holds under these keys, past whatever a subclass of dict does."""
    custom = node.meta.get(_CUSTOM)
    if custom is None or not is_dict(custom):
        return {}
    found: dict[str, object] = {}
    for key in keys:
        try:
            if dict.__contains__(custom, key):
                found[key] = dict.__getitem__(custom, key)
        except Exception as error:  # another key, of equal hash, may do anything when it is compared
            found[key] = Unreadable(unreadable(error))
    return found


def _write(node: fx.Node, remove: tuple[str, ...], add: Mapping[str, object]) -> None:
    """Give the node a fresh ``custom`` without the first keys and with the others."""
    custom = node.meta.get(_CUSTOM)
    held = custom if is_dict(custom) else {}
    try:
        kept = {k: v for k, v in dict.items(held) if type(k) is not str or k not in remove}
        odd = any(key in kept for key in remove)
    except Exception:
        odd = True
    if odd:
        kept = {k: v for k, v in dict.items(held) if type(k) is str and k not in remove}
    kept.update(add)
    if kept:
        node.meta[_CUSTOM] = kept
    else:
        node.meta.pop(_CUSTOM, None)


def _fresh(value: object) -> object:
    """A copy of a payload that shares no container with it; odd values are kept as they are."""
    held = fields(value)
    return value if held is None else {k: list(v) if type(v) is list else v for k, v in held.items()}
